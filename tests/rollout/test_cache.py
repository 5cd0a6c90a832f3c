"""The cache shows what was put into it, in order, however often it moves."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.rollout import decode_state
from lightning_rlhf.rollout.decode_state import RoomyLayer


@pytest.mark.parametrize(
    ("gap", "moves"),
    # After rows were dropped behind 7 tokens: room for all 12, or for 3 more and then the rest.
    [(0, 1), (3 * 4 * 4, 2)],
    ids=["one room", "several"],
)
def test_it_holds_all_tokens_of_the_rows_that_are_left(
    gap: int, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_state, "GAP", gap)
    layer, left = RoomyLayer(12), torch.tensor([2, 0])
    tokens = torch.randn(2, 3, 2, 12, 4)  # keys and values, B, heads, S, size
    places = set()
    for start, end in [(0, 5), *((i, i + 1) for i in range(5, 12))]:
        if start == 7:
            layer.reorder_cache(left)
            tokens = tokens[:, left]
            places.clear()
        found = layer.update(*tokens[:, :, :, start:end])
        assert torch.equal(torch.stack(found), tokens[:, :, :, :end])
        assert layer.get_seq_length() == end
        places.add(found[0].data_ptr())
    assert len(places) == moves


def test_keys_in_fp32_are_kept_as_the_values_are_whose_dtype_attention_reads() -> None:
    layer, keys = RoomyLayer(4), torch.randn(2, 3, 4, 8)
    values = torch.randn(2, 3, 4, 8).bfloat16()
    for start, end in [(0, 3), (3, 4)]:
        found = layer.update(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(found[0], keys[:, :, :end].bfloat16())
        assert torch.equal(found[1], values[:, :, :end])
