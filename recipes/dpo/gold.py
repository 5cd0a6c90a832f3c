"""The quickstart's hidden judge as a reward, for the evaluation of the policies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if (folder := str(Path(__file__).resolve().parents[1] / "quickstart")) not in sys.path:
    sys.path.insert(0, folder)

from judge import judge


def gold(
    prompts: list[str], responses: list[str], messages: list[list[dict[str, Any]]]
) -> list[float | None]:
    """Return the judge's gold score of each response, taken to be ended by the model itself."""
    return [
        judge({"messages": turns}, response, True)["gold"]
        for turns, response in zip(messages, responses, strict=True)
    ]
