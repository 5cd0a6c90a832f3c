"""Metrics of a step of PPO, and of a step on given texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.records import Experience, UpdateStats
from lightning_rlhf.core.results import (
    DPOScores,
    IterationSeconds,
    PairScores,
    SFTEvaluation,
    SFTStep,
)
from lightning_rlhf.core.text_metrics import perplexity

SUMS = (
    "score", "ended", "tokens", "kl", "rewards",
    "values", "returns", "returns^2", "errors", "errors^2",
)  # fmt: skip
"""Columns of `response_sums`; errors are returns - values."""

QUANTILES = (5, 25, 50, 75, 95)
"""Percentages of the quantiles of the score."""

STATS = tuple(field.name for field in fields(UpdateStats))
"""Columns of `update_rows`."""

NGRAM = 4
"""Number of tokens of the n-grams that `rollout/repetition` counts."""


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


def groups_alike(sums: Float[Tensor, "B 10"], group_size: int) -> float:
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
    """Return means over minibatches, the largest ratio, and what became of the minibatches.

    Minibatches whose loss or gradient is not finite are counted and in none of the means. A field
    that is NaN in all others was not measured, and is no metric.
    """
    of_all = dict(zip(STATS, rows.double().unbind(dim=1), strict=True))
    finite = rows[of_all["nonfinite"] == 0].double()
    column = dict(zip(STATS, finite.unbind(dim=1), strict=True))
    mean = {name: values.mean().item() for name, values in column.items()}
    metrics = {
        "entropy": mean["entropy"],
        "ppo_loss": mean["loss"],
        "update/policy_loss": mean["policy_loss"],
        "update/value_loss": mean["value_loss"],
        "update/kl_loss": mean["kl_loss"],
        "update/ptx_loss": mean["ptx_loss"],
        "update/approx_kl": mean["approx_kl"],
        "update/clip_fraction": mean["clip_fraction"],
        "update/value_clip_fraction": mean["value_clip_fraction"],
        "update/ratio_mean": mean["ratio_mean"],
        "update/ratio_max": column["ratio_max"].max().item() if len(finite) else math.nan,
        "update/grad_norm": mean["grad_norm"],
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


Phase = Literal["update", "eval"]


def sft_train_sums(result: SFTStep) -> Float[Tensor, " 2"]:
    """Return [summed negative log-likelihood, target tokens] of a training step."""
    tokens = result.tokens.float()
    return torch.stack([result.loss.float() * tokens, tokens])


def sft_eval_sums(result: SFTEvaluation) -> Float[Tensor, " 2"]:
    """Return [summed negative log-likelihood, target tokens] of a validation step."""
    return torch.stack([result.nll_sum.float(), result.tokens.float()])


def sft_metrics(sums: Sequence[float], phase: Phase) -> dict[str, float]:
    """Return the loss in nats per target token, and the perplexity exp(loss), inf on overflow."""
    nll, tokens = sums
    loss = nll / tokens if tokens else math.nan
    return {f"{phase}/loss": loss, f"{phase}/perplexity": perplexity(loss)}


def reward_sums(scores: PairScores) -> Float[Tensor, " 5"]:
    """Return [pairs, loss of the pairs, pairs ranked right, chosen, rejected].

    A tie is half right.
    """
    chosen, rejected = scores.chosen.float(), scores.rejected.float()
    columns = [torch.ones_like(chosen), scores.losses, scores.ranked_right, chosen, rejected]
    return torch.stack([column.sum() for column in columns])


def reward_metrics(
    sums: Sequence[float], phase: Phase, loss_name: str = "rm_loss"
) -> dict[str, float]:
    """Return means over pairs; rm_loss = -log sigmoid(chosen - rejected)."""
    pairs, *summed = sums
    loss, right, chosen, rejected = (x / pairs if pairs else math.nan for x in summed)
    return {
        f"{phase}/{loss_name}": loss,
        f"{phase}/accuracy": right,
        f"{phase}/reward_chosen": chosen,
        f"{phase}/reward_rejected": rejected,
        f"{phase}/reward_margin": chosen - rejected,
    }


def dpo_sums(scores: DPOScores) -> Float[Tensor, " 8"]:
    """Return `reward_sums`, and the sums of both log-probabilities and of the chosen tokens."""
    columns = (scores.chosen_logprob, scores.rejected_logprob, scores.chosen_tokens)
    sums = [column.float().sum() for column in columns]
    return torch.cat([reward_sums(scores), torch.stack(sums)])


def dpo_metrics(sums: Sequence[float], phase: Phase) -> dict[str, float]:
    """Return means over pairs, and the loss of SFT on the chosen responses, a mean over tokens."""
    pairs, (chosen, rejected, tokens) = sums[0], sums[5:]
    return {
        **reward_metrics(sums[:5], phase, "dpo_loss"),
        f"{phase}/logps_chosen": chosen / pairs if pairs else math.nan,
        f"{phase}/logps_rejected": rejected / pairs if pairs else math.nan,
        f"{phase}/sft_loss": -chosen / tokens if tokens else math.nan,
    }
