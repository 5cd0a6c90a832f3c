"""lightning-rlhf diminishing, and the line at the end of stage=ppo."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.stages.diminishing import print_diminishing

from .conftest import Workplace


def metrics(folder: Path, iterations: int, end: str = "\n") -> Path:
    """A run whose reward rises to 1 in half of its iterations, and stays."""
    rows = [
        f"{k},{min(2 * k / iterations, 1) + 0.01 * (-1) ** k}" for k in range(1, iterations + 1)
    ]
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(["step,reward_mean", *rows]) + end)
    return folder


def test_a_run_that_is_there(tmp_path: Path, workplace: Workplace) -> None:
    folder = metrics(tmp_path / "run" / "mini" / "ppo", 40)
    out = workplace.call("diminishing", str(folder)).succeeded.out
    assert "diminishing returns: after iteration" in out
    assert (folder / "diminishing.json").is_file()
    assert (folder / "diminishing.png").is_file()


def test_a_run_with_too_few_iterations(tmp_path: Path, workplace: Workplace) -> None:
    folder = metrics(tmp_path / "ppo", 11)
    assert print_diminishing(folder, "run") is False
    assert [path.name for path in folder.iterdir()] == ["metrics.csv"]
    for path, count in ((folder, 11), (tmp_path / "nowhere", 0)):
        error = workplace.call("diminishing", str(path)).error
        file = path / "metrics.csv"
        assert error == f"{file} has {count} iterations of stage=ppo; allowed: at least 12"


def test_a_damaged_file_is_named(tmp_path: Path, workplace: Workplace) -> None:
    folder = metrics(tmp_path / "ppo", 20, "\n20,1.0\n")  # a step twice
    error = workplace.call("diminishing", str(folder)).error
    assert f"{folder / 'metrics.csv'}, line 22, is damaged" in error


@pytest.mark.slow
def test_stage_ppo_ends_with_it(workplace: Workplace) -> None:
    short = ("ppo.iterations=12", "ppo.val_every=12", "ppo.max_response_tokens=2")
    out = workplace.mini(
        "stage=ppo", "policy.checkpoint=base", "reward=random", *short
    ).succeeded.out
    assert "diminishing returns: no" in out or "diminishing returns: after" in out
    assert (workplace.stage("ppo") / "diminishing.json").is_file()
