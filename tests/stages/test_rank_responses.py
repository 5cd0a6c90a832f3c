"""The warning of stage=rank about files without rows."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.core.config import RankConfig
from lightning_rlhf.data.ranked import RankedRows
from lightning_rlhf.evaluation.rank_responses import shortage

CONFIG = RankConfig(
    policy=None, samples_per_prompt=2, temperature=1.0, max_response_tokens=48, stop_strings=(),
    batch_size=8, prompts="train", max_prompts=None, pairs="best_worst", min_margin=0.0,
    accept_above=1.0,
)  # fmt: skip
ROW: list[dict[str, Any]] = [{}]
CUT = (
    "of 4 responses are cut at rank.max_response_tokens=48 and left out; a larger "
    "rank.max_response_tokens, or rank.stop_strings, lets them end"
)
NO_PAIR = "preferences.jsonl is empty: no prompt has two usable responses whose scores differ"
NOT_ACCEPTED = "accepted.jsonl is empty: no usable response scores rank.accept_above=1 or more"


@pytest.mark.parametrize(
    ("cut", "preferences", "accepted", "words"),
    [
        (2, ROW, ROW, ""),
        (3, ROW, ROW, f"3 {CUT}"),
        (1, [], ROW, f"{NO_PAIR}; 1 {CUT}"),
        (0, [], ROW, NO_PAIR),
        (3, [], [], f"{NO_PAIR}; {NOT_ACCEPTED}; 3 {CUT}"),
    ],
)
def test_empty_files_and_cut_responses_are_counted(
    cut: int, preferences: list[Any], accepted: list[Any], words: str
) -> None:
    samples = [{"ended": number >= cut} for number in range(4)]
    rows = RankedRows(preferences=preferences, demonstrations=ROW, accepted=accepted)
    assert shortage(samples, rows, CONFIG) == words
