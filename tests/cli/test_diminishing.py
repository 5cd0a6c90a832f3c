"""lightning-rlhf diminishing, and the line at the end of stage=ppo."""

import json
import math
from pathlib import Path

import pytest

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.evaluation.diminishing import paired_stop, write_diminishing

from .conftest import Workplace


def metrics(folder: Path, iterations: int, end: str = "\n") -> Path:
    """A run whose reward rises to 1 and saturates over a tenth of its iterations."""
    rows = [
        f"{k},{1 - math.exp(-10 * k / iterations) + 0.01 * (-1) ** k}"
        for k in range(1, iterations + 1)
    ]
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(["step,reward_mean", *rows]) + end)
    return folder


def test_a_run_with_too_few_iterations(tmp_path: Path, workplace: Workplace) -> None:
    folder = metrics(tmp_path / "ppo", 11)
    assert write_diminishing(folder, "run") == 11
    assert [path.name for path in folder.iterdir()] == ["metrics.csv"]
    for path, message in (("pppo", f"the nearest is {folder}; "), ("ppo", "has 11 iterations of")):
        assert message in workplace.call("diminishing", str(tmp_path / path)).error


def evaluation(folder: Path, step: int, *golds: float | None, first: int = 0) -> Path:
    """Samples of an evaluation, two a prompt, whose gold scores are `golds` -+ 0.5."""
    lines = [
        {"index": first + i, "score": float(step), "parts": {},
         "judge": {"gold": None if gold is None else gold + side}}
        for i, gold in enumerate(golds) for side in (-0.5, 0.5)
    ]  # fmt: skip
    path = folder / "samples" / f"eval_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_stop_is_that_of_the_evaluations(tmp_path: Path, workplace: Workplace) -> None:
    folder = metrics(tmp_path / "run" / "mini" / "ppo", 40)
    evaluation(folder, 0, 0.0, 0.0, 0.0)
    evaluation(folder, 10, 9.0, 9.0, 9.0, first=1)  # of other prompts
    evaluation(folder, 20, 0.9, 1.1, None)
    evaluation(folder, 40, 0.7, 0.7, 0.7)
    out = workplace.call("diminishing", str(folder)).succeeded.out
    found = json.loads((folder / "diminishing.json").read_text())
    assert f"diminishing returns: {found['sentence']}" in " ".join(out.split())
    assert found["sentence"].startswith("after iteration ")
    assert "in 3 evaluations on 2 prompts" in found["sentence"]
    assert "from 20 [20-20] on the reward rose by 20" in found["sentence"]
    assert [(c["metric"], c["unit"]) for c in found["curves"]] == [("reward_mean", "iterations")]
    assert (folder / "diminishing.png").read_bytes().startswith(b"\x89PNG")
    assert found["stop"] == {"metric": "eval/judge/gold", "iteration": 20, "interval": [20, 20]}
    assert found["divergence"]["iteration"] == 20


def test_evaluations_without_gold_name_no_stop_and_damaged_ones_an_error(tmp_path: Path) -> None:
    evaluation(tmp_path, 0, None, None)
    path = evaluation(tmp_path, 20, None, None)
    assert paired_stop(tmp_path) is None
    path.write_text('{"index": 0, "score": 1.0}\n')
    with pytest.raises(CheckpointError, match=r"eval_000020\.jsonl is damaged"):
        paired_stop(tmp_path)
