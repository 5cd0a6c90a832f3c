"""Metrics of SFT and reward models, computed from sums over batches, micro-batches and processes.

A mean computed from sums is exact; a mean of batch means is not, where batches differ in size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

Phase = Literal["update", "eval"]
LARGEST_EXPONENT = math.log(sys.float_info.max)
"""Natural logarithm of the largest float, 709.78."""


def sft_train_sums(outputs: Mapping[str, Tensor]) -> Float[Tensor, " 2"]:
    """Return [summed negative log-likelihood, target tokens] of a training step with mean loss."""
    tokens = outputs["tokens"].float()
    return torch.stack([outputs["loss"].detach().float() * tokens, tokens])


def sft_eval_sums(outputs: Mapping[str, Tensor]) -> Float[Tensor, " 2"]:
    """Return [summed negative log-likelihood, target tokens] of a validation step."""
    return torch.stack([outputs["nll_sum"].float(), outputs["tokens"].float()])


def sft_metrics(sums: Sequence[float], phase: Phase) -> dict[str, float]:
    """Return the loss in nats per target token, and the perplexity exp(loss), inf on overflow."""
    nll, tokens = sums
    loss = nll / tokens if tokens else math.nan
    perplexity = math.inf if loss > LARGEST_EXPONENT else math.exp(loss)
    return {f"{phase}/loss": loss, f"{phase}/perplexity": perplexity}


def reward_sums(outputs: Mapping[str, Tensor]) -> Float[Tensor, " 5"]:
    """Return sums over pairs: [pairs, Bradley-Terry loss, correctly ranked, chosen, rejected].

    chosen and rejected are raw rewards; a tie counts as half correct.
    """
    chosen, rejected = outputs["chosen"].detach().float(), outputs["rejected"].detach().float()
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    columns = [torch.ones_like(chosen), softplus(rejected - chosen), right, chosen, rejected]
    return torch.stack([column.sum() for column in columns])


def reward_metrics(sums: Sequence[float], phase: Phase) -> dict[str, float]:
    """Return means over pairs; rm_loss = -log sigmoid(chosen - rejected)."""
    pairs, *summed = sums
    loss, right, chosen, rejected = (x / pairs if pairs else math.nan for x in summed)
    return {
        f"{phase}/rm_loss": loss,
        f"{phase}/accuracy": right,
        f"{phase}/reward_chosen": chosen,
        f"{phase}/reward_rejected": rejected,
        f"{phase}/reward_margin": chosen - rejected,
    }
