"""The headline metrics reach Lightning without a callback of ours, and never twice."""

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_rlhf.callbacks.metrics import PPOMetrics, StepMetrics
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.results import IterationResult

from .conftest import Outputs, fit, prompts
from .experiences import Make
from .test_supervised import STAGES

HEADLINE = ("reward_mean", "kl_divergence", "entropy", "ppo_loss")


class Rows(DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


class Bar(Callback):
    """Keeps what a progress bar would show."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.shown = dict(trainer.progress_bar_metrics)


def train(
    module: L.LightningModule, *callbacks: Callback, batches: Sequence[Any] | None = None
) -> tuple[L.Trainer, Rows]:
    logger, batches = Rows(), batches or [prompts(seed=seed) for seed in range(2)]
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, log_every_n_steps=1,
        callbacks=list(callbacks), enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(list(batches), batch_size=None))
    return trainer, logger


def test_they_are_logged_by_iteration_and_our_callback_logs_the_same_once(make_ppo: Make) -> None:
    bar = Bar()
    trainer, plain = train(make_ppo(), bar)
    assert all(float(trainer.callback_metrics[name]) == pytest.approx(bar.shown[name])
               for name in HEADLINE)  # fmt: skip
    rows = [(step, metrics) for step, metrics in plain.rows if "reward_mean" in metrics]
    assert [step for step, _ in rows] == [1, 2]
    assert all(set(HEADLINE) <= set(metrics) for _, metrics in rows)
    _, logger = train(make_ppo(), PPOMetrics(), bar := Bar())
    assert {*bar.shown} == {*HEADLINE}
    found = Counter((step, name) for step, row in logger.rows for name in row)
    for name in HEADLINE:
        assert [found[step, name] for step in (1, 2)] == [1, 1]
        ours, alone = ([row[name] for _, row in log.rows if name in row] for log in (logger, plain))
        assert ours == pytest.approx(alone, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_supervised_stages_log_theirs(stage: str) -> None:
    """By hand: the loss that the step returns; of scores, mean log(1 + exp(rejected - chosen))."""
    build, batch, _ = STAGES[stage]
    trainer, logger = train(build(), outputs := Outputs(), batches=[batch()] * 2)
    last = outputs.steps[-1]
    if stage == "sft":
        expected = {"update/loss": float(last.loss)}
    else:
        pairs = list(zip(last.scores.chosen.tolist(), last.scores.rejected.tolist(), strict=True))
        loss = sum(math.log1p(math.exp(worse - better)) for better, worse in pairs) / len(pairs)
        right = sum(better > worse for better, worse in pairs) / len(pairs)
        expected = {"update/rm_loss": loss, "update/accuracy": right}
    for name, number in expected.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(number, rel=1e-5)
        assert [step for step, row in logger.rows if name in row] == [1, 2]


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_validation_logs_what_our_callback_does(stage: str) -> None:
    build, batch, _ = STAGES[stage]
    held_out = [batch(), batch().select(slice(0, 2))]  # of unequal size
    both = (fit(build(), [batch()], x, held_out).callback_metrics for x in ([], [StepMetrics()]))
    plain, ours = ({n: float(x) for n, x in one.items() if n[:5] == "eval/"} for one in both)
    assert len(plain) == (1 if stage == "sft" else 2)
    assert plain == pytest.approx({name: ours[name] for name in plain})


@pytest.mark.parametrize(("own", "instead"), [
    (callbacks.StochasticWeightAveraging(1e-3), "WeightAverage"),
    (callbacks.BatchSizeFinder(), "microbatch_size"), (callbacks.LearningRateFinder(), "finetune"),
])  # fmt: skip
def test_callbacks_that_do_not_fit_are_refused(make_ppo: Make, own: Any, instead: str) -> None:
    message = rf"^a callback of the Trainer is a {type(own).__name__}, which .*{instead}"
    with pytest.raises(ConfigError, match=message):
        train(make_ppo(), own)


def test_arguments_of_the_trainer_that_do_not_fit_are_refused(make_ppo: Make) -> None:
    own = {"precision": "bf16-true", "accumulate_grad_batches": 4, "gradient_clip_val": 1.0}
    for key, value in {**own, "overfit_batches": 2}.items():
        with pytest.raises(ConfigError, match=f"^{key} of the Trainer is {value!r}; allowed: "):
            fit(make_ppo(), [prompts()], accelerator="cpu", **{key: value})


def test_updates_that_are_not_finite_are_in_no_mean() -> None:
    experience = SimpleNamespace(
        score=torch.tensor([1.0, 2.0]), kl=torch.tensor([[0.5, 0.25], [0.0, 0.25]])
    )

    def update(number: float, nonfinite: float) -> Any:
        return SimpleNamespace(
            entropy=torch.tensor(number), loss=torch.tensor(-number),
            nonfinite=torch.tensor(nonfinite),
        )  # fmt: skip

    def headline(*updates: Any) -> list[float]:
        result = SimpleNamespace(experience=experience, updates=updates)
        return [float(x) for x in IterationResult.headline.fget(result).values()]

    found = headline(update(1.0, 0.0), update(float("nan"), 1.0), update(3.0, 0.0))
    assert found == [1.5, 0.5, 2.0, -2.0]
    assert headline(update(1.0, 1.0))[2:] == pytest.approx([float("nan")] * 2, nan_ok=True)
