"""The outcome of a fitness report, as a checkpoint carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """Whether a reward is fit to be maximised."""

    is_unfit: bool
    """Whether the report advises against PPO on this reward."""
    words: str
    """The verdict in two sentences."""
    reasons: Sequence[str]
    """The flagged checks, each with its number."""

    @staticmethod
    def is_json(node: Any) -> bool:
        """Return whether `Verdict(**node)` is a verdict: `node` is one as JSON holds it."""
        match node:
            case {"is_unfit": bool(), "words": str(), "reasons": [*reasons]} if len(node) == 3:
                return all(isinstance(reason, str) for reason in reasons)
        return False

    @property
    def style(self) -> str:
        """The colour it is shown in on a terminal: red where unfit, yellow with reservations."""
        if self.is_unfit:
            return "bold red"
        return "yellow" if self.reasons else ""
