"""Nothing is silent for more than ten seconds."""

from __future__ import annotations

import io

import pytest
import rich
from rich.console import Console

from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.io import console
from lightning_rlhf.io.console import PERIOD_S, Working

from .conftest import FakePPO, Fit


def test_the_lines_come_by_themselves_and_end_with_the_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every ten seconds; a shorter block says nothing."""
    assert PERIOD_S == 10
    with Working("sampling", 64):
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(console, "PERIOD_S", 0.01)
    with Working("loading [bold]it[/bold]", 64) as loading:
        loading.advance(8)
        while "loading [bold]it[/bold] 8/64  0:00:00 elapsed\n" not in capsys.readouterr().out:
            pass
    assert loading._stopped.is_set()


def test_items_count_once_the_next_is_asked_for() -> None:
    sampling = Working("sampling", 6)
    sampling.start()
    lines = [sampling.line for _ in sampling.track(["ab", "abc", "a"], len)]
    assert [line.split()[1] for line in lines] == ["0/6", "2/6", "5/6"]
    assert sampling.line.split()[1] == "6/6"
    sampling.stop()


def test_on_a_terminal_a_known_total_is_a_bar_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(rich, "_console", console)
    with Working("sampling [from] it", 4) as sampling:
        assert len(list(sampling.track(range(3)))) == 3
        assert sampling._bar is not None
        sampling._bar.refresh()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "sampling [from] it" in shown
    assert "3/4" in shown
    assert shown.endswith("\x1b[2K"), "its line is erased"


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
    fit(
        FakePPO(),
        [Progress("ppo", [])],
        [],
        batches=4,
        enable_progress_bar=True,
        val_check_interval=2,
    )
    evaluated = "ppo evaluation, batches 2/2"
    assert [line for line in shown if line != evaluated] == [
        "ppo 2/4", "ppo 4/4", "ppo 4/4",
    ]  # fmt: skip
    assert evaluated in shown
    assert started == []
