"""Which runs are compared as seeds of one, and in which job a model is looked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_rlhf.evaluation.compare import grouped
from lightning_rlhf.runs.folders import earlier


def test_a_second_run_of_a_seed_is_not_counted_as_another_seed() -> None:
    def run(name: str, seed: int) -> Any:
        return SimpleNamespace(name=name, definition=None, tree={"seed": seed}, curves={})

    groups = grouped([run("a", 0), run("b", 1), run("c", 0)])
    assert [[one.name for one in group.runs] for group in groups] == [["a", "b"], ["c"]]


def test_a_group_of_seeds_has_the_name_that_they_share() -> None:
    def run(seed: int) -> Any:
        name = f"r/m/seed={seed}/ppo"
        return SimpleNamespace(name=name, definition=None, tree={"seed": seed}, curves={})

    assert [group.label for group in grouped([run(7), run(8)])] == ["r/m/ppo"]
    assert [group.label for group in grouped([run(7), run(7)])] == ["r/m/seed=7/ppo"] * 2


def test_a_model_is_of_the_job_or_of_one_around_it_or_of_the_run(tmp_path: Path) -> None:
    settings: Any = SimpleNamespace(
        outputs=tmp_path, run="r", model=SimpleNamespace(name="m"), job="kl=0.1/round1"
    )

    def write(place: str) -> None:
        final = tmp_path / "r" / "m" / place / "sft" / "final"
        final.mkdir(parents=True)
        (final / "config.json").write_text("{}")

    assert earlier(settings, "sft") is None
    for place in ("", "kl=0.1", "kl=0.1/round1"):
        write(place)
        found = earlier(settings, "sft")
        assert found is not None
        assert found.path == tmp_path / "r" / "m" / place / "sft" / "final"
