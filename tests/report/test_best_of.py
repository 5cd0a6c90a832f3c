"""The best of n samples as samples of a policy."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.core.kl import best_of_kl
from lightning_rlhf.report.comparison import best_of


def test_it_takes_the_first_of_the_highest_score_of_each_n() -> None:
    scores = [[1.0, 3.0, 3.0, 0.0, 2.0, 1.0], [5.0, 4.0, 4.0, 6.0, 6.0, 6.0]]  # of two prompts
    samples: list[Any] = [
        {"index": prompt, "place": place, "score": score, "kl": -7.0}
        for prompt, some in enumerate(scores)
        for place, score in enumerate(some)
    ]
    found = best_of(samples, 3, 2)
    assert [(x["index"], x["place"], x["score"]) for x in found] == [
        (0, 1, 3.0), (0, 4, 2.0), (1, 0, 5.0), (1, 3, 6.0),
    ]  # fmt: skip
    for sample in found:
        assert sample["kl"] == pytest.approx(best_of_kl(scores[sample["index"]], 3))
