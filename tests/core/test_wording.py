from __future__ import annotations

import pytest

from lightning_rlhf.core.errors import percent


@pytest.mark.parametrize(
    ("share", "decimals", "expected"),
    [
        (0.0, 1, "0.0%"), (-0.0, 1, "0.0%"), (-1e-17, 1, "0.0%"), (-0.0004, 1, "0.0%"),
        (-0.001, 1, "-0.1%"), (0.1234, 1, "12.3%"), (1.0, 1, "100.0%"), (0.4, 0, "40%"),
        (-0.004, 0, "0%"),
    ],
)  # fmt: skip
def test_a_percentage_that_rounds_to_zero_has_no_sign(
    share: float, decimals: int, expected: str
) -> None:
    assert percent(share, decimals) == expected
