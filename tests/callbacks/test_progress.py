from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import rich
from rich.console import Console

from lightning_rlhf.callbacks import progress
from lightning_rlhf.callbacks.evaluation import Samples
from lightning_rlhf.callbacks.metrics import PPOMetrics, SFTMetrics
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.stages.ppo import PPO
from lightning_rlhf.stages.supervised import SFT

from .conftest import FakePPO, FakeSFT, Fit


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0.25, "0.250"), (-40.5, "-40.500"), (0.0, "0.000"), (9999.0, "9999.000"),
     (-1.23456e38, "-1.235e+38"), (2e-5, "2e-05"),
     (math.nan, "nan"), (-math.inf, "-inf")],
)  # fmt: skip
def test_a_metric_stays_short_whatever_its_size(number: float, expected: str) -> None:
    assert (
        progress.headline_text({"kl_divergence": number}, ("kl_divergence",))
        == f"kl_divergence {expected}"
    )


def test_without_a_terminal_there_is_a_line_each_tenth_of_the_run(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [PPOMetrics(), Progress("ppo", PPO.headlines)]
    fit(FakePPO(), callbacks, [], batches=40, enable_progress_bar=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ppo ")]
    assert [line.split()[1] for line in lines] == [
        "1/40", *(f"{k}/40" for k in range(4, 41, 4))
    ]  # fmt: skip
    assert "elapsed, 0:00:00 left" in lines[-1]
    assert "reward_mean 40.500  kl_divergence 0.250  entropy 2.000  ppo_loss 2.000" in lines[-1]


def test_progress_counts_optimizer_steps_and_starts_where_a_resumed_run_starts(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"log_every_n_steps": 1, "accumulate_grad_batches": 2, "enable_progress_bar": True}
    fit(
        FakeSFT(),
        [SFTMetrics(), Progress("sft", SFT.headlines)],
        [],
        batches=6,
        **options,
    )
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "sft" in line]
    assert shown == ["1/3", "2/3", "3/3"]

    module = FakePPO()
    module.iteration = 17
    bar = Progress("ppo", PPO.headlines)
    fit(module, [bar], [], batches=20, enable_progress_bar=True, limit_train_batches=3)
    assert bar._first == 17


def test_on_a_terminal_there_is_one_bar_that_survives_tables(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    monkeypatch.setattr(rich, "_console", console)
    samples = Samples(every_n_iterations=2, count=1, characters=40, run_dir=tmp_path)
    callbacks = [PPOMetrics(), samples, Progress("ppo", PPO.headlines)]
    fit(FakePPO(), callbacks, [], batches=4, enable_progress_bar=True, val_check_interval=2)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "4/4" in shown
    assert "ppo eval" in shown
    assert "samples of iteration 4" in shown
    assert "reward_mean 4.500" in shown
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"
