"""Checks of a reward and of preference pairs: thresholds, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.data.problems import LONGER_SHARE

Outcome = Literal["flag", "clear", "not tested"]


@dataclass(frozen=True)
class Check:
    """A check, the threshold from which on it is flagged, and the reason for that threshold."""

    name: str
    threshold: float
    reason: str


ACCURACY = Check(
    "better than guessing", 0.5,
    "guessing ranks half of the pairs right; the whole 95% interval has to lie above it",
)  # fmt: skip
BEATS_LENGTH = Check(
    "better than length", 0.0,
    "measured is accuracy less that of always taking the longer response, or the shorter where "
    "that is right more often; the whole 95% interval has to lie above that rule's accuracy, else "
    "accuracy cannot be told from length",
)  # fmt: skip
LENGTH_GAP = Check(
    "length gap", 0.2,
    "a model that is right in 75% of pairs would be right in 85% of one half and 65% of the other; "
    "the 95% interval has to leave 0 out as well, so that chance alone is no flag",
)  # fmt: skip
LENGTH_CORRELATION = Check(
    "length within pairs", 0.5,
    "at 0.5 length explains a quarter (its square) of what sets the scores of two responses apart",
)  # fmt: skip
OVERCONFIDENCE = Check(
    "overconfidence", 0.1,
    "an ECE of 0.1 is ten points between how sure and how often right; the 95% interval of "
    "confidence less accuracy has to lie above 0 as well, as few pairs alone make an ECE",
)  # fmt: skip
OUTSIDE = Check(
    "SFT samples off the scale", 0.05,
    "of samples that score like the n responses of the pairs 2 / (n + 1) fall outside by chance, "
    "3.3% for the fewest pairs that are judged",
)  # fmt: skip
PROBE = Check(
    "probe", 0.0,
    "measured is its median less that of good responses; what deserves less than a good response "
    "should not score more",
)  # fmt: skip
DUPLICATES = Check(
    "duplicate pairs", 0.05,
    "share of all pairs; what stands twice counts twice, in training and in an interval, and one "
    "pair in twenty is more than chance repeats",
)  # fmt: skip
CONTRADICTIONS = Check(
    "contradicting pairs", 0.02,
    "share of all pairs; whatever is said, one of the two is ranked wrong, so that at 0.02 the "
    "best accuracy is two points below 1",
)  # fmt: skip
LEAKS = Check(
    "held-out prompts trained on", 0.05,
    "share of held-out prompts; on those accuracy may be memory, and at 0.05 it may be five points "
    "too high",
)  # fmt: skip
ONE_SIDED = Check(
    "one-sided length", LONGER_SHARE,
    "share of the pairs of different lengths in which one side is longer; from here on length "
    "alone is a rule worth learning, and the 95% interval has to leave 1/2 out as well",
)  # fmt: skip
CHECKS = (
    ACCURACY, BEATS_LENGTH, LENGTH_GAP, LENGTH_CORRELATION, OVERCONFIDENCE, OUTSIDE, PROBE,
)  # fmt: skip
"""Checks of a reward."""
PAIR_CHECKS = (DUPLICATES, CONTRADICTIONS, LEAKS, ONE_SIDED)
"""Checks of the pairs, which need no scores."""

MIN_COUNT = 30
"""Minimum number of pairs or samples to judge a share; its standard error is then at most 0.09."""
MIN_PROBES = 5
"""Minimum number of prompts to judge a median; with fewer it is one or two responses' score."""


@dataclass(frozen=True)
class Finding:
    """Outcome of a check."""

    check: Check
    subject: str
    """Name of what was checked: the check's name, with the kind of probe if it is a probe."""
    outcome: Outcome
    value: float | None
    """Measured value; None if there was nothing to measure."""
    words: str
    """Description of the outcome for people."""


def judged(check: Check, flagged: bool, value: float, words: str, if_flagged: str = "") -> Finding:
    """Return the finding of a check that had enough data; a flag's words end with `if_flagged`."""
    if flagged:
        return Finding(check, check.name, "flag", value, words + if_flagged)
    return Finding(check, check.name, "clear", value, words)


def untested(check: Check, value: float | None, words: str) -> Finding:
    """Return the finding of a check that had too few data."""
    return Finding(check, check.name, "not tested", value, words)
