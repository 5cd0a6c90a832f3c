"""stage=eval_reward: a report on a reward of whatever source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..report.pages import check
from .conftest import SHIPPED, Workplace, given
from .others import own_scores

RULES = """
def length(prompts, responses):
    return [float(len(response)) for response in responses]


def broken(prompts, responses):
    wanted = [response.startswith("Three plus four is seven.") for response in responses]
    return [float("nan") if hit else 1.0 for hit in wanted]


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
    command = [
        "stage=eval_reward",
        f"run={run}",
        "eval_reward.samples=8",
        "eval_reward.batch_size=8",
        *overrides,
    ]
    out = place.mini(*command, given(place)[0]).succeeded.out
    final = place.stage("eval_reward", run) / "final"
    return (final / "report.md").read_text(), json.loads((final / "fitness.json").read_text()), out


def judge(place: Workplace) -> Path:
    return place.outputs / "other" / "other" / "rm" / "final"


def sources(place: Workplace) -> dict[str, list[str]]:
    return {
        "head": [given(place)[1]],
        "judge": ["reward=model", f"reward.name_or_path={judge(place)}"],
        "function": ["reward=function", "reward.path=rules.py:length"],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["head", "function"])
def test_every_kind_of_reward_gets_a_report(place: Workplace, kind: str) -> None:
    page, numbers, out = evaluate(place, kind, *sources(place)[kind])
    named = rf"{kind}/mini/eval\_reward: {kind}"
    assert page.startswith(f"# Is this reward fit to be maximised? {named}\n\n**Not enough data: ")
    assert numbers["verdict"] in page
    assert numbers["verdict"] in out
    assert "Measured on 4 held-out pairs of 4 prompts and 8 SFT samples" in page
    assert "4 held-out pairs, too few to measure with" in " ".join(out.split())
    report = check((place.stage("eval_reward", kind) / "report.html").read_text()).text
    assert numbers["verdict"].rstrip(".") in report
    assert "nothing was evaluated" not in report.lower()
    assert "definitions, checks and pictures: final/report.md" in report
    assert "Fitness of a reward: not judged." in report
    pictures = [line.partition("(")[2][:-1] for line in page.splitlines() if line[:2] == "!["]
    assert pictures
    assert all((place.stage("eval_reward", kind) / "final" / name).is_file() for name in pictures)
    assert ("held-out pairs read through PPO's path" in out) == (kind != "function")


def test_its_scores_are_those_of_the_reward_model(place: Workplace) -> None:
    command = ["reward.normalization=stored", "reward.dtype=float32", *sources(place)["judge"]]
    _, numbers, _ = evaluate(place, "scores", *command)
    lines = (place.folder / "data" / "preferences_val.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    chosen, rejected = (
        own_scores(judge(place), [{"prompt": p["prompt"], "response": p[side]} for p in pairs])
        for side in ("chosen", "rejected")
    )
    found = numbers["fitness"]
    assert found["chosen"]["mean"] == pytest.approx(sum(chosen) / 4, abs=1e-5)
    assert found["rejected"]["lowest"] == pytest.approx(min(rejected), abs=1e-5)
    right = sum(c > r for c, r in zip(chosen, rejected, strict=True))
    assert found["accuracy"]["accuracy"] == right / 4


def test_a_sum_is_reported_as_ppo_would_be_paid(place: Workplace) -> None:
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
    assert page.startswith(
        "# Is this reward fit to be maximised? sum/mini/eval\\_reward: long, steady\n"
    )
    found = numbers["fitness"]
    assert found["sampled"]["mean"] == pytest.approx(0.5, abs=1e-5)
    assert found["sampled"]["std"] == pytest.approx(2, rel=1e-5)
    lines = (place.folder / "data" / "preferences_val.jsonl").read_text().splitlines()
    chosen, rejected = (
        sorted(len(json.loads(x)[s]) for x in lines) for s in ("chosen", "rejected")
    )
    low, high = found["chosen"]["lowest"], found["chosen"]["highest"]
    a = (high - low) / (chosen[-1] - chosen[0])
    assert a > 0
    b = low - a * chosen[0]
    for side, lengths in (("chosen", chosen), ("rejected", rejected)):
        assert found[side]["mean"] == pytest.approx(a * sum(lengths) / 4 + b, abs=1e-4)
        assert found[side]["lowest"] == pytest.approx(a * lengths[0] + b, abs=1e-4)


def test_a_taste_for_length_is_flagged(place: Workplace) -> None:
    """Right wherever the longer response was chosen, wrong elsewhere: a gap of 1."""
    command = [*sources(place)["function"], "data.max_val_rows=null"]
    command += [f"data.preferences.val={SHIPPED / 'preferences_val.jsonl'}"]
    page, numbers, out = evaluate(place, "length", *command)
    assert "preference pairs to look at: " in out
    assert f"{numbers['about_pairs']}\n" in out
    flags = {f["subject"]: f for f in numbers["findings"] if f["outcome"] == "flag"}
    assert flags["length gap"]["value"] > 0.9
    assert "prefers the longer response" in flags["length gap"]["words"]
    assert "length gap" in numbers["verdict"]
    assert "| length gap | **flag** |" in page


def test_what_is_no_number_stops_it_and_names_whose(place: Workplace) -> None:
    """Among the held-out pairs is the response that `broken` breaks at."""
    outcome = place.mini(
        "stage=eval_reward", "run=broken", given(place)[0], "reward=sum",
        "+reward@reward.components.good=random", "+reward@reward.components.bad=function",
        "reward.components.bad.path=rules.py:broken",
    )  # fmt: skip
    assert outcome.status == 1, outcome.out
    said, prompt = "'Three plus four is seven. Now go away.'", "'Work out three plus four.'"
    assert outcome.error.startswith(
        f"reward 'bad' gave nan for the response {said} to the prompt {prompt};"
    )
    assert not (place.stage("eval_reward", "broken") / "final").exists()
