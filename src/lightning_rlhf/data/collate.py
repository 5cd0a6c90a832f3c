"""Collation of examples into padded batches; the only place that pads.

Dimensions: B sequences, S and R tokens of whole sequences, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_rlhf.core.types import Demonstrations, Preferences, Prompts
from lightning_rlhf.data.lengths import (
    DemonstrationTokens,
    DialogueTokens,
    PreferenceTokens,
    PromptTokens,
)


def collate_demonstrations(examples: Sequence[DemonstrationTokens], pad_id: int) -> Demonstrations:
    """Return demonstrations right-padded to the longest [B,S].

    Their targets are the responses, and the learned tokens of the prompts of dialogues.
    """
    tokens, mask = pad([[*e.prompt, *e.response] for e in examples], pad_id, "right")
    prompt_mask = _lengths_mask([len(e.prompt) for e in examples], tokens.shape[1])
    target_mask = mask & ~prompt_mask
    for row, example in enumerate(examples):
        if isinstance(example, DialogueTokens):
            target_mask[row, list(example.learned)] = True
    return Demonstrations(tokens=tokens, mask=mask, target_mask=target_mask)


def collate_preferences(examples: Sequence[PreferenceTokens], pad_id: int) -> Preferences:
    """Return preference pairs, each side right-padded to its longest sequence: [B,S] and [B,R]."""
    chosen, chosen_mask = pad([[*e.prompt, *e.chosen] for e in examples], pad_id, "right")
    rejected, rejected_mask = pad([[*e.prompt, *e.rejected] for e in examples], pad_id, "right")
    return Preferences(
        chosen=chosen,
        chosen_mask=chosen_mask,
        rejected=rejected,
        rejected_mask=rejected_mask,
        prompt_tokens=torch.tensor([len(e.prompt) for e in examples]),
        margin=torch.tensor([e.margin for e in examples]),
    )


def collate_prompts(examples: Sequence[PromptTokens], pad_id: int) -> Prompts:
    """Return prompts left-padded to the longest [B,P]."""
    tokens, mask = pad([e.prompt for e in examples], pad_id, "left")
    return Prompts(tokens=tokens, mask=mask, index=torch.tensor([e.index for e in examples]))


def pad(
    rows: Sequence[Sequence[int]], pad_id: int, side: Literal["left", "right"]
) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
    """Return the rows padded to the longest, and the mask that is True on real tokens."""
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    real = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return (
        pad_sequence(tokens, batch_first=True, padding_value=pad_id, padding_side=side),
        pad_sequence(real, batch_first=True, padding_value=False, padding_side=side),
    )


def _lengths_mask(lengths: Sequence[int], width: int) -> Bool[Tensor, "B S"]:
    """Return the mask that is True in the first `lengths[i]` columns of row i."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]
