import json
from pathlib import Path

import numpy as np
import pytest

from lightning_rlhf.stages.measured import Measured, StageResult, bootstrap


def sample(index: int, gold: float | None, kl: float = 0.0) -> dict[str, object]:
    return {
        "index": index,
        "score": 0.0,
        "kl": kl,
        "tokens": 1,
        "ended": True,
        "parts": {"helpful": 2.0},
        "judge": {"gold": gold},
    }


def write(folder: Path, iteration: int, gold: list[float | None]) -> None:
    lines = [json.dumps(sample(i // 2, g)) + "\n" for i, g in enumerate(gold)]
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / f"eval_{iteration:06d}.jsonl").write_text("".join(lines))


def test_gains_are_differences_between_responses_to_the_same_prompt(tmp_path: Path) -> None:
    """Every response gains exactly 1 while the values of the prompts differ by up to 7."""
    before: list[float | None] = [float(i) for i in range(8)]
    write(tmp_path, 0, before)
    write(tmp_path, 5, [9.0] * 8)  # neither the first nor the last
    write(tmp_path, 10, [x + 1.0 for x in before if x is not None])
    name = "eval/judge/gold"
    result = StageResult.read({name: 4.5, f"start/{name}": 3.5}, tmp_path)
    assert result.gain(name) == Measured(1.0, (1.0, 1.0))
    level = result.metric(name)
    assert level is not None
    assert level.interval is not None
    low, high = level.interval
    assert low < 4.5 < high


def test_the_interval_is_that_of_whole_prompts() -> None:
    """Two prompts of values 0 and 1: both resampled alike has probability 1/4 each."""
    samples = [sample(index, 0.0) for index in (0, 0, 0, 1, 1, 1)]
    values = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert bootstrap(values, samples) == (0.0, 1.0)
    # 200 prompts of a fair coin: 0.5 +- 1.96 * 0.5 / sqrt(200) = 0.5 +- 0.069
    samples = [sample(index, 0.0) for index in range(200)]
    found = bootstrap(np.arange(200) % 2.0, samples)
    assert found == pytest.approx((0.431, 0.569), abs=0.011)


def test_responses_without_the_part_do_not_count() -> None:
    samples = [sample(index, 0.0) for index in range(4)]
    assert bootstrap(np.array([1.0, np.nan, 1.0, np.nan]), samples) == (1.0, 1.0)
    assert bootstrap(np.array([1.0, np.nan, np.nan, np.nan]), samples) is None


def test_the_accuracy_has_the_interval_of_the_fitness_report(tmp_path: Path) -> None:
    ends = {"fitness/accuracy_low": 0.7, "fitness/accuracy_high": 0.78}
    found = StageResult.read({"eval/accuracy": 0.74} | ends, tmp_path).metric("eval/accuracy")
    assert found == Measured(0.74, (0.7, 0.78))
    bare = StageResult.read({"eval/accuracy": 0.74}, tmp_path)
    assert bare.metric("eval/accuracy") == Measured(0.74, None)
    assert str(bare.metric("eval/accuracy")) == "0.740"
    assert bare.metric("eval/loss") is None
    assert bare.gain("eval/accuracy") is None
