"""How a run ends: by a signal, by a rule; and the average of its weights, by hand."""

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.callbacks.stopping import AVERAGE, EarlyStop, WeightAverage
from lightning_rlhf.core.config import Mode, StopConfig
from lightning_rlhf.core.ppo_config import PPOStopConfig
from lightning_rlhf.parallel.world import IN_LAUNCHER, TORCHRUN

from .conftest import Fit

NOBODY = 2**22 + 1
"""Larger than the number of any process of Linux."""


@pytest.mark.parametrize(
    ("rank", "launcher", "lines"), [(0, NOBODY, 1), (1, NOBODY, 0), (0, os.getppid(), 0)]
)
def test_one_process_prints_a_signal(
    rank: int, launcher: int, lines: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The first; not where this program has started it, and prints the signal itself."""
    for name, value in zip((*TORCHRUN, IN_LAUNCHER), (rank, 2, rank, launcher), strict=True):
        monkeypatch.setenv(name, str(value))
    stop = Stop()
    stop.receive(signal.SIGTERM, None)
    assert stop.signal == signal.SIGTERM
    assert capfd.readouterr().err.count("ending after this step") == lines


def test_a_signal_that_is_repeated_at_once_is_the_first_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Linux sends a process the signal for its parent's end once for each thread of the parent."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append(signum))
    before, stop = signal.getsignal(signal.SIGTERM), Stop()
    for _ in range(3):
        stop.receive(signal.SIGTERM, None)
    assert not sent
    assert capfd.readouterr().err.count("ending after this step") == 1
    stop.time -= 1
    try:
        stop.receive(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sent == [signal.SIGTERM]


def patient(patience: int, min_gain: float = 0.0, mode: Mode = "max") -> EarlyStop:
    config = StopConfig(patience=patience, metric=None, mode=None, min_gain=min_gain)
    return EarlyStop("sft", config, ("eval/x", mode))


def trainer(step: int, fn: TrainerFn = TrainerFn.FITTING, **metrics: float) -> Any:
    total = SimpleNamespace(processed=step)
    loop = SimpleNamespace(batch_progress=SimpleNamespace(total=total))
    return SimpleNamespace(
        state=SimpleNamespace(fn=fn), fit_loop=SimpleNamespace(epoch_loop=loop),
        sanity_checking=False, num_sanity_val_steps=math.inf, should_stop=False,
        callback_metrics={name.replace("__", "/"): x for name, x in metrics.items()},
    )  # fmt: skip


def ended(rule: EarlyStop, values: list[float], begin: int = 1) -> int | None:
    """Return the number of the evaluation that ends the run; None where none does."""
    for number, value in enumerate(values, start=begin):
        found = trainer(number, eval__x=value)
        rule.on_validation_end(found, None)
        if found.should_stop:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "min_gain", "mode", "end"),
    [
        ([1.0, 0.9, 0.8], 0.0, "max", 3),  # no gain twice
        ([1.0, 1.0, 1.0], 0.0, "max", 3),  # an equal value is none
        ([1.0, 1.05, 1.15, 1.2, 1.3], 0.1, "max", None),  # 1.15 > 1.1, 1.2 < 1.25, 1.3 > 1.25
        ([5.0, 4.95, 4.8, 4.75, 4.71], 0.1, "min", 5),  # 4.8 < 4.9, then none below 4.7
        ([1.0, math.nan, math.nan], 0.0, "min", 3),
        ([math.nan, -7.0, math.nan], 0.0, "max", None),  # any number gains over none
    ],
)
def test_two_evaluations_without_a_gain_end_the_run(
    values: list[float], min_gain: float, mode: Mode, end: int | None
) -> None:
    assert ended(patient(2, min_gain, mode), values) == end


def test_the_state_goes_on_in_a_resumed_run() -> None:
    rule, resumed = patient(2), patient(2)
    assert ended(rule, [1.0, 0.9]) is None
    resumed.load_state_dict(rule.state_dict())
    assert ended(resumed, [0.9], begin=3) == 3
    assert resumed.reason is not None
    assert " since 1.000 at step 1, in 2 evaluations (sft.stop.patience)" in resumed.reason
    again, later = patient(2), trainer(4)
    again.load_state_dict(resumed.state_dict())
    again.on_train_start(later, None)
    assert later.should_stop


def test_evaluations_outside_of_the_training_do_not_count() -> None:
    rule = patient(1)
    assert ended(rule, [1.0]) is None
    rule.on_validation_end(trainer(1, TrainerFn.VALIDATING, eval__x=0.0), None)
    checking = trainer(1, eval__x=0.0)
    checking.sanity_checking = True
    rule.on_validation_end(checking, None)
    assert (rule.without, rule.reason) == (0, None)


def test_the_first_iteration_above_the_bound_of_the_kl_ends_the_run() -> None:
    config = PPOStopConfig(patience=None, metric=None, mode=None, min_gain=0.0, max_kl=2.0)
    rule = EarlyStop("ppo", config, ("eval/x", "max"))
    for kl, stops in ((1.0, False), (2.0, False), (2.5, True)):
        found = trainer(1, kl_divergence=kl)
        rule.on_train_batch_end(found, None, None, None, 0)
        assert found.should_stop is stops
    assert rule.reason == "kl_divergence is 2.500 nats a response, above ppo.stop.max_kl=2"


class Counter(LightningModule):
    """Its weight grows by 1 with each optimizer step, of which a batch has two."""

    def __init__(self, name: str = "roles") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        setattr(self, name, nn.Linear(1, 1, bias=False))
        self.name = name
        nn.init.zeros_(self.counted)
        self.critic_roles = nn.Linear(1, 1, bias=False)
        self.validated: list[float] = []
        self.trained: list[float] = []

    @property
    def counted(self) -> nn.Parameter:
        return getattr(self, self.name).weight

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(-self.counted.sum() - self.critic_roles.weight.sum())
            self.optimizers().step()
        self.trained.append(self.counted.item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.counted.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Saved(Callback):
    """Writes a checkpoint after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{args[-1]}.ckpt")


# decay 0.75, weights 1, 2, 3, ...: 1; 0.75 + 0.25 * 2 = 1.25; 0.9375 + 0.75 = 1.6875;
# 1.265625 + 1 = 2.265625; 1.69921875 + 1.25 = 2.94921875; 2.2119140625 + 1.5 = 3.7119140625.
AVERAGES = [1.25, 2.265625, 3.7119140625]


def test_the_average_is_that_by_hand(fit: Fit, tmp_path: Path) -> None:
    """Two validation batches after each training batch, and before the first of them."""
    module = Counter()
    options = {"val_check_interval": 1, "num_sanity_val_steps": 1}
    fit(module, [WeightAverage(0.75), Saved(tmp_path)], [], batches=3, **options)
    assert module.trained == [2.0, 4.0, 6.0]  # no validation changes what is trained
    assert module.validated == [0.0, *(x for average in AVERAGES for x in (average, average))]
    assert module.counted.item() == AVERAGES[-1]
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    for number, average in enumerate(AVERAGES):
        found = torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
        assert found["state_dict"]["roles.weight"].item() == 2.0 * (number + 1)
        assert found[AVERAGE]["roles.weight"].item() == average
        assert found[AVERAGE].keys() == {"roles.weight"}  # not of a critic of its own


def test_an_exception_in_a_validation_leaves_the_trained_weights() -> None:
    module, average = Counter(), WeightAverage(0.75)
    for number in (4.0, 8.0):
        nn.init.constant_(module.counted, number)
        average.update(module)
    nothing: Any = SimpleNamespace()
    average.on_validation_epoch_start(nothing, module)
    assert module.counted.item() == 5.0  # 0.75 * 4 + 0.25 * 8
    average.on_exception(nothing, module, KeyboardInterrupt())
    assert module.counted.item() == 8.0
    average.on_exception(nothing, module, KeyboardInterrupt())
    assert module.counted.item() == 8.0
