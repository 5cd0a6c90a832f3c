"""Numbers and verdicts of a run, means over seeds by hand, and the job that a model is of."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.evaluation import evaluate_reward
from lightning_rlhf.evaluation.compare import at_kl, common_kls, grouped, over_seeds
from lightning_rlhf.evaluation.run_report import leave_report, reward_verdicts
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.runs.folders import earlier
from lightning_rlhf.stages.supervised import SFT


def test_verdicts_in_numbers_from_elsewhere_are_verdicts_or_damage(tmp_path: Path) -> None:
    numbers = tmp_path / "final" / "evaluation.json"
    numbers.parent.mkdir()
    definition = SimpleNamespace(numbers=numbers.name)
    run: Any = SimpleNamespace(folder=tmp_path, manifest=None, stage="eval_policy", curves={})
    run.definition = definition
    fields = {"is_unfit": True, "words": "Not fit.", "reasons": []}
    numbers.write_text(json.dumps({"verdicts": {"model": fields}}))
    unpaid: Any = {"components": {"model": {"weight": 0}}}
    for reward, level in (([], "bad"), ({"weight": 0}, "unknown"), (unpaid, "unknown")):
        run.tree = {"reward": reward}
        assert [one.level for one in reward_verdicts(run)] == [level]
    for damaged in ([], {"model": 1}, {"model": {"words": "Fit."}}, {"model": {**fields, "x": 1}}):
        numbers.write_text(json.dumps({"verdicts": damaged or [1]}))
        with pytest.raises(CheckpointError, match=r"evaluation\.json is damaged"):
            reward_verdicts(run)


def test_the_end_of_a_run_leaves_what_another_command_is_writing(tmp_path: Path) -> None:
    """As an export of an earlier step; a stale failed.txt goes."""
    export = tmp_path / ".0123.lightning-rlhf.tmp"
    for path in (export, tmp_path / "failed.txt"):
        path.touch()
    leave_report(tmp_path, SFT())
    assert list(tmp_path.iterdir()) == [export]


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


def test_loggers_are_closed_as_failed_where_one_of_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space left")

    codes: list[int] = []
    monkeypatch.setattr(evaluate_reward, "close_loggers", lambda _, code: codes.append(code))
    run: Any = SimpleNamespace(replicas=ONE, create=lambda: tmp_path, open_loggers=lambda: [Full()])
    with (
        pytest.raises(OSError, match="no space left"),
        evaluate_reward.leave_final(run, {}) as (whole, _),
    ):
        (whole / "report.md").touch()
    assert codes == [1]
    assert not list(tmp_path.iterdir())


def test_the_interval_of_three_seeds_and_that_of_one() -> None:
    """1, 2, 3: mean 2, s = 1, 4.30265 / sqrt(3) = 2.48414."""
    assert over_seeds([1.0, 2.0, math.nan, 3.0]) == "2.000 [-0.484, 4.484]"
    assert over_seeds([1.5, math.nan]) == "1.500"
    assert over_seeds([math.nan]) == "-"


def test_a_reward_between_two_evaluations() -> None:
    """From KL 1 to 3 the reward goes from 0 to 1: 0.25 at 1.5. Later KLs fall back and do not
    count."""
    path = [(0.0, -1.0), (1.0, 0.0), (3.0, 1.0), (1.0, 9.0)]
    assert at_kl(path, 1.5) == pytest.approx(0.25)
    assert at_kl(path, 0.5) == pytest.approx(-0.5)
    assert math.isnan(at_kl(path, 3.1))


def test_common_kls_reach_as_far_as_every_run() -> None:
    runs = [[(0.0, 1.0), (2.0, 1.0)], [(0.0, 1.0), (5.0, 1.0), (4.0, 1.0)]]
    assert common_kls(runs) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert common_kls([[(0.0, 1.0)]]) == []
