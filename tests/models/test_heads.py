"""The heads, and the position they are read at."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.models.heads import RewardHeads, ScalarHead

T, F = True, False


def test_a_random_head_has_standard_deviation_one_over_root_d_plus_one() -> None:
    d = 20_000
    head = RewardHeads.random(d, 1, torch.Generator().manual_seed(0))
    expected = 1 / math.sqrt(d + 1)
    # The standard error of a standard deviation of n normals is sigma / sqrt(2 n): 4 of them.
    assert head.linear.weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * d))
    assert abs(head.linear.weight.mean().item()) < 4 * expected / math.sqrt(d)
    assert head.linear.bias.tolist() == [0.0]


@pytest.mark.parametrize("kind", ["value", "reward"])
def test_a_head_computes_in_fp32_under_autocast_and_from_bf16(kind: str) -> None:
    random = RewardHeads.random(512, 1, torch.Generator().manual_seed(0))
    head: torch.nn.Module = random
    if kind == "value":
        head = ScalarHead(512)
        head.load_state_dict(random.state_dict())
    hidden = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = hidden.double() @ random.linear.weight.detach().double()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head(hidden)
    assert found.dtype == torch.float32
    assert found.shape == ((4,) if kind == "value" else (4, 1))
    found = found.reshape(4)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0)
