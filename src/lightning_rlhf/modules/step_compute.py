"""Tokens and floating-point operations of a batch of SFT, of a reward model and of DPO."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor

from lightning_rlhf.core.logprobs import CHUNK_ELEMENTS
from lightning_rlhf.core.results import StepCompute
from lightning_rlhf.core.types import Demonstrations, Preferences
from lightning_rlhf.models.flops import Flops
from lightning_rlhf.models.layer_flops import Rows


def sft_compute(
    model: Flops,
    batch: Demonstrations,
    *,
    microbatch_size: int,
    head_is_trained: bool,
    seconds: float,
) -> StepCompute:
    """Return the tokens and operations of a batch, by `_target_flops`.

    microbatch_size: number of rows in a forward pass.
    """
    lengths, wanted = _lengths(batch.mask), int(batch.target_mask[:, 1:].sum())
    rows = Rows(lengths - 1, wanted, math.ceil(len(batch) / microbatch_size))
    return StepCompute(
        trained_tokens=int(lengths.sum()),
        flops=_target_flops(model, rows, head_is_trained=head_is_trained),
        seconds=seconds,
    )


def dpo_compute(
    model: Flops,
    batch: Preferences,
    *,
    microbatch_size: int,
    head_is_trained: bool,
    reads_reference: bool,
    seconds: float,
) -> StepCompute:
    """Return the tokens and operations of a batch: those of SFT on both responses of each pair.

    The reference adds a forward pass with its output layer; its adapters are counted as the
    policy's.

    microbatch_size: number of pairs in a forward pass.
    """
    lengths = torch.cat([_lengths(batch.chosen_mask), _lengths(batch.rejected_mask)])
    wanted = int(lengths.sum()) - 2 * int(batch.prompt_tokens.sum())
    rows = Rows(lengths - 1, wanted, math.ceil(len(batch) / microbatch_size))
    reference = model.forward(rows) + model.head(wanted) if reads_reference else 0.0
    return StepCompute(
        trained_tokens=int(lengths.sum()),
        flops=_target_flops(model, rows, head_is_trained=head_is_trained) + reference,
        seconds=seconds,
    )


def reward_compute(
    model: Flops, batch: Preferences, *, microbatch_size: int, seconds: float
) -> StepCompute:
    """Return the tokens and operations of a batch: forward and backward over both responses.

    The output is taken at the last token of each. microbatch_size: number of pairs in a forward
    pass.
    """
    lengths = torch.cat([_lengths(batch.chosen_mask), _lengths(batch.rejected_mask)])
    rows = Rows(lengths, len(lengths), math.ceil(len(batch) / microbatch_size))
    return StepCompute(
        trained_tokens=rows.count,
        flops=model.forward(rows) + model.backward(rows),
        seconds=seconds,
    )


def _target_flops(model: Flops, rows: Rows, *, head_is_trained: bool) -> float:
    """Return the operations of a training step on N target tokens, by `models/flops.py`.

        (forward + backward of the trunk) + 2 d V N [+ 2 d V N where the output layer is trained]
            + 2 d V N for the gradient of its input [+ 2 d V N where its logits are computed again]

    Nothing is predicted from the last token of a row.
    """
    is_split = rows.wanted / rows.passes * model.vocabulary > CHUNK_ELEMENTS
    products = 2 + head_is_trained * (1 + is_split)
    return model.forward(rows) + model.backward(rows) + products * model.head(rows.wanted)


def _lengths(mask: Bool[Tensor, "B S"]) -> Tensor:
    """Return the number of tokens of each row, on the CPU."""
    return mask.sum(dim=1).cpu()
