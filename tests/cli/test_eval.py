"""stage=eval_reward: a report on a reward of whatever source."""

import json
from typing import Any

import pytest

from ..report.pages import check
from .conftest import Workplace, given

RULES = """
def length(prompts, responses):
    return [float(len(response)) for response in responses]


def threes(prompts, responses):
    return [3.0] * len(responses)
"""


@pytest.fixture(scope="module")
def place(judged: Workplace) -> Workplace:
    """With functions that score."""
    (judged.folder / "rules.py").write_text(RULES)
    return judged


def evaluate(place: Workplace, run: str, *overrides: str) -> tuple[str, dict[str, Any], str]:
    """The page, its numbers, and what the terminal shows."""
    sizes = ("eval_reward.samples=8", "eval_reward.batch_size=8")
    command = ("stage=eval_reward", f"run={run}", *sizes, *overrides, given(place)[0])
    out = " ".join(place.mini(*command).succeeded.out.split())
    final = place.stage("eval_reward", run) / "final"
    return (final / "report.md").read_text(), json.loads((final / "fitness.json").read_text()), out


def held_out(place: Workplace) -> list[dict[str, Any]]:
    lines = (place.folder / "data" / "preferences_val.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_reward_gets_a_report_and_a_page(place: Workplace) -> None:
    page, numbers, out = evaluate(place, "head", given(place)[1])
    named = r"head/mini/eval\_reward: head"
    assert page.startswith(f"# Is this reward fit to be maximised? {named}\n\n**Not enough data: ")
    assert numbers["verdict"] in page
    assert numbers["verdict"] in out
    report = check(place.stage("eval_reward", "head") / "report.html").text
    assert numbers["verdict"].rstrip(".") in report
    pictures = [line.partition("(")[2][:-1] for line in page.splitlines() if line[:2] == "!["]
    assert pictures
    assert all((place.stage("eval_reward", "head") / "final" / name).is_file() for name in pictures)


def test_a_sum_is_reported_as_ppo_would_maximise_it(place: Workplace) -> None:
    """Twice the length, standardised by the SFT samples, and half of 3 kept at 1.

    So the samples have mean 0.5 and deviation 2, and every response of n characters gets a n + b.
    """
    page, numbers, _ = evaluate(
        place, "sum", "reward=sum", "+reward@reward.components.long=function",
        "+reward@reward.components.steady=function", "reward.components.long.path=rules.py:length",
        "reward.components.long.weight=2", "reward.components.long.normalization=running",
        "reward.components.steady.path=rules.py:threes", "reward.components.steady.clip=1",
        "reward.components.steady.weight=0.5",
    )  # fmt: skip
    assert "sum/mini/eval\\_reward: long, steady\n" in page
    found = numbers["fitness"]
    assert found["sampled"]["mean"] == pytest.approx(0.5, abs=1e-5)
    assert found["sampled"]["std"] == pytest.approx(2, rel=1e-5)
    lengths = {side: sorted(len(pair[side]) for pair in held_out(place))
               for side in ("chosen", "rejected")}  # fmt: skip
    low, high = found["chosen"]["lowest"], found["chosen"]["highest"]
    a = (high - low) / (lengths["chosen"][-1] - lengths["chosen"][0])
    assert a > 0
    b = low - a * lengths["chosen"][0]
    for side, own in lengths.items():
        assert found[side]["mean"] == pytest.approx(a * sum(own) / 4 + b, abs=1e-4)
        assert found[side]["lowest"] == pytest.approx(a * own[0] + b, abs=1e-4)
