"""How long the rest of a run will take, from what its recent parts took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

RECENT = 20
"""Iterations whose median is taken: enough to ride out a slow one, few enough to follow a trend."""


@dataclass(frozen=True)
class TimeLeft:
    """An estimate in seconds."""

    seconds: float
    without_evaluations: bool
    """True while evaluations are still to come and none has been timed."""


class Pace:
    """Collects durations, in seconds, of iterations without evaluation and of evaluations."""

    def __init__(self) -> None:
        self._iterations: deque[float] = deque(maxlen=RECENT)
        self._evaluations: deque[float] = deque(maxlen=RECENT)

    def add_iteration(self, seconds: float) -> None:
        self._iterations.append(seconds)

    def add_evaluation(self, seconds: float) -> None:
        self._evaluations.append(seconds)

    def left(self, iterations: int, evaluations: int) -> TimeLeft | None:
        """Medians times what is to come; None before the first iteration was timed."""
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
    """Hours, minutes, seconds: 3725 -> 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def left_text(left: TimeLeft | None) -> str:
    """The estimate for people."""
    if left is None:
        return "time left unknown"
    return f"{clock_text(left.seconds)}{' and evaluations' * left.without_evaluations} left"
