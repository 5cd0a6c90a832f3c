"""Recipes in which a stage is run more than once, as jobs of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.cli.arguments import parse_overrides
from lightning_rlhf.cli.recipe import Recipe, data_of_run, is_newer, read_recipe, step_overrides
from lightning_rlhf.runs.console import RECIPES

STEPS = ("sft", "rank@one", "dpo@one", "dpo@two")


def overrides(
    step: str,
    *given: str,
    own: Sequence[str] = (),
    job: str | None = None,
    folder: Path = Path("/out/my run"),
) -> tuple[str, ...]:
    common = ("data=small", "dpo.beta=0.5")
    recipe = Recipe(title="", stages=STEPS, program=None, overrides=common, steps={step: own},
                    promises=(), next=())  # fmt: skip
    return step_overrides(recipe, step, given, job, folder)


def test_overrides_of_a_step() -> None:
    assert overrides("sft") == ("stage=sft", "data=small")
    assert overrides("dpo@two") == ("stage=dpo", "data=small", "dpo.beta=0.5", "job='two'")
    own = ["dpo.beta=0.2", "data.preferences.train={folder}/one/rank/final/preferences.jsonl"]
    source = "data.preferences.train='/out/my run/one/rank/final/preferences.jsonl'"
    assert overrides("dpo@one", own=own) == (
        "stage=dpo", "data=small", "dpo.beta=0.2", source, "job='one'",
    )  # fmt: skip
    given = ("dpo.beta=0.1", "rank.pairs=all", "data.preferences.train=mine.jsonl")
    assert overrides("dpo@one", *given, own=own) == (
        "stage=dpo", "data=small", "dpo.beta=0.1", source, "job='one'",
    )  # fmt: skip
    assert overrides("dpo@one", job="kl=0.1")[-1] == "job='kl=0.1/one'"
    assert "advantage=rloo" not in overrides("sft", "advantage=rloo")


@pytest.mark.parametrize("name", ["a,b", "it's", "(a)[b]{c}"])
def test_folders_of_any_name(name: str) -> None:
    words = overrides("dpo@one", own=["policy.checkpoint={folder}/one"], folder=Path("/out") / name)
    (parsed,) = [o for o in parse_overrides(words) if o.key_or_group == "policy.checkpoint"]
    assert parsed.value() == f"/out/{name}/one"


def test_a_step_is_outdated_by_newer_data(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    data = tmp_path / "preferences.jsonl"
    assert not is_newer(data, tmp_path / "final")
    data.write_text("{}")
    os.utime(data, ns=(0, (tmp_path / "final").stat().st_mtime_ns + 1))
    assert is_newer(data, tmp_path / "final")
    os.utime(data, ns=(0, (tmp_path / "final").stat().st_mtime_ns - 1))
    assert not is_newer(data, tmp_path / "final")


def test_data_of_an_earlier_step_are_not_looked_for_before_it() -> None:
    def reads(source: str | None) -> Path | None:
        data = {"preferences": {"train": source}}
        settings: Any = SimpleNamespace(
            tree={"data": data}, definition=SimpleNamespace(data="preferences")
        )
        return data_of_run(settings, Path("/out/run"))

    made = "/out/run/one/rank/final/preferences.jsonl"
    assert reads(made) == Path(made)
    assert not reads("/out/runs/preferences.jsonl")
    assert not reads("org/name:train")
    assert not reads(None)


def test_a_recipe_as_written_is_that_of_the_run_in_another_folder() -> None:
    recipe, folder = read_recipe(RECIPES / "rounds"), Path("/out/mine")
    words = step_overrides(recipe, "dpo@round2", (), None, folder)
    assert "policy.checkpoint='/out/mine/round1/dpo/final'" in words
    given = ("run=mine", "outputs=/out")
    assert set(words) < set(step_overrides(recipe, "dpo@round2", given, None, folder))
