"""When the last iteration says that a policy has collapsed."""

from __future__ import annotations

import math

import pytest

from lightning_rlhf.report.tables import collapsed

# Of a run that went well: 4 nats over 14 tokens.
WELL = {"kl_divergence": 4.0, "rollout/response_tokens": 14.0, "entropy": 0.4}


@pytest.mark.parametrize(("change", "told"), [
    ({}, None),
    ({"kl_divergence": 14.0}, None),
    ({"kl_divergence": 28.0}, "kl_divergence is 2 nats a token (above 1) in the last"),
    ({"kl_divergence": math.nan}, "kl_divergence is nan nats"),
    ({"entropy": 0.01}, None),
    ({"entropy": 0.005}, "entropy is 0.005 nats a token (below 0.01) in the last"),
    ({"kl_divergence": 28.0, "entropy": 0.0}, "(above 1) and entropy is 0 nats"),
])  # fmt: skip
def test_far_from_the_reference_or_sure_of_every_token(
    change: dict[str, float], told: str | None
) -> None:
    found = collapsed(WELL | change)
    assert found is None if told is None else told in str(found)


def test_the_keys_are_those_of_the_stage() -> None:
    assert "a smaller own.lr, or a larger own.kl_coef" in str(
        collapsed(WELL | {"entropy": 0}, "own")
    )
