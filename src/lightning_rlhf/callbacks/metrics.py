"""Metrics of the steps: how they follow from what a step returns, and the callbacks that log them.

A step returns a record of core/results.py; metrics are defined in core/metrics.py.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_rlhf.callbacks.compute import CountedRows, iteration_totals, peak_memory, step_totals
from lightning_rlhf.callbacks.progress import is_evaluation, latest, position
from lightning_rlhf.core.metrics import PART, check_names
from lightning_rlhf.core.records import Experience, UpdateStats
from lightning_rlhf.core.results import (
    RESULT,
    DPOScores,
    IterationResult,
    IterationSeconds,
    PairScores,
    SFTEvaluation,
    SFTStep,
)
from lightning_rlhf.core.shaping import paid_sum
from lightning_rlhf.parallel.replicas import Replicas

SUMS = (
    "score", "ended", "tokens", "kl", "rewards",
    "values", "returns", "returns^2", "errors", "errors^2",
)  # fmt: skip
"""Columns of `response_sums`; errors are returns - values."""
QUANTILES = (5, 25, 50, 75, 95)
"""Percentages of the quantiles of the score."""
NGRAM = 4
"""Number of tokens of the n-grams that `rollout/repetition` counts."""
STATS = tuple(field.name for field in fields(UpdateStats))
"""Columns of `update_rows`."""
MEANS = {
    "entropy": "entropy", "ppo_loss": "loss",
    **{f"update/{name}": name for name in (
        "policy_loss", "value_loss", "kl_loss", "ptx_loss", "approx_kl", "clip_fraction",
        "value_clip_fraction", "ratio_mean", "grad_norm",
    )},
}  # fmt: skip
"""Metric -> column of `update_rows` that it is the mean of, over minibatches."""


def response_sums(experience: Experience) -> Float[Tensor, "B 10"]:
    """Return one row a response: its score, whether it ended, and sums over its real tokens."""
    mask = experience.response_mask
    errors = experience.returns - experience.old_values
    per_token = (
        mask.float(), experience.kl, experience.rewards, experience.old_values,
        experience.returns, experience.returns**2, errors, errors**2,
    )  # fmt: skip
    sums = [torch.where(mask, x.float(), 0.0).sum(dim=1) for x in per_token]
    return torch.stack([experience.score.float(), experience.ended.float(), *sums], dim=1)


def rollout_metrics(sums: Float[Tensor, "B 10"]) -> dict[str, float]:
    """Return the metrics of the rollout that follow from `response_sums`.

    explained_variance = 1 - Var(returns - values) / Var(returns), nan where returns do not vary.
    The quantile q of B sorted scores is taken at place q (B - 1), counted from 0, linearly between
    its two neighbours: numpy's method 'linear'.
    """
    column = dict(zip(SUMS, sums.double().unbind(dim=1), strict=True))
    tokens = column["tokens"].sum()

    def token_mean(name: str) -> Tensor:
        return column[name].sum() / tokens

    returns_var = (token_mean("returns^2") - token_mean("returns") ** 2).clamp(min=0.0)
    errors_var = (token_mean("errors^2") - token_mean("errors") ** 2).clamp(min=0.0)
    explained = 1.0 - errors_var / returns_var if returns_var > 0.0 else torch.tensor(math.nan)
    quantiles = column["score"].quantile(column["score"].new_tensor(QUANTILES) / 100)
    metrics = {
        "reward_mean": column["score"].mean(),
        "kl_divergence": column["kl"].mean(),
        "rollout/kl_std": column["kl"].std(correction=0),
        "rollout/reward_std": column["score"].std(correction=0),
        "rollout/reward_min": column["score"].min(),
        "rollout/reward_max": column["score"].max(),
        **{f"rollout/score_p{p:02d}": q for p, q in zip(QUANTILES, quantiles, strict=True)},
        "rollout/response_tokens": column["tokens"].mean(),
        "rollout/ended": column["ended"].mean(),
        "rollout/shaped_return": column["rewards"].mean(),
        "rollout/value_mean": token_mean("values"),
        "rollout/explained_variance": explained,
    }
    return {name: value.item() for name, value in metrics.items()}


def share_alike(sums: Float[Tensor, "B 10"], group_size: int) -> float:
    """Return the share of groups whose responses, `group_size` in a row, have the same score."""
    groups = sums[:, SUMS.index("score")].view(-1, group_size)
    return (groups == groups[:, :1]).all(dim=1).double().mean().item()


def repetition_metrics(experience: Experience) -> dict[str, float]:
    """Return how often responses repeat each other, and themselves.

    most_common = (number of responses equal to the most common one) / B
    repetition = 1 - (sum_i distinct 4-grams of response i) / (sum_i 4-grams of response i),
    0 without any 4-gram: seq-rep-4 of Welleck et al. 2019,
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


def update_rows(updates: Sequence[UpdateStats]) -> Float[Tensor, "U S"]:
    """Return one row for each of U updates, with the S columns of `STATS`."""
    return torch.stack([torch.stack([getattr(u, s).float() for s in STATS]) for u in updates])


def update_metrics(rows: Float[Tensor, "U S"]) -> dict[str, float]:
    """Return MEANS over minibatches, the largest ratio, and what became of the minibatches.

    Minibatches whose loss or gradient is not finite are counted and in none of the means. A field
    that is NaN in all others was not measured, and is no metric.
    """
    of_all = dict(zip(STATS, rows.double().unbind(dim=1), strict=True))
    finite = rows[of_all["nonfinite"] == 0].double()
    column = dict(zip(STATS, finite.unbind(dim=1), strict=True))
    metrics = {
        **{metric: column[name].mean().item() for metric, name in MEANS.items()},
        "update/ratio_max": column["ratio_max"].max().item() if len(finite) else math.nan,
        "update/steps": float(((column["stopped"] + column["skipped"]) == 0).sum()),
        "update/skipped": column["skipped"].sum().item(),
        "update/stopped": column["stopped"].sum().item(),
        "update/nonfinite": of_all["nonfinite"].sum().item(),
    }
    return {name: x for name, x in metrics.items() if not (len(finite) and math.isnan(x))}


def time_metrics(seconds: IterationSeconds, sums: Float[Tensor, "B 10"]) -> dict[str, float]:
    """Return seconds of each part of an iteration, and response tokens and responses a second."""
    iteration_s = seconds.rollout + seconds.score + seconds.update
    tokens = sums[:, SUMS.index("tokens")].sum().item()
    return {
        "time/rollout_s": seconds.rollout,
        "time/score_s": seconds.score,
        "time/update_s": seconds.update,
        "time/iteration_s": iteration_s,
        "time/other_s": seconds.other,
        "time/tokens_per_s": tokens / iteration_s,
        "time/episodes_per_s": len(sums) / iteration_s,
    }


def step_sums(result: SFTStep | SFTEvaluation | PairScores) -> dict[str, Float[Tensor, ""]]:
    """Return name of a metric -> its sum over a batch, and `pairs` or `tokens`, their numbers.

    SFT: nats of the target tokens. Pairs of RM and DPO: -log sigmoid(chosen - rejected) or the loss
    of DPO, pairs ranked right (a tie is half right), both rewards. DPO also: log-probabilities of
    both, and the tokens of the chosen responses.
    """
    if isinstance(result, SFTStep):
        tokens = result.tokens.float()
        return {"loss": result.loss.float() * tokens, "tokens": tokens}
    if isinstance(result, SFTEvaluation):
        return {"loss": result.nll_sum.float(), "tokens": result.tokens.float()}
    is_dpo = isinstance(result, DPOScores)
    columns = {
        "pairs": torch.ones_like(result.chosen),
        "dpo_loss" if is_dpo else "rm_loss": result.losses,
        "accuracy": result.ranked_right,
        "reward_chosen": result.chosen,
        "reward_rejected": result.rejected,
    }
    if isinstance(result, DPOScores):
        columns["logps_chosen"] = result.chosen_logprob
        columns["logps_rejected"] = result.rejected_logprob
        columns["tokens"] = result.chosen_tokens
    return {name: column.float().sum() for name, column in columns.items()}


def stacked(result: Any) -> tuple[list[str], Float[Tensor, " M"]]:
    """Return the names of the `step_sums` of a result, and their numbers."""
    sums = step_sums(result)
    return list(sums), torch.stack([*sums.values()])


def perplexity(loss: float) -> float:
    """Return exp(loss) for a mean negative log-likelihood in nats a token, inf on overflow."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)


def step_metrics(names: Sequence[str], sums: Float[Tensor, "N M"], phase: str) -> dict[str, float]:
    """Return the means over N batches of M `step_sums`, with these names; nan over nothing.

    perplexity = exp(loss), inf on overflow; reward_margin = reward_chosen - reward_rejected;
    sft_loss = -(sum of logps_chosen) / tokens, the loss of SFT on the chosen responses.
    phase: "update" or "eval".
    """
    totals = dict(zip(names, sums.sum(dim=0).tolist(), strict=True))

    def mean(total: float, number: float) -> float:
        return total / number if number else math.nan

    tokens = totals.pop("tokens", math.nan)
    number = totals.pop("pairs", tokens)
    found = {name: mean(total, number) for name, total in totals.items()}
    if "loss" in found:
        found["perplexity"] = perplexity(found["loss"])
    if "reward_chosen" in found:
        found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
    if "logps_chosen" in found:
        found["sft_loss"] = mean(-totals["logps_chosen"], tokens)
    return {f"{phase}/{name}": value for name, value in found.items()}


def publish(trainer: Trainer, pl_module: Any, metrics: Mapping[str, float]) -> None:
    """Give metrics to every logger and to `trainer.callback_metrics`, where others monitor them."""
    check_names(metrics)
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=position(trainer, pl_module))
    pl_module.log_dict(dict(metrics), logger=False)


class StepRows(CountedRows):
    """Rows of metrics of steps, at whose start their learning rate and the time are noted."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        # The learning rate of the first parameter group, the policy's.
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._started = time.perf_counter()


class PPOMetrics(StepRows):
    """Metrics of every iteration."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        result: IterationResult = outputs[RESULT]
        sums = response_sums(result.experience).cpu()
        computed = iteration_totals(pl_module, result, trainer.world_size)
        metrics = {
            **rollout_metrics(sums),
            **repetition_metrics(result.experience),
            **update_metrics(update_rows(result.updates).cpu()),
            "update/lr": self._lr,
            "update/kl_coef": result.kl_coef,
            "rollout/padding": result.padding.item(),
            **time_metrics(result.seconds, sums),
            **self.count(computed, peak_memory(pl_module.device)),
        }
        if result.group_size > 1:
            metrics["rollout/groups_alike"] = share_alike(sums, result.group_size)
        terms = pl_module.reward.terms
        parts = result.experience.component_scores.cpu()
        if not all(term.is_paid_as_reported for term in terms):
            paid = paid_sum(parts, terms, pl_module.moments.components)
            metrics["rollout/reward_paid"] = paid.mean().item()
            metrics["rollout/reward_paid_range"] = (paid.max() - paid.min()).item()
        if len(terms) > 1:
            columns = {term.name: part for term, part in zip(terms, parts.T, strict=True)}
            metrics |= {PART + name: part.mean().item() for name, part in columns.items()}
            draw_histograms(trainer, pl_module, columns)
        publish(trainer, pl_module, metrics)


def draw_histograms(trainer: Trainer, pl_module: Any, columns: Mapping[str, Tensor]) -> None:
    """Log the numbers of each component of the reward to loggers that draw histograms."""
    step = position(trainer, pl_module)
    for logger in trainer.loggers:
        for name, numbers in columns.items():
            if isinstance(logger, WandbLogger):
                import wandb

                histogram: Any = wandb.Histogram(numbers.tolist())
                logger.log_metrics({f"histogram/reward/{name}": histogram}, step=step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_histogram(f"histogram/reward/{name}", numbers, step)


class StepMetrics(StepRows):
    """Metrics of SFT, reward modelling and DPO, exact over all that was summed.

    Training metrics appear every `trainer.log_every_n_steps` and at the last step, and cover as
    many of the latest steps each time, or all where a run has fewer: the point at the last step is
    a mean like the others. Validation metrics cover the whole validation set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._training: list[Tensor] = []
        """Sums of each batch that the next row covers; zeros where an update was not made."""
        self._nonfinite = 0
        """Updates that were not made since the last row."""
        self._logged_step = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "training": [sums.cpu() for sums in self._training],
            "nonfinite": self._nonfinite,
            "logged_step": self._logged_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._training, self._logged_step = state_dict["training"], state_dict["logged_step"]
        self._nonfinite = state_dict["nonfinite"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        result = outputs[RESULT]
        names, sums = stacked(result)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._training.append(sums if result.is_made else torch.zeros_like(sums))
        del self._training[: -every * trainer.accumulate_grad_batches]
        self._nonfinite += not result.is_made
        seconds = time.perf_counter() - self._started
        totals = step_totals(pl_module, batch, seconds, trainer.world_size)
        computed = self.count(totals, peak_memory(pl_module.device))
        step = position(trainer, pl_module)
        is_due = step % every == 0 or step == trainer.estimated_stepping_batches
        if step == self._logged_step or not is_due:
            return
        covered = torch.stack([row.to(sums.device) for row in self._training])
        metrics = step_metrics(names, covered, "update")
        metrics["update/lr"] = self._lr
        metrics["update/nonfinite"] = float(self._nonfinite)
        metrics["update/grad_norm"] = result.grad_norm.item()
        publish(trainer, pl_module, metrics | computed)
        self._nonfinite, self._logged_step = 0, step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._validation: list[Tensor] = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self._names, sums = stacked(outputs)
        self._validation.append(sums)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_evaluation(trainer):
            metrics = step_metrics(self._names, torch.stack(self._validation), "eval")
            publish(trainer, pl_module, metrics)


class SharedMetrics(Callback):
    """Gives every process the `trainer.callback_metrics` of the first, so that rules agree in all.

    Place it after the callbacks that log metrics, which the first process alone has.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        pl_module.logs_headline = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.share(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_evaluation(trainer):
            self.share(trainer)

    def share(self, trainer: Trainer) -> None:
        """Take the metrics of the first process for those of this one, unless this is it.

        `LightningModule.log` would take longer for all of them than a step of a small model.
        """
        found = self.replicas.first(lambda: latest(trainer))
        if not self.replicas.is_first:
            trainer.callback_metrics.update(
                {name: torch.tensor(value) for name, value in found.items()}
            )
