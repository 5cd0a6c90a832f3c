"""Estimate of the remaining time of a run from its recent iterations and evaluations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

RECENT = 20
"""Number of latest durations whose median is used: enough to be robust to a slow iteration, few
enough to follow a trend."""


@dataclass(frozen=True)
class TimeLeft:
    """An estimate of the remaining time of a run."""

    seconds: float
    """Estimated time in seconds."""
    without_evaluations: bool
    """True while evaluations are still to come and none has been timed."""


class Pace:
    """The durations, in seconds, of recent iterations without evaluation and of evaluations."""

    def __init__(self) -> None:
        self._iterations: deque[float] = deque(maxlen=RECENT)
        self._evaluations: deque[float] = deque(maxlen=RECENT)

    def add_iteration(self, seconds: float) -> None:
        self._iterations.append(seconds)

    def add_evaluation(self, seconds: float) -> None:
        self._evaluations.append(seconds)

    def left(self, iterations: int, evaluations: int) -> TimeLeft | None:
        """Return the estimated time of the given numbers of iterations and evaluations.

        It is the sum of count times median duration; None before the first iteration was timed.
        """
        if not self._iterations:
            return None
        seconds = iterations * median(self._iterations)
        if evaluations == 0:
            return TimeLeft(seconds, without_evaluations=False)
        if not self._evaluations:
            return TimeLeft(seconds, without_evaluations=True)
        return TimeLeft(
            seconds + evaluations * median(self._evaluations), without_evaluations=False
        )


def clock_text(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: 3725 -> 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def left_text(left: TimeLeft | None) -> str:
    """Return the estimate as text for the console."""
    if left is None:
        return "time left unknown"
    return f"{clock_text(left.seconds)}{' and evaluations' * left.without_evaluations} left"
