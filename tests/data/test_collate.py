"""Padding and masks, written out."""

from __future__ import annotations

import torch

from lightning_rlhf.data.batches import collate_demonstrations, collate_preferences, collate_prompts
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens, PromptTokens

T, F = True, False


def test_demonstrations_are_padded_right_and_only_responses_are_targets() -> None:
    batch = collate_demonstrations(
        [
            DemonstrationTokens([5, 6], [7, 8, 9]),
            DemonstrationTokens([5, 6, 7], [9]),
            # 0, the filler, is also a real token here: masks come from lengths, not from ids.
            DemonstrationTokens([0], [0]),
        ],
        pad_id=0,
    )
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 9, 0], [0, 0, 0, 0, 0]]
    assert batch.mask.tolist() == [[T, T, T, T, T], [T, T, T, T, F], [T, T, F, F, F]]
    assert batch.target_mask.tolist() == [[F, F, T, T, T], [F, F, F, T, F], [F, T, F, F, F]]
    assert batch.tokens.dtype == torch.long
    assert batch.mask.dtype == batch.target_mask.dtype == torch.bool


def test_the_sides_of_preferences_are_padded_apart() -> None:
    batch = collate_preferences(
        [
            PreferenceTokens([1, 2], [3, 4], [5], 0.5),
            PreferenceTokens([1], [2], [3, 4, 5, 6], 0.0),
        ],
        pad_id=99,
    )
    assert batch.chosen.tolist() == [[1, 2, 3, 4], [1, 2, 99, 99]]
    assert batch.margin.tolist() == [0.5, 0.0]
    assert batch.chosen_mask.tolist() == [[T, T, T, T], [T, T, F, F]]
    assert batch.rejected.tolist() == [[1, 2, 5, 99, 99], [1, 3, 4, 5, 6]]
    assert batch.rejected_mask.tolist() == [[T, T, T, F, F], [T, T, T, T, T]]


def test_prompts_are_padded_left() -> None:
    batch = collate_prompts([PromptTokens([1, 2, 3], 4), PromptTokens([0], 2)], pad_id=0)
    assert batch.tokens.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert batch.mask.tolist() == [[T, T, T], [F, F, T]]
    assert batch.index.tolist() == [4, 2]
