"""The progress bar, and lines without a terminal: nothing is silent for more than ten seconds."""

from typing import Any

import pytest

from lightning_rlhf.callbacks.metrics import PPOMetrics, StepMetrics
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.io import console
from lightning_rlhf.io.console import Working
from lightning_rlhf.stages.ppo import PPO
from lightning_rlhf.stages.supervised import SFT

from .conftest import FakePPO, FakeSFT, Fit


def test_without_a_terminal_there_is_a_line_each_tenth_of_the_run(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [PPOMetrics(), Progress("ppo", PPO.headlines)]
    fit(FakePPO(), callbacks, [], batches=40, enable_progress_bar=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ppo ")]
    assert [line.split()[1] for line in lines] == ["1/40", *(f"{k}/40" for k in range(4, 41, 4))]
    assert "elapsed, 0:00:00 left" in lines[-1]
    assert "reward_mean 40.500  kl_divergence 0.250  entropy 2.000  ppo_loss 2.000" in lines[-1]


def test_progress_counts_optimizer_steps(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"log_every_n_steps": 1, "accumulate_grad_batches": 2, "enable_progress_bar": True}
    fit(FakeSFT(), [StepMetrics(), Progress("sft", SFT.headlines)], [], batches=6, **options)
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "sft" in line]
    assert shown == ["1/3", "2/3", "3/3"]


def test_the_lines_come_by_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PERIOD_S", 0.01)
    with Working("loading [bold]it[/bold]", 64) as loading:
        loading.advance(8)
        while "loading [bold]it[/bold] 8/64  0:00:00 elapsed\n" not in capsys.readouterr().out:
            pass


def test_training_and_evaluations_without_a_bar_are_counted(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, within training, and of Trainer.validate alike; none goes on after."""
    shown: list[str] = []
    started: list[Working] = []

    class Noted(Working):
        def stop(self) -> None:
            shown.append(self.line.partition("  ")[0])
            super().stop()
            started.remove(self)

        def start(self) -> None:
            started.append(self)
            super().start()

    monkeypatch.setattr("lightning_rlhf.callbacks.progress.Working", Noted)
    options: dict[str, Any] = {"enable_progress_bar": True, "val_check_interval": 2}
    fit(FakePPO(), [Progress("ppo", [])], [], batches=4, **options)
    evaluated = "ppo evaluation, batches 2/2"
    assert [line for line in shown if line != evaluated] == [
        "ppo 2/4", "ppo 4/4", "ppo 4/4",
    ]  # fmt: skip
    assert evaluated in shown
    assert started == []
