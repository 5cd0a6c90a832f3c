"""A recipe that is a program: it gets PPO's numbers, and what it claims is checked."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlhf.runs import console

from .conftest import Workplace

PROGRAM = """
from types import SimpleNamespace

READS = ("lr", "iterations", "gamma")

def main(config, seed, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "values.txt").write_text(f"{config.lr} {config.iterations} {seed}")
    measured = {"low": 0.0, "high": 1.0}
    return [
        SimpleNamespace(text=f"a {word} number", measured=measured[word], at_least=LEAST,
                        at_most=2.0, holds=LEAST <= measured[word] <= 2.0)
        for word in ("low", "high")
    ]
"""
RECIPE: dict[str, Any] = {
    "title": "Numbers", "stages": [], "program": None, "overrides": ["ppo.lr=0.5", "seed=3"],
    "promises": [], "next": ["Read a book."],
}  # fmt: skip


def serve(recipes: Path, least: float) -> None:
    """recipe=small, whose two claims hold for least=0; for 0.5 one of them fails.

    Modules are remembered by their names: each program has its own.
    """
    stem = f"program_{str(least).replace('.', '_')}"
    folder = recipes / "small"
    folder.mkdir(parents=True)
    (folder / f"{stem}.py").write_text(PROGRAM.replace("LEAST", str(least)))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"program": f"{stem}.py"}))


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(console, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(sys, "path", sys.path[:])
    known = set(sys.modules)
    yield tmp_path / "recipes"
    for name in set(sys.modules) - known:
        if name.startswith("program_"):
            del sys.modules[name]


def test_the_program_gets_the_numbers_and_its_claims_are_shown(
    workplace: Workplace, recipes: Path
) -> None:
    serve(recipes, 0.0)
    out = workplace.call("recipe=small", "ppo.iterations=7", "run=mine").succeeded.out
    values = workplace.outputs / "mine" / "small" / "values.txt"
    assert values.read_text() == "0.5 7 3"
    assert out.count(" kept\n") == 2
    assert "a high number" in out
    assert "Read a book." in out
    out = workplace.call("-m", "recipe=small", "ppo.iterations=7,8").succeeded.out
    assert out.count(" done\n") == 2  # though it leaves no model


def test_a_claim_that_fails_fails_the_command(workplace: Workplace, recipes: Path) -> None:
    serve(recipes, 0.5)
    outcome = workplace.call("recipe=small")
    assert outcome.error == (
        "Numbers did not keep its promises: a low number is 0.000, promised: 0.5 to 2"
    )
    assert outcome.out.count(" broken\n") == outcome.out.count(" kept\n") == 1
    assert "did not" in workplace.call("recipe=small", "seed=4").error  # for any seed
    out = workplace.call("recipe=small", "ppo.lr=0.25").succeeded.out  # of its own numbers
    assert out.count(" broken\n") == 1


@pytest.mark.matrix
def test_the_bandit_finds_what_can_be_written_down(workplace: Workplace) -> None:
    out = workplace.call("recipe=bandit").succeeded.out
    folder = workplace.outputs / "default" / "bandit"
    assert (folder / "bandit.png").read_bytes().startswith(b"\x89PNG")
    with (folder / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # Three clip ranges, with and without the penalty, 100 iterations each.
    assert len(rows) == 600
    assert {(row["clip_range"], row["kl_coef"]) for row in rows} == {
        (clip, coef) for clip in ("0.05", "0.2", "0.8") for coef in ("0.0", "0.5")
    }
    # Five claims a clip range, two comparisons of clip ranges with and without the penalty.
    assert out.count(" kept\n") == 3 * 5 + 2 * 2
    assert "broken" not in out
