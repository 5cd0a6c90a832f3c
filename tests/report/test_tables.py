import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from lightning_rlhf.report.tables import before_after_table, collapsed, side_by_side


def shown(renderable: RenderableType, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def cells(table: str) -> list[list[str]]:
    rows = [line.strip("│┃ \n") for line in table.splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in row.replace("┃", "│").split("│")] for row in rows]


def test_before_and_after_with_their_difference() -> None:
    before = {"eval/reward_mean": 0.125, "eval/kl": 0.0, "eval/judge/words": 9.0}
    after = {"eval/judge/words": 8.5, "eval/kl": 2.5, "eval/reward_mean": 1.0}
    after["eval/judge/rude"] = 0.02
    assert cells(shown(before_after_table(before, after, {})))[1:] == [
        ["reward", "0.12", "1.00", "+0.88"],
        ["KL to the SFT model, nats a response", "0.00", "2.50", "+2.50"],
        ["rude", "-", "0.02", "-"],
        ["words", "9.00", "8.50", "-0.50"],
    ]


def samples(path: Path, responses: list[str], judge: dict[str, Any]) -> Path:
    rows = [
        {"prompt": f"question {i} [x]", "response": r, "score": float(i), "judge": judge}
        for i, r in enumerate(responses)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_same_prompts_side_by_side(tmp_path: Path) -> None:
    # Of ten prompts the even ones are answered differently: 0, 2, 4, 6, 8; two spread: 0 and 4.
    before = samples(tmp_path / "b.jsonl", ["same"] * 10, {"gold": -1.0})
    after = samples(tmp_path / "a.jsonl", ["new", "same"] * 5, {"gold": 0.5})
    text = shown(side_by_side(before, after, n=2))
    assert [i for i in range(10) if f"question {i} [x]" in text] == [0, 4]
    assert "gold -1.00, reward +0.00" in text
    assert "gold +0.50, reward +4.00" in text


# Of a run that went well: 4 nats over 14 tokens.
WELL = {"kl_divergence": 4.0, "rollout/response_tokens": 14.0, "entropy": 0.4}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"kl_divergence": 14.0, "entropy": 0.01}, None),
        ({"kl_divergence": 28.0}, "kl_divergence is 2 nats a token (above 1) in the last"),
        ({"kl_divergence": math.nan}, "kl_divergence is nan nats"),
        ({"kl_divergence": 28.0, "entropy": 0.005}, "(above 1) and entropy is 0.005 nats a token"),
        ({"entropy": 0.0}, "a smaller own.lr, or a larger own.kl_coef"),
    ],
)
def test_a_policy_collapses_far_from_the_reference_or_sure_of_every_token(
    change: dict[str, float], told: str | None
) -> None:
    found = collapsed(WELL | change, "own")
    assert found is None if told is None else told in str(found)
