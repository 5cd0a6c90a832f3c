"""The arithmetic of the tables of benchmarks/equal_terms.py, on curves made by hand."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_rewards_at_equal_time_and_kl_are_compared_seed_by_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 1 has one unit of reward more on both sides: their difference has no spread."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from equal_terms import tables

    def run(kls: list[float], rewards: list[float], seconds: float) -> dict[str, tuple]:
        steps = [0, 10, 20]
        clock = {"time/processor_s": (list(range(1, 21)), [seconds] * 20)}
        return clock | {"eval/kl": (steps, kls), "eval/reward_mean": (steps, rewards)}

    gae = {s: run([0, 1, 2], [s, s + 1, s + 2], 1.0) for s in (0, 1)}
    grpo = {s: run([0, 1, 4], [s, s + 2, s + 5], 2.0) for s in (0, 1)}
    means, differences = tables({"gae": gae, "grpo": grpo})
    columns, _, row = ([x.strip() for x in line.split("|")] for line in differences.splitlines())
    found = {name: cell.split(" [")[0] for name, cell in zip(columns, row, strict=True)}
    # 20 s are 10 iterations of grpo. At KLs of 0.4 to 2: (0.8 + 1.6 + 2.2 + 2.6 + 3) / 5 - 1.2.
    assert found["reward after 20 s"] == "0.000"
    assert found["reward at the end"] == "3.000"
    assert "0.840 [0.840, 0.840]" in row
    assert "2.540 [-3.813, 8.893]" in means  # 2.04 and 3.04; t of one degree of freedom: 12.706
