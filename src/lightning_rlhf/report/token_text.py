"""Tokens of a response on a page: their text, and colours that show a number of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_rlhf.io.visible import visible

GREEN, RED, ORANGE, BLUE = "0 160 80", "225 45 45", "225 125 0", "50 120 235"
"""Colours of a token: advantage above and below 0, KL above and below 0."""


def colour(share: float, above: str, below: str) -> str:
    """Return a translucent colour, readable on a light and on a dark page."""
    strength = min(1.0, abs(share)) if math.isfinite(share) else 0.0
    return f"rgb({above if share > 0 else below} / {0.55 * strength:.3f})"


def marked(text: str) -> str:
    """Return the visible text with its line breaks marked and kept."""
    return visible(text).replace("\n", "⏎\n")


def signed(number: float) -> str:
    """Return a number with its sign: three decimals, or six digits from a million on."""
    is_large = math.isfinite(number) and abs(number) >= 1e6
    return f"{number:+g}" if is_large else f"{number:+z.3f}"


def scale(numbers: Sequence[float]) -> float:
    """Return the largest finite absolute value; 1 where all are 0."""
    return max((abs(x) for x in numbers if math.isfinite(x)), default=0.0) or 1.0
