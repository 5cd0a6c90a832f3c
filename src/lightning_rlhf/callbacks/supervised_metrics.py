"""Metrics of SFT, reward models and DPO from sums over batches and micro-batches.

A mean computed from sums is exact; a mean of batch means is not, where batches differ in size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.results import DPOScores, PairScores, SFTEvaluation, SFTStep
from lightning_rlhf.core.text_metrics import perplexity

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
