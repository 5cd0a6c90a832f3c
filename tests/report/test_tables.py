import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from lightning_rlhf.report import tables


def test_before_and_after_with_their_difference() -> None:
    before = {"eval/reward_mean": 0.125, "eval/kl": 0.0, "eval/judge/words": 9.0}
    after = {"eval/judge/words": 8.5, "eval/kl": 2.5, "eval/reward_mean": 1.0}
    after["eval/judge/rude"] = 0.02
    output = io.StringIO()
    Console(width=120, file=output).print(tables.before_after_table(before, after))
    cut = (line.split("  ") for line in output.getvalue().splitlines()[3:])
    assert [[cell.strip() for cell in line if cell.strip()] for line in cut] == [
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
    (first, _), (_, last) = tables.paired_samples(before, after, 2)
    assert [first["prompt"], last["prompt"]] == ["question 0 [x]", "question 4 [x]"]
    assert tables.score_text(first) == "gold -1.00, reward +0.00"
    assert tables.score_text(last) == "gold +0.50, reward +4.00"
    pair = {"prompt": "a\nb\x1b", "before": "\u6f22" * 99, "after": "c", "before_numbers": "x: 1"}
    for width in (40, 80):  # a wide character takes two columns
        lines = tables.samples_shown([pair | {"after_numbers": "y"}], width).plain.splitlines()
        assert (cell_len(lines[1]), lines[1].endswith("  1")) == (width, width == 80)
        assert lines[0].endswith(" a b\\x1b")


# Of a run that went well: 4 nats over 14 tokens.
WELL = {"kl_divergence": 4.0, "rollout/response_tokens": 14.0, "entropy": 0.4}


@pytest.mark.parametrize(
    ("change", "message"),
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
    change: dict[str, float], message: str | None
) -> None:
    found = tables.collapsed(WELL | change, "own")
    assert found is None if message is None else message in str(found)
