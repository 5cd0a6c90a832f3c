"""The outcome of a fitness report, as stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PAGE = "report.md"
"""Name of the file that a fitness report is written to."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on whether a reward is fit to be maximised."""

    is_unfit: bool
    """True if the report advises against PPO on this reward."""
    words: str
    """Text of the verdict, two sentences."""
    reasons: Sequence[str]
    """Flagged checks, each with its number."""

    @staticmethod
    def is_json(node: Any) -> bool:
        """Return whether `Verdict(**node)` is a verdict: `node` is one as JSON holds it."""
        match node:
            case {"is_unfit": bool(), "words": str(), "reasons": [*reasons]} if len(node) == 3:
                return all(isinstance(reason, str) for reason in reasons)
        return False

    @property
    def style(self) -> str:
        """Return the verdict's colour on a terminal: red where unfit, yellow with reservations."""
        if self.is_unfit:
            return "bold red"
        return "yellow" if self.reasons else ""
