"""Every bound of every stage's configuration, and what its error says."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.core.validation import build as from_section

from .configs import STAGES

STAGE_BOUNDS: list[tuple[str, Any, str]] = [
    ("lr", 0, "a number and > 0"),
    ("lr", -1e-5, "a number and > 0"),
    ("adam_beta2", 0, "a number and > 0 and < 1"),
    ("adam_beta2", 1.0, "a number and > 0 and < 1"),
    ("adam_eps", 0.0, "a number and > 0"),
    ("weight_decay", -0.1, "a number and >= 0"),
    ("max_grad_norm", 0, "a number and > 0"),
    ("lr_schedule", "sawtooth", "constant, linear, cosine"),
    ("warmup_fraction", -0.1, "a number and >= 0 and < 1"),
    ("warmup_fraction", 1, "a number and >= 0 and < 1"),
    ("microbatch_size", 0, "a whole number and >= 1"),
    ("microbatch_size", 2.0, "a whole number and >= 1"),
    ("val_every", 0, "a whole number and >= 1"),
    ("val_every", 1.5, "a whole number and >= 1"),
    ("checkpoint_every", -3, "a whole number and >= 1"),
    ("checkpoint_minutes", 0, "a number and > 0, or null"),
    ("checkpoints_kept", 0, "a whole number and >= 1"),
    ("ema_decay", 0, "a number and > 0 and < 1, or null"),
    ("ema_decay", 1, "a number and > 0 and < 1, or null"),
]
SUPERVISED_BOUNDS: list[tuple[str, Any, str]] = [
    ("finetune", "half", "lora, full"),
    ("epochs", 0, "a number and > 0 and <= 1000000"),
    ("batch_size", 0, "a whole number and >= 1"),
    ("batch_size", 4.0, "a whole number and >= 1"),
]
BOUNDS: dict[str, list[tuple[str, Any, str]]] = {
    "sft": STAGE_BOUNDS + SUPERVISED_BOUNDS,
    "rm": [
        *STAGE_BOUNDS,
        *SUPERVISED_BOUNDS,
        ("heads", 0, "a whole number and >= 1"),
        ("heads", 2.0, "a whole number and >= 1"),
        ("margin_coef", -0.1, "a number and >= 0"),
        ("label_smoothing", -0.1, "a number and >= 0 and < 0.5"),
        ("label_smoothing", 0.5, "a number and >= 0 and < 0.5"),
        ("center_coef", -0.1, "a number and >= 0"),
        ("calibration_samples", 1, "a whole number and >= 2"),
        ("calibration_samples", 8.5, "a whole number and >= 2"),
        ("temperature", 0, "a number and >= 1e-06"),
        ("temperature", 1e-300, "a number and >= 1e-06"),
    ],
    "ppo": STAGE_BOUNDS,
}
ROWS = [(stage, *row) for stage, rows in BOUNDS.items() for row in rows]
NUMBERS = [
    (stage, key)
    for stage, (_, valid) in STAGES.items()
    for key, value in valid.items()
    if isinstance(value, int | float) and not isinstance(value, bool)
]
FIELDS = [(stage, f.name) for stage, (config, _) in STAGES.items() for f in fields(config)]


def build(stage: str, **changes: Any) -> Any:
    config, valid = STAGES[stage]
    return from_section(config, valid | changes, stage)


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, 1), (9, 1), (25, 3), (30, 3), (99, 10), (100, 100), (2000, 100)]
)
def test_a_run_shorter_than_val_every_validates_at_each_tenth(steps: int, expected: int) -> None:
    assert build("sft", val_every=100).validation_interval(steps) == expected


@pytest.mark.parametrize(("stage", "key", "found", "allowed"), ROWS)
def test_out_of_bounds(stage: str, key: str, found: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(stage, **{key: found})
    assert str(error.value) == f"{stage}.{key} is {found!r}; allowed: {allowed}"


@pytest.mark.parametrize(("stage", "key"), NUMBERS)
@pytest.mark.parametrize("found", [math.nan, math.inf, -math.inf, "1e-5", None, True])
def test_what_is_no_finite_number_is_refused(stage: str, key: str, found: Any) -> None:
    # "1e-5" is what YAML makes of 1e-5 written without a point.
    with pytest.raises(ConfigError) as error:
        build(stage, **{key: found})
    assert str(error.value).startswith(f"{stage}.{key} is {found!r}; allowed: a ")


@pytest.mark.parametrize(("stage", "key"), FIELDS)
def test_no_field_goes_unchecked(stage: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{stage}\.{key} is "):
        build(stage, **{key: object()})


@pytest.mark.parametrize(("stage", "key"), FIELDS)
def test_no_field_has_a_default(stage: str, key: str) -> None:
    config, valid = STAGES[stage]
    with pytest.raises(ConfigError) as error:
        from_section(config, {k: v for k, v in valid.items() if k != key}, stage)
    assert str(error.value) == f"{stage}.{key} is missing from the configuration"


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        *[(stage, {}) for stage in STAGES],
        *[(stage, {"warmup_fraction": 0, "weight_decay": 0, "lr": 1}) for stage in STAGES],
        *[("sft", {"lr_schedule": name}) for name in ("constant", "linear", "cosine")],
        *[("sft", {"finetune": name}) for name in ("lora", "full")],
        ("sft", {"epochs": 0.25}),
        ("rm", {"calibration_samples": 2}),
    ],
)
def test_the_ends_that_are_allowed(stage: str, changes: dict[str, Any]) -> None:
    config = build(stage, **changes)
    for key, value in changes.items():
        assert getattr(config, key) == value


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (
            "sft",
            {"batch_size": 10, "microbatch_size": 4},
            "sft.batch_size is 10, which sft.microbatch_size = 4 does not divide; "
            "allowed for sft.microbatch_size: 1, 2, 5, 10",
        ),
        (
            "rm",
            {"batch_size": 2, "microbatch_size": 4},
            "rm.batch_size is 2, which rm.microbatch_size = 4 does not divide; allowed "
            "for rm.microbatch_size: 1, 2",
        ),
    ],
)
def test_sizes_that_do_not_divide(stage: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(stage, **changes)
    assert str(error.value) == message


@pytest.mark.parametrize("stage", STAGES)
def test_a_configuration_is_frozen_and_named_only(stage: str) -> None:
    with pytest.raises(FrozenInstanceError):
        build(stage).lr = 1.0
    with pytest.raises(ValidationError):
        STAGES[stage][0](*STAGES[stage][1].values())


def test_a_configuration_error_is_one_that_users_can_cause() -> None:
    assert issubclass(ConfigError, RLHFError)
