"""Which rows are left while responses are written."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.core.records import Prompts
from lightning_rlhf.rollout.native import DecodeState


@pytest.mark.parametrize(
    ("going", "few", "all_shapes"),
    # Of 32 rows; None where more than three quarters would be left.
    [(25, None, None), (24, 24, 24), (17, 24, 17), (9, 16, 9), (5, 8, 5), (3, 4, 3), (2, 2, 2),
     (1, 1, 1)],
)  # fmt: skip
def test_rows_that_are_left_are_few_numbers_where_shapes_are_to_be_few(
    going: int, few: int | None, all_shapes: int | None
) -> None:
    """Multiples of 8, and 4, 2, 1: what goes on is among them."""
    prompts = Prompts(
        tokens=torch.ones(32, 3, dtype=torch.long),
        mask=torch.ones(32, 3, dtype=torch.bool),
        index=torch.arange(32),
    )
    goes = torch.zeros(32, dtype=torch.bool)
    goes[torch.arange(32) * 7 % 32 < going] = True
    for few_shapes, expected in ((True, few), (False, all_shapes)):
        state = DecodeState(prompts, 1, 4, few_shapes=few_shapes)
        state.end(~goes)
        left = state.drop_ended(going)
        if expected is None:
            assert left is None
        else:
            assert len(state.rows) == len(set(state.rows.tolist())) == expected
            assert set(goes.nonzero().squeeze(1).tolist()) <= set(state.rows.tolist())
            assert state.rows[state.unfinished].tolist() == goes.nonzero().squeeze(1).tolist()
