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
    "guessing ranks half of the pairs right; the whole 95% interval must be above it",
)  # fmt: skip
BEATS_LENGTH = Check(
    "better than length", 0.0,
    "the value is the accuracy less that of always choosing the longer response, or the shorter if "
    "that is right more often; the whole 95% interval must be above that rule's accuracy, else the "
    "accuracy cannot be distinguished from length",
)  # fmt: skip
LENGTH_GAP = Check(
    "length gap", 0.2,
    "a model that is right in 75% of pairs would be right in 85% of one half and 65% of the other; "
    "the 95% interval must exclude 0 as well, so that chance alone is no flag",
)  # fmt: skip
LENGTH_CORRELATION = Check(
    "length within pairs", 0.5,
    "at 0.5 length explains a quarter (its square) of the variance of score differences in a pair",
)  # fmt: skip
OVERCONFIDENCE = Check(
    "overconfidence", 0.1,
    "an ECE of 0.1 is ten points between confidence and accuracy; the 95% interval of confidence "
    "less accuracy must be above 0 as well, because an ECE of few pairs is never 0",
)  # fmt: skip
OUTSIDE = Check(
    "SFT samples off the scale", 0.05,
    "share of samples outside the scores of the pairs; of samples with the distribution of the n "
    "responses of the pairs 2 / (n + 1) are outside by chance, 3.3% for the fewest pairs tested",
)  # fmt: skip
PROBE = Check(
    "probe", 0.0,
    "the value is its median less that of good responses; a response that is worse than a good one "
    "should not score higher",
)  # fmt: skip
DUPLICATES = Check(
    "duplicate pairs", 0.05,
    "share of all pairs; a duplicate counts twice in training and in an interval, and one pair in "
    "twenty is more than chance",
)  # fmt: skip
CONTRADICTIONS = Check(
    "contradicting pairs", 0.02,
    "share of all pairs; one of two contradicting pairs is always ranked wrong, so at 0.02 the "
    "best accuracy is two points below 1",
)  # fmt: skip
LEAKS = Check(
    "held-out prompts trained on", 0.05,
    "share of held-out prompts; the accuracy on them may come from memory, and at 0.05 it may be "
    "five points too high",
)  # fmt: skip
ONE_SIDED = Check(
    "one-sided length", LONGER_SHARE,
    "share of the pairs of different lengths in which one side is longer; beyond it length alone "
    "predicts the label usefully; the 95% interval must exclude 1/2 as well",
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
