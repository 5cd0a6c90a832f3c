"""Which products are compiled for their shapes."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.core.products import compiled_by_shape, rounded_up


@pytest.mark.parametrize(
    ("dtype", "device", "autocast", "expected"),
    [
        (torch.float32, "cpu", False, False),
        (torch.float32, "cpu", True, True),
        (torch.bfloat16, "cpu", False, True),
        (torch.float16, "cpu", False, True),
        (torch.bfloat16, "meta", False, False),
    ],
)
def test_those_of_16_bits_on_a_cpu(
    dtype: torch.dtype, device: str, *, autocast: bool, expected: bool
) -> None:
    x = torch.empty(2, dtype=dtype, device=device)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert compiled_by_shape(x) is expected


def test_a_number_is_rounded_up() -> None:
    assert [rounded_up(count, 8) for count in (0, 1, 8, 9)] == [0, 8, 8, 16]
