"""Proximal policy optimization from a reward model."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.core import errors, kl, losses, masking, memory, records, results, shaping
from lightning_rlhf.core import policy_losses as formulas
from lightning_rlhf.core.experience import make_experience, minibatches, token_rewards, whitened
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.io.user_code import code_digest, enter_formulas
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import optim, supervised
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.parallel.sharding import clear
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout import collector, score
from lightning_rlhf.rollout.sampler import Sampler

TRAINING, EVALUATION, RESAMPLING, GREEDY = 0, 1, 2, 3  # numbers of the random-number streams


class PPOModule(optim.StageModule):
    """One batch of prompts is one iteration: sample, score, then several optimizer steps.

    Everything random in iteration k is drawn from a generator seeded with (seed, k), so that a
    run repeats exactly and a resumed one needs no random state.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593; Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155
    """

    config: PPOConfig

    def __init__(
        self,
        roles: Roles,
        reward: Reward,
        config: PPOConfig,
        *,
        critic: score.Critic | None,
        chat: ChatFormat,
        prompts: Mapping[str, Sequence[dict[str, Any]]],
        seed: int,
        microbatch: memory.MicrobatchSize | None = None,
        sampler: Sampler | None = None,
        stage: str = "ppo",
        replicas: Replicas = ONE,
        ptx: supervised.PTX | None = None,
    ) -> None:
        """Build the module before its first iteration.

        Args:
            critic: one where `config.has_critic`, else None.
            prompts: split ("train", "val") -> rows of the data.
            microbatch, stage, replicas: as for `StageModule`; the reward's model shares the former.
            sampler: sampler of the responses; None builds the one that `config.rollout` names.
            ptx: demonstrations of ppo.ptx_coef; None for a module that learns from none.
        """
        super().__init__(stage, config, replicas, microbatch)
        allowed = f"one for {stage}.advantage=gae, else None; it is {config.advantage}"
        errors.require((critic is not None) == config.has_critic, "the critic", critic, allowed)
        self.roles = roles
        self.critic = critic
        if critic is not None:
            self.critic_roles = critic.roles  # so that Lightning moves and saves it
        self.seed = seed
        self.chat = chat
        self.collector = collector.Collector(
            roles=roles, reward=reward, config=config, critic=critic, chat=chat, prompts=prompts,
            microbatch=self.microbatch, sampler=sampler, stage=stage, replicas=replicas,
        )  # fmt: skip
        self.ptx = ptx
        own = {key: getattr(config, key) for key in formulas.FORMULAS}
        self.digests = {key: code_digest(name) for key, name in own.items() if ":" in name}
        """Key of a formula of the user's -> hash of its code."""
        self.update_number = 0
        """Number of the current update in its iteration, from 0."""
        self.further: Callable[[int, int], records.Prompts] | None = None
        """Function that gives prompts for ppo.resample_groups, as `StageData.further`."""
        self.replaced: tuple[records.Rollout, ...] = ()
        """Responses that ppo.resample_groups replaced in this iteration, round by round."""
        self.kl_coef = config.kl_coef
        """KL coefficient of the current iteration."""
        self.moments = shaping.ScoreMoments.none(len(reward.terms))
        """Moments of all scores so far."""
        self.mean_return = 0.0
        """Decayed sum of (1 - baseline_decay) * mean return so far, for advantage=reinforce."""
        self.stopped = False
        """True if target_kl prevented the latest update, which ends the epochs of its iteration."""
        self.last_lap = time.perf_counter()
        """Time of the last call of `lap`."""
        self.experience: records.Experience | None = None
        """Experience of the current or the latest iteration; None before the first."""
        roles.set_role(POLICY)

    def training_step(
        self, prompts: records.Prompts, batch_idx: int
    ) -> dict[str, results.IterationResult]:
        """Sample responses to the prompts and score them, then learn from them."""
        other_s = self.lap()
        generator = self.generator(TRAINING, self.iteration)
        rollout = self.roll_out(prompts, generator)
        rollout_s = self.lap()
        experience = self.experience = self.make_experience(rollout)
        score_s = self.lap()
        updates = tuple(map(self.update, self.minibatches(experience, generator)))
        padding = score.padding_share(experience.mask, self.microbatch.rows)
        seconds = {"rollout": rollout_s, "score": score_s, "update": self.lap(), "other": other_s}
        coefs, replaced = (self.kl_coef, kl.ent_coef(self.config, self.iteration)), self.replaced
        result = results.IterationResult(experience, updates, *coefs, padding, seconds, replaced)
        self.end_iteration(experience)
        self.log_headline(result.headline)
        return {results.RESULT: result}

    def lap(self) -> float:
        """Return the seconds since the last call."""
        before, self.last_lap = self.last_lap, time.perf_counter()
        return self.last_lap - before

    def roll_out(
        self, prompts: records.Prompts, generator: torch.Generator, *, evaluates: bool = False
    ) -> records.Rollout:
        """Return the responses of an iteration, or one to each prompt of an evaluation.

        Raises LogitsError where none can be drawn, which names the iteration.
        """
        count, where = self.config.samples_per_prompt, f"iteration {self.iteration + 1}"
        if evaluates:
            count, where = 1, f"the evaluation after iteration {self.iteration}"
        try:
            return self.collector.roll_out(prompts, generator, count, self.weights_version)
        except errors.LogitsError as error:
            raise errors.LogitsError(
                where, iterations=self.iteration, nonfinite=self.nonfinite
            ) from error

    def make_experience(self, rollout: records.Rollout) -> records.Experience:
        """Return what an iteration learns from: responses with scores, rewards per token,
        advantages and returns; ppo.resample_groups replaces some of the responses.

        Raises: RewardError where the reward gives no numbers, which names the iteration.
        """
        config, draw = self.config, self.sample_further
        sizes = config.samples_per_prompt, config.resample_groups
        found = records.resample_alike(rollout, self.score(rollout), *sizes, draw)
        rollout, scores, self.replaced = found
        rewards, terms = self.shape_rewards(rollout, scores), self.collector.reward.terms
        baseline = self.baseline(rollout, scores)
        return make_experience(rollout, scores, config, rewards, terms=terms, baseline=baseline)

    def score(self, rollout: records.Rollout) -> records.Scores:
        """Return the scores of responses to training prompts; raises as `make_experience`."""
        try:
            return self.collector.score(self.collector.decode(rollout, "train"))
        except errors.RewardError as error:
            raise errors.RewardError(f"iteration {self.iteration + 1}: {error}") from error

    def sample_further(self, count: int, number: int) -> tuple[records.Rollout, records.Scores]:
        """Return responses to `count` further prompts, and scores, of a round of `resample_alike`;
        prompts and random numbers are a function of the seed, the iteration and the round."""
        assert self.further is not None
        place = self.iteration * self.config.resample_groups + number
        prompts = self.further(place, count).to(self.device)
        rollout = self.roll_out(prompts, self.generator(RESAMPLING, place))
        return rollout, self.score(rollout)

    def baseline(
        self, rollout: records.Rollout, scores: records.Scores
    ) -> Float[Tensor, " B"] | float:
        """Return the baseline of each response, or of all, by ppo.advantage.

            remax       score for PPO of the greedy response to the prompt, without the KL
            reinforce   sum_j d^j M_(k-j) / sum_j d^j,   d = baseline_decay, j = 1 .. k

        M_k: mean return of iteration k, counted from 0; the sum is 0 in the first iteration.
        """
        config = self.config
        if config.advantage == "reinforce" and self.iteration > 0:
            return self.mean_return / (1 - config.baseline_decay**self.iteration)
        if config.advantage != "remax":
            return 0.0
        generator = self.generator(GREEDY, self.iteration)
        greedy = self.collector.greedy(rollout, generator, self.weights_version)
        found = self.score(greedy)
        moments, terms = self.moments.including(scores), self.collector.reward.terms
        rewards = token_rewards(greedy, found, config, kl_coef=0.0, moments=moments, terms=terms)
        return rewards.sum(dim=1).repeat_interleave(config.samples_per_prompt)

    def shape_rewards(
        self, rollout: records.Rollout, scores: records.Scores
    ) -> Float[Tensor, "B T"]:
        """Return the reward of each response token, 0 on padding, as `token_rewards`.

        A subclass overrides it to reward tokens of its own choice.
        """
        moments, terms = self.moments.including(scores), self.collector.reward.terms
        return token_rewards(
            rollout, scores, self.config, kl_coef=self.kl_coef, moments=moments, terms=terms
        )

    def minibatches(
        self, experience: records.Experience, generator: torch.Generator
    ) -> Iterator[records.Experience]:
        """Yield ppo_epochs passes of minibatches that the generator shuffles, until target_kl."""
        config = self.config
        parts = minibatches(experience, config.ppo_epochs, config.minibatch_size, generator)
        for self.update_number, minibatch in enumerate(parts):
            yield whitened(minibatch) if config.whiten_advantages == "minibatch" else minibatch
            if self.stopped:
                return

    def end_iteration(self, experience: records.Experience) -> None:
        """Advance, after the updates, all that changes from one iteration to the next."""
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        self.moments = self.moments.including(experience)
        if self.config.advantage == "reinforce":
            decay, mean = self.config.baseline_decay, experience.returns[:, 0].mean().item()
            self.mean_return = decay * self.mean_return + (1 - decay) * mean
        self.kl_coef = kl.next_kl_coef(
            self.kl_coef, experience.kl, self.config, iteration=self.iteration
        )
        self.iteration += 1

    def update(self, minibatch: records.Experience) -> records.UpdateStats:
        """Make one optimizer step on the minibatch, unless a limit prevents it.

        Raises: NotFiniteError as `check_finite`; ConfigError where a limit compares
            what a subclass's `loss_terms` did not measure.
        """
        while True:
            with self.microbatch.halving():
                share = vars(self.accumulate(minibatch))
                break
            torch.cuda.empty_cache()  # what the failed passes held is free only now
        shares, grad_norm = self.sum_and_clip(torch.stack([*share.values()]))
        parts = [records.PPOTerms(**dict(zip(share, row, strict=True))) for row in shares]
        terms = losses.sum_terms(parts)
        # The only wait for the device in an update, for all that the limits compare.
        compared = [terms.loss, grad_norm, terms.approx_kl, terms.ratio_mean]
        loss, norm, approx_kl, ratio_mean = torch.stack(compared).cpu()
        # Before the limits: an infinite ratio exceeds one, and must still count as not finite.
        try:
            is_finite = self.check_finite(torch.where(ratio_mean.isinf(), ratio_mean, loss), norm)
        except errors.NotFiniteError as error:
            error.rewards_overflow = shaping.rewards_overflow(self.experience or minibatch)
            raise
        limits = self.config.target_kl, self.config.max_ratio
        self.stopped = is_finite and self.exceeds(limits[0], approx_kl, "approx_kl", "target_kl")
        skipped = is_finite and self.exceeds(limits[1], ratio_mean, "ratio_mean", "max_ratio")
        if is_finite and not (self.stopped or skipped):
            self.optimizers().step()  # type: ignore[union-attr]
        return records.UpdateStats(
            **vars(terms),
            grad_norm=grad_norm,
            stopped=terms.loss.new_full((), self.stopped),
            skipped=terms.loss.new_full((), skipped),
            nonfinite=terms.loss.new_full((), not is_finite),
        )

    def exceeds(self, limit: float | None, found: Tensor, field: str, key: str) -> bool:
        """Return whether a field of the terms, 0-d, is above the limit of a key; False without one.

        Raises: ConfigError for NaN, a field that a subclass's `loss_terms` did not measure.
        """
        if limit is not None and found.isnan():
            raise errors.ConfigError(
                f"{key} is {limit:g}, but {type(self).__name__}.loss_terms() measured no {field} "
                f"to compare with it; allowed: {key}=null, or PPOTerms with {field}"
            )
        return limit is not None and bool(found > limit)

    def accumulate(self, minibatch: records.Experience) -> records.PPOTerms:
        """Backpropagate this process's rows of a minibatch, one micro-batch after another.

        Returns: their shares of the terms of the minibatch.
        """
        config, size, rows = self.config, self.microbatch.rows, self.replicas.rows
        policy_learns = self.iteration >= config.critic_warmup
        minibatch = minibatch.select(records.row_lengths(minibatch)[:, 0].argsort(stable=True))
        mask, tokens = minibatch.response_mask, minibatch.response_mask.sum()
        weights = losses.token_weights(
            mask, config.loss_reduction, max_response_tokens=config.max_response_tokens
        )
        critic_apart = self.critic is not None and not self.critic.shares_trunk
        clear(self.optimizers())
        loss, shares = torch.zeros((), device=self.device), []
        minibatch, weights = minibatch.select(rows), weights[rows]
        for micro_batch, weight in zip(minibatch.split(size), weights.split(size), strict=False):
            loss_terms = partial(self.loss_terms, micro_batch, weight, tokens, self.kl_coef)
            with torch.set_grad_enabled(policy_learns):
                hidden = score.response_hidden(self.roles, micro_batch)
                policy: losses.PolicyOutputs | None = score.policy_outputs(
                    self.roles, hidden, micro_batch, config
                )
            parts, values = [], None
            if policy_learns and critic_apart:
                # Two backward passes: the first frees the policy's activations for the second.
                parts.append(self.backpropagate(loss_terms(policy=policy, values=None)))
                policy = None
            if self.critic is not None:
                values = self.critic.values(micro_batch, policy_hidden=hidden)
            # Where the critic learns alone, the policy's outputs have no graph.
            parts.append(self.backpropagate(loss_terms(policy=policy, values=values)))
            for part in parts:  # in the order of the passes
                loss = loss + part.loss
            shares.append(parts[0] if len(parts) == 1 else losses.sum_terms(parts))
        ptx_loss = torch.zeros_like(loss)
        if self.ptx is not None and policy_learns:
            demonstrations = self.ptx.batch(self.iteration, self.update_number)
            ptx_loss = self.ptx.backpropagate(self, demonstrations, size)
            loss = loss + config.ptx_coef * ptx_loss
        zeros = {field.name: torch.zeros_like(loss) for field in fields(records.PPOTerms)}
        terms = losses.sum_terms(shares or [records.PPOTerms(**zeros)])
        return replace(terms, loss=loss, ptx_loss=ptx_loss)

    def loss_terms(
        self,
        micro_batch: records.Experience,
        weights: Float[Tensor, "B T"],
        tokens: Int[Tensor, ""],
        kl_coef: float,
        *,
        policy: losses.PolicyOutputs | None,
        values: Float[Tensor, " N"] | None,
    ) -> records.PPOTerms:
        """Return the loss and statistics of a micro-batch; arguments as for `ppo_terms`.

        `importance_factors` are factors of the policy's losses where ppo.importance_cap or _mask
        asks for them. A subclass adds terms of its own to the loss here. With a critic apart it is
        called twice a micro-batch: with `policy` alone, then with `values` alone.
        """
        policy_losses = clipped = None
        if policy is not None:
            found = self.policy_losses(policy, micro_batch)
            if isinstance(found, Tensor):  # of a subclass
                found = formulas.PolicyLosses(losses=found)
            policy_losses, clipped = found.losses, found.clipped
        factors = losses.importance_factors(micro_batch, self.config, self.stage)
        if policy_losses is not None and factors is not None:
            policy_losses = policy_losses * masking.picker(records.known_mask(micro_batch))(factors)
        return losses.ppo_terms(
            micro_batch, weights, tokens, self.config, kl_coef=kl_coef, policy=policy,
            ent_coef=kl.ent_coef(self.config, self.iteration),
            policy_losses=policy_losses, values=values, clipped=clipped,
        )  # fmt: skip

    def policy_losses(
        self, policy: losses.PolicyOutputs, batch: records.Experience
    ) -> formulas.PolicyLosses | Float[Tensor, " N"]:
        """Return the policy's loss at each response token of a micro-batch, by ppo.policy_loss.

        A subclass returns another here, such as one that reads more than a `PolicyBatch` has.
        """
        mask = records.known_mask(batch)
        pick = masking.picker(mask)
        found = formulas.POLICY_LOSSES[self.config.policy_loss](
            formulas.PolicyBatch(
                logprobs=masking.placed(policy.logprobs, mask),
                old_logprobs=batch.old_logprobs,
                ref_logprobs=batch.ref_logprobs,
                advantages=batch.advantages,
                mask=batch.response_mask,
                config=self.config,
            )
        )
        clipped = None if found.clipped is None else pick(found.clipped)
        return formulas.PolicyLosses(losses=pick(found.losses), clipped=clipped)

    def backpropagate(self, terms: records.PPOTerms) -> records.PPOTerms:
        """Add the gradient of the terms' loss; return them without a graph.

        Raises: ConfigError where a subclass's `loss_terms` returned no loss to backpropagate.
        """
        loss = terms.loss if isinstance(terms, records.PPOTerms) else None
        if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad):
            raise errors.ConfigError(
                f"{type(self).__name__}.loss_terms() returned {terms!r:.300}; allowed: PPOTerms "
                "whose loss is a tensor of shape [] with gradient"
            )
        return replace(terms, loss=self.add_gradient(loss))

    def validation_step(  # type: ignore[override]
        self, prompts: records.Prompts, batch_idx: int
    ) -> results.EvaluationResult:
        """Sample and score held-out prompts, with the same random numbers at every evaluation.

        Raises: LogitsError where nothing can be sampled, after which iteration.
        """
        rollout = self.roll_out(prompts, self.generator(EVALUATION, batch_idx), evaluates=True)
        decoded = self.collector.decode(rollout, "val")
        scores = self.collector.score(decoded)
        result = results.EvaluationResult(rollout=rollout, decoded=decoded, scores=scores)
        self.log_headline(result.headline, len(prompts))
        return result

    def setup(self, stage: str) -> None:
        """Find the formulas of the user's, which an export does not load."""
        enter_formulas(formulas.FORMULAS, self.config, self.stage)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        rounds, has_more = self.config.resample_groups, self.further is not None
        allowed = "0 for a module whose `further` is None, which gives it prompts"
        errors.require(rounds == 0 or has_more, f"{self.stage}.resample_groups", rounds, allowed)
        self.lap()

    def generator(self, stream: int, number: int) -> torch.Generator:
        """Return a new generator on the CPU, a pure function of (seed, stream, number)."""
        return optim.seeded(self.seed, stream, number)

    def configure_optimizers(self) -> Any:
        groups = [(1.0, self.roles.trained_by(POLICY))]
        if self.critic is not None:
            groups.append((self.config.value_lr_factor, self.critic.parameters()))
        return self.build_optimizer(groups, self.config.iterations)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint |= {"kl_coef": self.kl_coef, "moments": asdict(self.moments)}
        checkpoint["annotation_rows"] = self.collector.annotation_rows.rows
        checkpoint["generation_rows"] = self.collector.generation_rows.rows
        checkpoint |= {"formulas": self.digests, "mean_return": self.mean_return}
        if self.ptx is not None:
            checkpoint["ptx"] = self.ptx.digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.ptx is not None:
            self.ptx.check(checkpoint)
        for key, digest in self.digests.items():
            if checkpoint["formulas"].get(key) != digest:
                own = f"{self.stage}.{key}={getattr(self.config, key)}"
                raise errors.CheckpointError(f"the code of {own} is not the one that it began with")
        self.mean_return, self.kl_coef = checkpoint["mean_return"], checkpoint["kl_coef"]
        stored = checkpoint["moments"]
        self.moments = shaping.ScoreMoments(
            shaping.RunningMoments(**stored["whole"]),
            tuple(shaping.RunningMoments(**part) for part in stored["components"]),
        )
        self.collector.annotation_rows.rows = checkpoint["annotation_rows"]
        self.collector.generation_rows.rows = checkpoint["generation_rows"]
