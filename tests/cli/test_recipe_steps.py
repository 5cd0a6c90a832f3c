"""Recipes in which a stage is run more than once, as jobs of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.cli.recipe import Recipe, read_recipe
from lightning_rlhf.cli.recipe_steps import reads_a_step, split_step, step_overrides
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import build
from lightning_rlhf.stages.paths import RECIPES

STEPS = ("sft", "rank@one", "dpo@one", "dpo@two")


def overrides(step: str, *given: str, **changes: Any) -> tuple[str, ...]:
    settings: dict[str, Any] = {
        "steps": STEPS, "common": ["data=small", "dpo.beta=0.5"], "own": [], "job": None,
        "folder": Path("/out/my run"),
    }  # fmt: skip
    return step_overrides(step, given, **settings | changes)


def test_a_step_is_a_stage_and_its_job() -> None:
    assert [split_step(step) for step in STEPS] == [
        ("sft", None), ("rank", "one"), ("dpo", "one"), ("dpo", "two"),
    ]  # fmt: skip


def test_overrides_of_a_step() -> None:
    assert overrides("sft") == ("stage=sft", "data=small")
    assert overrides("dpo@two") == ("stage=dpo", "data=small", "dpo.beta=0.5", "job='two'")
    own = ["dpo.beta=0.2", "data.preferences.train='{folder}/one/rank/final/preferences.jsonl'"]
    assert overrides("dpo@one", own=own) == (
        "stage=dpo", "data=small", "dpo.beta=0.2",
        "data.preferences.train='/out/my run/one/rank/final/preferences.jsonl'", "job='one'",
    )  # fmt: skip
    assert overrides("dpo@one", "dpo.beta=0.1", "rank.pairs=all", own=own)[-3:] == (
        own[1].replace("{folder}", "/out/my run"), "dpo.beta=0.1", "job='one'",
    )  # fmt: skip
    quoted = overrides("dpo@one", own=own, folder=Path("/out/it's"))[3]
    assert quoted == own[1].replace("{folder}", r"/out/it\'s")
    assert overrides("dpo@one", job="kl=0.1")[-1] == "job='kl=0.1/one'"


def test_data_of_an_earlier_step_are_not_looked_for_before_it() -> None:
    def reads(source: str | None) -> bool:
        data = {"preferences": {"train": source}}
        settings: Any = SimpleNamespace(
            tree={"data": data}, definition=SimpleNamespace(data="preferences")
        )
        return reads_a_step(settings, Path("/out/run"))

    assert reads("/out/run/one/rank/final/preferences.jsonl")
    assert not reads("/out/runs/preferences.jsonl")
    assert not reads("org/name:train")
    assert not reads(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ["sft", "dpo", "dpo"]}, r"recipe.stages is .*; allowed: each step once"),
        ({"stages": ["sft@one"]}, "allowed: a first step without a job"),
        ({"steps": {"dpo@three": []}}, "recipe.steps is 'dpo@three'; allowed: sft, rank@one"),
        (
            {"steps": {"sft": "a"}},
            "recipe.steps is .*; allowed: a mapping from steps to lists of texts",
        ),
    ],
)
def test_recipes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    recipe = {
        "title": "Two", "stages": list(STEPS), "program": None, "overrides": [], "promises": [],
        "next": [],
    }  # fmt: skip
    assert build(Recipe, recipe, "recipe").steps == {}
    with pytest.raises(ConfigError, match=message):
        build(Recipe, recipe | changes, "recipe")


def test_each_round_of_the_shipped_recipe_trains_on_its_own_pairs() -> None:
    recipe = read_recipe(RECIPES / "rounds")
    for number in ("round1", "round2"):
        own = recipe.steps[f"dpo@{number}"]
        assert any(f"{number}/rank/final/preferences.jsonl" in word for word in own)
