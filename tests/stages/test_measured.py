import json
from pathlib import Path

import numpy as np
import pytest

from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.runs.measured import by_prompt, evaluation_files, interval_of, with_intervals


def sample(index: int, gold: float | None, kl: float = 0.0) -> dict[str, object]:
    numbers = {"score": 0.0, "kl": kl, "tokens": 1, "ended": True}
    return {"index": index, **numbers, "parts": {"helpful": 2.0}, "judge": {"gold": gold}}


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
    found = with_intervals({name: 4.5, f"start/{name}": 3.5}, tmp_path)[name]
    assert (found.before, found.gain, found.gain_interval) == (3.5, 1.0, (1.0, 1.0))
    assert found.interval is not None
    low, high = found.interval
    assert low < 4.5 < high


def interval(gold: list[float | None], prompts: list[int]) -> Interval | None:
    samples = [sample(index, g) for index, g in zip(prompts, gold, strict=True)]
    return interval_of(by_prompt(samples, "eval/judge/gold"))


def test_the_interval_is_the_studentised_one_of_the_prompts_means() -> None:
    """Of 0, 0 and 3: mean 1, standard error sqrt((1 + 1 + 4) / 3 / 2) = 1.

    A resample has the 3 k times. k = 0: its se is 0, for which that of all counts: (0 - 1) / 1.
    k = 1: 0. k = 2: (2 - 1) / sqrt((4 + 1 + 1) / 3 / 2) = 1. k = 3: (3 - 1) / 1 = 2. Their
    probabilities are 8, 12, 6 and 1 of 27, so the quantiles are -1 and 2: 1 - 2 to 1 + 1.
    The percentiles of the means would be 0 and 3.
    """
    expected = pytest.approx((-1.0, 2.0), abs=1e-12)
    assert interval([0.0, 0.0, 3.0], [0, 1, 2]) == expected
    # Prompts count alike, whatever the number of their samples, in any order.
    assert interval([2.0, 0.0, 4.0, 0.0, 0.0], [2, 0, 2, 1, 1]) == expected
    # 200 prompts of a fair coin: 0.5 +- 1.96 * 0.5 / sqrt(200) = 0.5 +- 0.069
    coins = interval([i % 2.0 for i in range(200)], list(range(200)))
    assert coins == pytest.approx((0.431, 0.569), abs=0.011)


def test_a_share_is_known_within_0_and_1_and_never_for_certain(tmp_path: Path) -> None:
    """The mean of 8 prompts is 1, and so is that of every resample of them."""
    write(tmp_path, 0, [1.0] * 16)
    interval = with_intervals({"eval/judge/gold": 1.0}, tmp_path)["eval/judge/gold"].interval
    assert interval is not None
    assert 0.5 < interval[0] < 1.0
    assert interval[1] <= 1.0


def test_numbers_of_a_sample_go_by_the_names_of_their_metrics() -> None:
    samples = [sample(0, 1.0, kl=3.0), sample(1, 1.0, kl=5.0)]
    for name, values in {
        "eval/reward_mean": [0.0, 0.0], "eval/kl": [3.0, 5.0], "eval/response_tokens": [1.0, 1.0],
        "eval/ended": [1.0, 1.0], "eval/reward/helpful": [2.0, 2.0], "eval/judge/gold": [1.0, 1.0],
    }.items():  # fmt: skip
        assert by_prompt(samples, name).tolist() == values
    assert np.isnan(by_prompt(samples, "eval/distinct_1")).all()


def test_the_samples_are_those_of_the_step_that_became_final(tmp_path: Path) -> None:
    for iteration, gold in enumerate([0.0, 5.0, 9.0]):
        write(tmp_path, iteration, [gold] * 4)
    name = "eval/judge/gold"
    metrics = {name: 5.0, f"start/{name}": 0.0}
    # Of a run without ending.json, the last samples count.
    assert with_intervals(metrics, tmp_path)[name].gain_interval == (9.0, 9.0)
    ending = {"final": "1", "step": 1, "last_step": 2, "metrics": {}, "stopped": None}
    (tmp_path / "ending.json").write_text(json.dumps(ending))
    samples = tmp_path / "samples"
    chosen = samples / "eval_000001.jsonl"
    assert evaluation_files(tmp_path) == (samples / "eval_000000.jsonl", chosen)
    found = with_intervals(metrics, tmp_path)[name]
    assert (found.interval, found.gain, found.gain_interval) == ((5.0, 5.0), 5.0, (5.0, 5.0))
    chosen.unlink()
    assert evaluation_files(tmp_path) is None
    found = with_intervals(metrics, tmp_path)[name]
    assert (found.interval, found.gain, found.gain_interval) == (None, 5.0, None)


def test_the_accuracy_has_the_interval_of_the_fitness_report(tmp_path: Path) -> None:
    metrics = {"eval/accuracy": 0.74}
    assert with_intervals(metrics, None)["eval/accuracy"].interval is None
    header = "step,eval/accuracy,fitness/accuracy_low,fitness/accuracy_high"
    (tmp_path / "metrics.csv").write_text(f"{header}\n1,0.6,,\n2,0.74,0.7,0.78\n")
    found = with_intervals(metrics, tmp_path)["eval/accuracy"]
    assert (found.interval, found.gain) == ((0.7, 0.78), None)
