"""Three replies of 2, 2 and 3 tokens, the first padded on the left, the second on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_rlhf.core.records import DecodedResponses

from .conftest import make_replies

TOKENS = torch.tensor([[0, 3, 5], [2, 4, 0], [6, 7, 8]])
MASK = torch.tensor([[False, True, True], [True, True, False], [True, True, True]])


def decoded(
    responses: Sequence[str] = ("one", "two", "three"), rows: Sequence[int] = (0, 1, 2)
) -> DecodedResponses:
    """`rows` says in which order they come."""
    found = make_replies(
        *((f"question {i}", text) for i, text in zip(rows, responses, strict=True))
    )
    order = torch.tensor(rows)
    rollout = replace(
        found.rollout, tokens=TOKENS[order], mask=MASK[order], response_mask=MASK[order, 2:]
    )
    return replace(found, rollout=rollout)
