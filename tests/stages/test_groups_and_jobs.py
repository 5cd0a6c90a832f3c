"""Which runs are compared as seeds of one, and in which job a model is looked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_rlhf.evaluation.compare import grouped
from lightning_rlhf.runs.folders import earlier


def test_runs_of_several_seeds_are_a_group() -> None:
    """Named by what they share; a second run of a seed is not counted as another seed."""

    def groups(*seeds: int) -> list[tuple[str, list[int]]]:
        runs: list[Any] = [
            SimpleNamespace(name=f"r/m/{n}{x}/ppo", definition=None, tree={"seed": x}, curves={})
            for n, x in enumerate(seeds)
        ]
        return [(found.label, [x.tree["seed"] for x in found.runs]) for found in grouped(runs)]

    assert groups(7, 8) == [("r/m/ppo", [7, 8])]
    assert groups(7, 8, 7) == [("r/m/ppo", [7, 8]), ("r/m/27/ppo", [7])]


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
