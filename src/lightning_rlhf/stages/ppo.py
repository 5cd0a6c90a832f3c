"""stage=ppo: proximal policy optimization of a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.callbacks import Callback
from rich import get_console

from lightning_rlhf.callbacks import diagnosis, evaluation, files, metrics
from lightning_rlhf.core import memory, policy_losses
from lightning_rlhf.core.metrics import GOLD, HEADLINES, HELD_OUT, HELD_OUT_KL, KL
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data import batches, lengths
from lightning_rlhf.evaluation import build_rewards, diminishing, evaluate_reward
from lightning_rlhf.io import console, user_code
from lightning_rlhf.models.build_roles import add_policy, check_positions
from lightning_rlhf.models.config import POLICY, VALUE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import ppo, supervised
from lightning_rlhf.report import curves, tables
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout import collector, server
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.runs import folders, stage
from lightning_rlhf.runs.run import Run
from lightning_rlhf.stages.final import hand_over


class PPO(stage.Stage):
    """Training of a policy from the SFT model on a reward."""

    name = "ppo"
    title = "PPO"
    config = PPOConfig
    data = "prompts"
    reads_reward = True
    reads_judge = True
    goal = ((HELD_OUT, "max"),)
    unit = "iteration"
    headlines = tuple(HEADLINES)
    summary = (HELD_OUT, HELD_OUT_KL, "eval/response_tokens", GOLD, "eval/judge/correct")
    volatile = ("kl_warning",)
    panels = staticmethod(curves.ppo_panels)
    module_class: ClassVar[type[ppo.PPOModule]] = ppo.PPOModule
    """PPOModule, or a subclass with another loss or loop."""

    def build(self, run: Run) -> tuple[ppo.PPOModule, batches.StageData, list[Callback]]:
        settings, chat = run.settings, run.chat
        config: PPOConfig = settings.config
        judge = evaluation.load_judge(settings.data.judge) if settings.data.judge else None
        if config.rollout not in collector.OURS:
            collector.load_sampler(config.rollout, f"{self.name}.rollout")
        user_code.enter_formulas(policy_losses.FORMULAS, config, self.name)
        self.verdicts = build_rewards.verdicts_on(run, refuses=True)
        ptx = read_ptx(run, config)
        rows = run.rows("prompts")
        columns = {name for row in (*rows.train.rows, *rows.val.rows) for name in row.columns}
        build_reward = build_rewards.prepare_reward(run, columns)
        held_out, train, val = run.tokenised(rows)
        roles = run.load_model()
        longest = max(len(example.prompt) for example in (*train.examples, *val.examples))
        response, rows_at_once = config.max_response_tokens, config.rollout_batch_size
        evaluate_reward.check_sampling(run, roles, longest, response, self.name, rows_at_once)
        if ptx is not None:
            whole = max(example.length for example in ptx.examples)
            check_positions(roles, whole, "the longest demonstration")
        microbatch = memory.MicrobatchSize(f"{self.name}.microbatch_size", config.microbatch_rows)
        reward = build_reward(roles.reference, microbatch)
        roles.to(run.device)
        evaluate_reward.check_formats(run, reward)
        splits = {"train": rows.train, "val": held_out}
        prompts = {name: [row.columns for row in some.rows] for name, some in splits.items()}
        data = batches.StageData.of(
            train.examples, val.examples * config.val_samples_per_prompt, config,
            chat.pad_token_id, seed=settings.seed, columns=[*prompts["train"], *prompts["val"]],
        )  # fmt: skip
        self.evaluation = evaluation.Evaluation(judge, run.folder)
        characters = 160 if settings.samples else None
        history = diagnosis.History(config, run.folder, prompts_cut=train.too_long)
        callbacks = [
            metrics.PPOMetrics(),
            diagnosis.Diagnosis(history, self.name),
            self.evaluation,
            evaluation.Samples(run.folder, config.samples_every, characters=characters),
            evaluation.Recorder(run.folder, replace(rows.train, rows=()), every=settings.record),
        ]
        module = self.make_module(run, roles, reward, prompts, microbatch, ptx, longest + response)
        module.further = data.further
        return module, data, callbacks

    def restore(self, run: Run) -> ppo.PPOModule:
        """Return the module of an export, which reads no data and no reward."""
        roles = run.load_model().to(run.device)
        self.verdicts = build_rewards.verdicts_on(run, refuses=True, shown=False)
        terms = tuple(component.term(name) for name, component in run.settings.reward.items())
        return self.make_module(run, roles, Reward(terms, ()), {}, None, None, 0)

    def make_module(
        self, run: Run, roles: Roles, reward: Reward,
        prompts: Mapping[str, Sequence[dict[str, Any]]], microbatch: memory.MicrobatchSize | None,
        ptx: supervised.PTX | None, longest: int,
    ) -> ppo.PPOModule:  # fmt: skip
        """Return the module before its first iteration, with a new policy and, for GAE, a critic.

        microbatch: size at which the models of the reward read responses; None where none does.
        ptx: demonstrations of ppo.ptx_coef; None where none are learned from.
        longest: number of tokens of the longest prompt and response.
        """
        settings, sampler = run.settings, None
        add_policy(roles, settings.model, settings.seed)
        if settings.config.rollout == "vllm":
            params = SamplingParams.of(settings.config, run.chat)
            servers = settings.rollout_server
            sampler = server.ServerSampler(roles, params, servers, run.replicas, longest)
        return self.module_class(
            roles, reward, settings.config,
            critic=build_rewards.build_critic(run, roles) if settings.config.has_critic else None,
            chat=run.chat, prompts=prompts, seed=settings.seed, microbatch=microbatch,
            replicas=run.replicas, stage=self.name, ptx=ptx, sampler=sampler,
        )  # fmt: skip

    def summarise(self, run: Run, module: Any, metrics: dict[str, float]) -> dict[str, float]:
        """Print what the training changed; return the evaluation after it."""
        first, last = self.evaluation.first, self.evaluation.last
        ending = folders.read_ending(run.folder)
        assert first is not None and last is not None and ending is not None  # noqa: PT018
        last = last if ending.step == ending.last_step else metrics
        get_console().print(tables.before_after_table(first, last))
        trained = files.read_rows(run.folder / folders.METRICS).values()
        final = next((row for row in reversed(trained) if KL in row), None)
        if final is not None and (why := tables.collapsed(final, self.name)) is not None:
            console.print_line(f"warning: {why}", "yellow")
        diminishing.write_diminishing(run.folder, folders.run_name(run.settings))
        return last

    def finish(self, run: Run, module: Any, metrics: Mapping[str, float]) -> Path:
        critic = module.critic
        head = VALUE if critic is not None and critic.shares_trunk else None
        return hand_over(run, module.roles, POLICY, metrics, head=head, verdicts=self.verdicts)


def read_ptx(run: Run, config: PPOConfig) -> supervised.PTX | None:
    """Return the demonstrations that stage=sft trains on, for each update; None if ptx_coef is 0.

    Raises ConfigError or DataError where they cannot be read.
    """
    if config.ptx_coef == 0:
        return None
    rows = run.rows("demonstrations").train
    found = lengths.tokenise(rows, run.chat, run.settings.data)
    lengths.print_lengths("demonstration", rows, found)
    return supervised.PTX(
        found.examples, config, pad_id=run.chat.pad_token_id, seed=run.settings.seed
    )
