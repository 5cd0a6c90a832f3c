"""When a run ends by a rule: the evaluations that count as gains, and the bound of the KL."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlhf.callbacks.stopping import EarlyStop
from lightning_rlhf.core.config import Mode, StopConfig
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOStopConfig


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
        rule.on_validation_end(found, None)  # type: ignore[arg-type]
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
    assert resumed.reason == (
        "eval/x has not gained more than 0 since 1.000 at step 1, in 2 evaluations "
        "(sft.stop.patience)"
    )
    again, later = patient(2), trainer(4)
    again.load_state_dict(resumed.state_dict())
    again.on_train_start(later, None)  # type: ignore[arg-type]
    assert later.should_stop


def test_evaluations_outside_of_the_training_do_not_count() -> None:
    rule = patient(1)
    assert ended(rule, [1.0]) is None
    rule.on_validation_end(trainer(1, TrainerFn.VALIDATING, eval__x=0.0), None)  # type: ignore
    checking = trainer(1, eval__x=0.0)
    checking.sanity_checking = True
    rule.on_validation_end(checking, None)  # type: ignore[arg-type]
    assert (rule.without, rule.reason) == (0, None)


def test_a_metric_that_is_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sft.stop.metric is 'eval/x'; allowed: eval/y$"):
        patient(1).on_validation_end(trainer(1, eval__y=1.0, update__y=2.0), None)  # type: ignore
    before = trainer(0, eval__y=1.0)
    before.sanity_checking = True
    with pytest.raises(ConfigError, match=r"sft.stop.metric is 'eval/x'; allowed: eval/y$"):
        patient(1).on_validation_end(before, None)  # type: ignore[arg-type]


def test_the_first_iteration_above_the_bound_of_the_kl_ends_the_run() -> None:
    config = PPOStopConfig(patience=None, metric=None, mode=None, min_gain=0.0, max_kl=2.0)
    rule = EarlyStop("ppo", config, ("eval/x", "max"))
    for kl, stops in ((1.0, False), (2.0, False), (2.5, True)):
        found = trainer(1, kl_divergence=kl)
        rule.on_train_batch_end(found, None, None, None, 0)  # type: ignore[arg-type]
        assert found.should_stop is stops
    assert rule.reason == "kl_divergence is 2.500 nats a response, above ppo.stop.max_kl=2"
