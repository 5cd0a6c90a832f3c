"""Metrics of the steps: how they follow from what a step returns, and the callbacks that log them.

A step returns a record of core/results.py; metrics are defined in core/metrics.py.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_rlhf.callbacks import compute
from lightning_rlhf.callbacks.loggers import MetricsFile, RunTensorBoard, log_histograms
from lightning_rlhf.callbacks.progress import Stateful, is_evaluation, latest, position
from lightning_rlhf.core import logprobs, losses, records, results, shaping
from lightning_rlhf.core.metrics import FAN, HEADLINES, PART, QUANTILES, check_names
from lightning_rlhf.parallel.replicas import Replicas

NGRAM = 4
"""Number of tokens of the n-grams that `rollout/repetition` counts."""
STATS = tuple(one.name for one in fields(records.UpdateStats))
MEANS = {"entropy": "entropy", "ppo_loss": "loss"} | {
    f"update/{name}": name
    for name in STATS
    if name not in ("entropy", "loss", "ratio_max", "skipped", "stopped", "nonfinite")
}
"""Metric -> field of UpdateStats that it is the mean of, over minibatches."""


def rollout_metrics(experience: records.Experience, group_size: int = 1) -> dict[str, float]:
    """Return the metrics of the responses of an iteration, over their real tokens.

    explained_variance = 1 - Var(returns - values) / Var(returns), nan where returns do not vary.
    The quantile q of B sorted scores is taken at place q (B - 1), counted from 0, linearly between
    its two neighbours: numpy's method 'linear'.
    A group is `group_size` responses in a row. Of the scores' variance, reward_std^2, the part
    within groups is the mean of their variances and the part between them that of their means.
    """
    mask = experience.response_mask
    values, returns = experience.old_values, experience.returns
    errors = returns - values
    per_token = {"tokens": mask.float(), "kl": experience.kl, "rewards": experience.rewards}
    per_token |= {"values": values, "returns": returns, "returns^2": returns**2}
    per_token |= {"errors": errors, "errors^2": errors**2}
    sums = [torch.where(mask, x.float(), 0.0).sum(dim=1) for x in per_token.values()]
    rows = torch.stack([experience.score.float(), experience.ended.float(), *sums], dim=1)
    score, ended, *of_tokens = rows.cpu().double().unbind(dim=1)
    column = dict(zip(per_token, of_tokens, strict=True))
    mean = {name: x.sum() / column["tokens"].sum() for name, x in column.items()}
    returns_var = (mean["returns^2"] - mean["returns"] ** 2).clamp(min=0.0)
    errors_var = (mean["errors^2"] - mean["errors"] ** 2).clamp(min=0.0)
    explained = 1.0 - errors_var / returns_var if returns_var > 0.0 else torch.tensor(math.nan)
    quantiles = score.quantile(score.new_tensor(QUANTILES) / 100)
    metrics = {
        "reward_mean": score.mean(),
        "kl_divergence": column["kl"].mean(),
        "rollout/kl_std": column["kl"].std(correction=0),
        "rollout/reward_std": score.std(correction=0),
        "rollout/reward_min": score.min(),
        "rollout/reward_max": score.max(),
        **dict(zip(FAN, quantiles, strict=True)),
        "rollout/response_tokens": column["tokens"].mean(),
        "rollout/ended": ended.mean(),
        "rollout/shaped_return": column["rewards"].mean(),
        "rollout/value_mean": mean["values"],
        "rollout/explained_variance": explained,
    }
    if group_size > 1:
        groups, is_alike = score.view(-1, group_size), records.all_alike(score, group_size).double()
        metrics["rollout/groups_alike"] = is_alike.mean()
        metrics["rollout/prompts_effective"] = (1 - is_alike).sum()
        metrics["rollout/score_std_within"] = groups.var(dim=1, correction=0).mean().sqrt()
        metrics["rollout/score_std_between"] = groups.mean(dim=1).std(correction=0)
    found = {name: value.item() for name, value in metrics.items()}
    if (sampled := experience.sampler_logprobs) is not None:
        gap = logprobs.logprob_gap(experience.old_logprobs, sampled, mask)
        found["rollout/logprob_gap_mean"], found["rollout/logprob_gap_max"] = gap
    return found


def repetition_metrics(experience: records.Experience) -> dict[str, float]:
    """Return how often responses repeat each other, and themselves.

        most_common = (number of responses equal to the most common one) / B
        repetition  = 1 - (sum_i distinct 4-grams of response i) / (sum_i 4-grams of response i)

    repetition is 0 without any 4-gram: seq-rep-4 of Welleck et al. 2019,
    https://arxiv.org/abs/1908.04319
    """
    lengths = experience.response_mask.sum(dim=1).tolist()
    rows = zip(experience.responses.tolist(), lengths, strict=True)
    responses = [tuple(tokens[:length]) for tokens, length in rows]
    grams = [[r[i : i + NGRAM] for i in range(len(r) - NGRAM + 1)] for r in responses]
    total = sum(map(len, grams))
    distinct = sum(len(set(of_one)) for of_one in grams)
    return {
        "rollout/most_common": max(Counter(responses).values()) / len(responses),
        "rollout/repetition": 1.0 - distinct / total if total else 0.0,
    }


def update_metrics(updates: Sequence[records.UpdateStats]) -> dict[str, float]:
    """Return MEANS over minibatches, the largest ratio, and what became of the minibatches.

    Minibatches whose loss or gradient is not finite are counted and in none of the means. A field
    that is NaN in all others was not measured, and is no metric.
    """
    stats = [torch.stack([getattr(u, name).float() for name in STATS]) for u in updates]
    rows = torch.stack(stats).cpu().double()
    nonfinite = rows[:, STATS.index("nonfinite")]
    finite = rows[nonfinite == 0]
    column = dict(zip(STATS, finite.unbind(dim=1), strict=True))
    metrics = {
        **{metric: column[name].mean().item() for metric, name in MEANS.items()},
        "update/ratio_max": column["ratio_max"].max().item() if len(finite) else math.nan,
        "update/steps": float(((column["stopped"] + column["skipped"]) == 0).sum()),
        "update/skipped": column["skipped"].sum().item(),
        "update/stopped": column["stopped"].sum().item(),
        "update/nonfinite": nonfinite.sum().item(),
    }
    return {name: x for name, x in metrics.items() if not (len(finite) and math.isnan(x))}


def time_metrics(seconds: Mapping[str, float], tokens: int, responses: int) -> dict[str, float]:
    """Return seconds of phases as metrics, and response tokens and responses a second."""
    iteration_s = seconds["rollout"] + seconds["score"] + seconds["update"]
    return {f"time/{part}_s": x for part, x in seconds.items()} | {
        "time/iteration_s": iteration_s,
        "time/tokens_per_s": tokens / iteration_s,
        "time/episodes_per_s": responses / iteration_s,
    }


def step_sums(result: Any) -> dict[str, Float[Tensor, " 2"]]:
    """Return name of a metric -> its sum over a batch, and the number of what was summed.

    result: SFTScores, PairScores, DPOScores or LabelScores.
    SFT: nats of the target tokens. Pairs of RM and DPO: -log sigmoid(chosen - rejected) or the loss
    of DPO, pairs ranked right (a tie is half right), both rewards. DPO also: log-probabilities of
    both, and nats of the tokens of the chosen responses. Of labelled responses, the good ones are
    the chosen and the others the rejected ones.
    """
    if isinstance(result, results.SFTScores):
        return {"loss": torch.stack([result.nll_sum.float(), result.tokens.float()])}
    all_rows = torch.ones_like(result.losses)
    columns = {
        result.loss_name: (result.losses, all_rows),
        "accuracy": (result.ranked_right, all_rows),
    }
    if isinstance(result, results.LabelScores):
        for side, mask in (("chosen", result.label), ("rejected", ~result.label)):
            columns[f"reward_{side}"] = (torch.where(mask, result.reward, 0), mask)
            columns[f"logps_{side}"] = (torch.where(mask, result.logprob, 0), mask)
        columns["reward_reference"] = (result.reference, all_rows)
        columns["sft_loss"] = (-result.chosen_logprob, torch.where(result.label, result.tokens, 0))
    else:
        columns["reward_chosen"] = (result.chosen, all_rows)
        columns["reward_rejected"] = (result.rejected, all_rows)
    if isinstance(result, results.DPOScores):
        columns["logps_chosen"] = (result.chosen_logprob, all_rows)
        columns["logps_rejected"] = (result.rejected_logprob, all_rows)
        columns["sft_loss"] = (-result.chosen_logprob, result.chosen_tokens)
    return {
        name: torch.stack([column.float().sum() for column in two]) for name, two in columns.items()
    }


def perplexity(loss: float) -> float:
    """Return exp(loss) for a mean negative log-likelihood in nats a token, inf on overflow."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)


def step_metrics(batches: Sequence[Mapping[str, Tensor]], phase: str) -> dict[str, float]:
    """Return the means over the `step_sums` of batches; nan over nothing.

    perplexity = exp(loss), inf on overflow; reward_margin = reward_chosen - reward_rejected.
    phase: "update" or "eval".
    """
    device = next(iter(batches[-1].values())).device
    rows = torch.stack([torch.stack([*batch.values()]).to(device) for batch in batches])
    totals = zip(batches[-1], rows.sum(dim=0).tolist(), strict=True)
    found = {name: total / number if number else math.nan for name, (total, number) in totals}
    if "loss" in found:
        found["perplexity"] = perplexity(found["loss"])
    if "reward_chosen" in found:
        found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
    return {f"{phase}/{name}": value for name, value in found.items()}


def publish(
    trainer: Trainer, pl_module: Any, metrics: Mapping[str, float], shown: Collection[str] = ()
) -> None:
    """Give metrics to every logger and to `trainer.callback_metrics`, where others monitor them.

    shown: names of those that are also given to a progress bar of Lightning.
    """
    check_names(metrics)
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=position(trainer, pl_module))
    for is_shown in (False, True):
        chosen = {name: x for name, x in metrics.items() if (name in shown) == is_shown}
        pl_module.log_dict(chosen, logger=False, prog_bar=is_shown)


class FileRows(Callback):
    """Removes the rows after the checkpoint that a run goes on from, and puts them on the disk
    before a checkpoint is written. For a module that logs its metrics with `self.log`."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile | RunTensorBoard):
                logger.rewind(position(trainer, pl_module))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile | RunTensorBoard):
                logger.flush()


@dataclass(eq=False)
class StepRows(FileRows, Stateful):
    """Rows of metrics of steps, with the totals of what the run has computed, over all resumes.

    Sums of whole numbers are exact up to 2^53, so that a resumed run continues them exactly.
    """

    kept: ClassVar[tuple[str, ...]] = ("compute",)
    compute: dict[str, float] = field(default_factory=dict, init=False)
    """Metric -> total so far, or the largest memory; empty before the first step."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        pl_module.logs_headline = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        # The learning rate of the first parameter group, the policy's.
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._started = time.perf_counter()

    def count(self, more: Mapping[str, float], memory: int) -> dict[str, float]:
        """Add an iteration or step; return the metrics.

        more: what it computed, as `iteration_totals` and `step_totals` of compute.py return it.
        memory: largest memory of the process, in bytes.
        """
        found = {compute.PREFIX + name: float(number) for name, number in more.items()}
        totals = {name: self.compute.get(name, 0.0) + number for name, number in found.items()}
        totals[compute.PEAK] = max(self.compute.get(compute.PEAK, 0.0), float(memory))
        self.compute = totals
        return totals


class PPOMetrics(StepRows):
    """Metrics of every iteration."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        result: results.IterationResult = outputs[results.RESULT]
        experience, reward = result.experience, pl_module.collector.reward
        computed = compute.iteration_totals(pl_module, result, trainer.world_size)
        tokens = int(experience.response_mask.sum())
        metrics = {
            **rollout_metrics(experience, pl_module.config.group_size),
            **repetition_metrics(experience),
            **update_metrics(result.updates),
            "update/lr": self._lr,
            "update/kl_coef": result.kl_coef,
            "update/ent_coef": result.ent_coef,
            "rollout/padding": result.padding.item(),
            **time_metrics(result.seconds, tokens, len(experience)),
            **self.count(computed | reward.spent(), compute.peak_memory(pl_module.device)),
        }
        config, sampled = pl_module.config, experience.sampler_logprobs
        if config.resample_groups:
            replaced, size = [len(one) for one in result.replaced], config.group_size
            before = replaced[0] / len(experience) if replaced else 0.0
            metrics["rollout/groups_alike_first"] = before
            metrics["rollout/resample_rounds"] = float(len(replaced))
            metrics["rollout/prompts_drawn"] = (len(experience) + sum(replaced)) / size
        if config.importance_mask is not None and sampled is not None:
            log_ratio, mask = experience.old_logprobs - sampled, experience.response_mask
            kept = losses.kept_responses(log_ratio, mask, config.importance_mask)
            metrics["rollout/importance_masked"] = 1 - kept.double().mean().item()
        terms = reward.terms
        parts = experience.component_scores.cpu()
        if any(term.normalization == "running" or term.clip is not None for term in terms):
            score = shaping.normalised_sum(parts, terms, pl_module.moments.components)
            metrics["rollout/reward_paid"] = score.mean().item()
            metrics["rollout/reward_paid_range"] = (score.max() - score.min()).item()
        if len(terms) > 1:
            columns = {term.name: part for term, part in zip(terms, parts.T, strict=True)}
            metrics |= {PART + name: part.mean().item() for name, part in columns.items()}
            log_histograms(trainer.loggers, columns, position(trainer, pl_module))
        publish(trainer, pl_module, metrics, HEADLINES)


@dataclass(eq=False)
class StepMetrics(StepRows):
    """Metrics of SFT, reward modelling and DPO, exact over all that was summed.

    Training metrics appear every `trainer.log_every_n_steps` and at the last step, and cover as
    many of the latest steps each time, or all where a run has fewer: the point at the last step is
    a mean like the others. Validation metrics cover the whole validation set.
    """

    kept = (*StepRows.kept, "training", "nonfinite", "logged_step")
    training: list[dict[str, Tensor]] = field(default_factory=list, init=False)
    """Sums of each batch that the next row covers; zeros where an update was not made."""
    nonfinite: int = field(default=0, init=False)
    """Updates that were not made since the last row."""
    logged_step: int = field(default=0, init=False)
    """Step of the last row."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        result = outputs[results.RESULT]
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        sums = step_sums(result.scores)
        if not result.is_made:
            sums = {name: torch.zeros_like(x) for name, x in sums.items()}
        self.training = [*self.training, sums][-every * trainer.accumulate_grad_batches :]
        self.nonfinite += not result.is_made
        seconds = time.perf_counter() - self._started
        totals = compute.step_totals(pl_module, batch, seconds, trainer.world_size)
        computed = self.count(totals, compute.peak_memory(pl_module.device))
        step = position(trainer, pl_module)
        is_due = step % every == 0 or step == trainer.estimated_stepping_batches
        if step == self.logged_step or not is_due:
            return
        metrics = {
            **step_metrics(self.training, "update"),
            "update/lr": self._lr,
            "update/nonfinite": float(self.nonfinite),
            "update/grad_norm": result.grad_norm.item(),
        }
        publish(trainer, pl_module, metrics | computed, result.headline)
        self.nonfinite, self.logged_step = 0, step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.logs_evaluation = False
        self._validation: list[dict[str, Tensor]] = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self._validation.append(step_sums(outputs))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_evaluation(trainer):
            publish(trainer, pl_module, step_metrics(self._validation, "eval"))


@dataclass(eq=False)
class SharedMetrics(Callback):
    """Gives every process the `trainer.callback_metrics` of the first, so that rules agree in all.

    Place it after the callbacks that log metrics, which the first process alone has.
    `LightningModule.log` would take longer for all of them than a step of a small model.
    """

    replicas: Replicas

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        pl_module.logs_headline = pl_module.logs_evaluation = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.on_validation_epoch_end(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_evaluation(trainer):
            found = self.replicas.first(lambda: latest(trainer))
            if not self.replicas.is_first:
                trainer.callback_metrics.update({n: torch.tensor(x) for n, x in found.items()})
