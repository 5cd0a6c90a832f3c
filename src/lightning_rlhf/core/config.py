"""Frozen configurations of the stages: types and bounds. The values live in conf/stage/*.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_rlhf.core.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]
Finetune = Literal["lora", "full"]
Stage = Literal["sft", "rm", "ppo"]
"""That trains something."""
DType = Literal["float32", "bfloat16"]
Quantization = Literal["none", "int8", "nf4"]
KernelChoice = Literal["auto", "fast", "plain"]
Normalization = Literal["none", "stored", "running"]
LARGEST = 2**53
"""Of whole numbers: a float counts no further."""
MOST = 1_000_000
"""Largest number of rows, or of anything else that is held in memory at once."""


def require(holds: bool, key: str, found: Any, allowed: str) -> None:
    """Raise ConfigError naming the key, what was found and what is allowed, unless it holds."""
    if not holds:
        raise ConfigError(f"{key} is {found!r}; allowed: {allowed}")


def require_one_of(key: str, found: Any, allowed: Collection[Any]) -> None:
    """Raise ConfigError unless `found` is one of `allowed`."""
    choices = list(allowed)  # in which an unhashable value can be looked for
    require(
        found in choices, key, found, ", ".join("null" if a is None else str(a) for a in choices)
    )


def require_text(key: str, found: Any, allowed: str) -> None:
    """Raise ConfigError unless `found` is text that can name a file, a folder or a model.

    Not empty, without control characters and halves of surrogate pairs; and no longer than file
    systems allow: 255 bytes between two slashes, 4095 in all.
    """
    fits = (
        isinstance(found, str)
        and found.strip() != ""
        and re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", found) is None
        and len(found.encode()) <= 4095
        and all(len(part.encode()) <= 255 for part in found.split("/"))
    )
    shown = f"{found[:40]}… ({len(found)} characters)" if _is_long(found) else found
    require(fits, key, shown, allowed)


def _is_long(found: Any) -> bool:
    return isinstance(found, str) and len(found) > 200


def require_number(
    key: str,
    found: Any,
    *,
    above: float = float("-inf"),
    at_least: float = float("-inf"),
    below: float = float("inf"),
    at_most: float = float("inf"),
    whole: bool = False,
) -> None:
    """Raise ConfigError unless `found` is a finite number within the bounds."""
    kind = int if whole else (int, float)
    if whole and isinstance(found, int) and found > LARGEST:
        at_most = min(at_most, LARGEST)
    limits = [
        f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"
        for sign, bound in ((">", above), (">=", at_least), ("<", below), ("<=", at_most))
        if abs(bound) != float("inf")
    ]
    allowed = " and ".join(["a whole number" if whole else "a number", *limits])
    is_number = isinstance(found, kind) and not isinstance(found, bool)
    inside = is_number and above < found < below and at_least <= found <= at_most
    require(inside and abs(found) != float("inf"), key, found, allowed)


def require_count(key: str, found: Any, *, at_least: int = 1) -> None:
    """Raise ConfigError unless `found` is a whole number of things that memory can hold at once."""
    is_above = isinstance(found, int) and found > MOST
    at_most = MOST if is_above else float("inf")
    require_number(key, found, at_least=at_least, at_most=at_most, whole=True)


def require_flag(key: str, found: Any) -> None:
    """Raise ConfigError unless `found` is a boolean."""
    require(isinstance(found, bool), key, found, "true, false")


def require_divides(small_key: str, small: int, large_key: str, large: int) -> None:
    """Raise ConfigError unless `small` divides `large`."""
    if large % small:
        divisors = ", ".join(str(n) for n in range(1, large + 1) if large % n == 0)
        raise ConfigError(
            f"{large_key} is {large}, which {small_key} = {small} does not divide; allowed for "
            f"{small_key}: {divisors}"
        )


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """What every stage has under its own key: AdamW, its schedule, and a rhythm."""

    lr: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    lr_schedule: Schedule
    warmup_fraction: float
    microbatch_size: int
    val_every: int
    checkpoint_every: int
    checkpoint_minutes: float | None
    """Also after so many, however few steps that are; None is never."""
    checkpoints_kept: int
    """The latest; the best one is kept besides."""
    max_nonfinite: int

    def validation_interval(self, steps: int) -> int:
        """Return the steps between validations of a run of `steps`.

        val_every, or a tenth of a run that is shorter, rounded up.
        """
        return self.val_every if self.val_every <= steps else math.ceil(steps / 10)

    def check(self, stage: str) -> None:
        """Raise ConfigError naming `stage.key` where a value is out of bounds."""
        require_number(f"{stage}.lr", self.lr, above=0)
        require_number(f"{stage}.adam_beta2", self.adam_beta2, above=0, below=1)
        require_number(f"{stage}.adam_eps", self.adam_eps, above=0)
        require_number(f"{stage}.weight_decay", self.weight_decay, at_least=0)
        require_number(f"{stage}.max_grad_norm", self.max_grad_norm, above=0)
        require_one_of(f"{stage}.lr_schedule", self.lr_schedule, get_args(Schedule))
        require_number(f"{stage}.warmup_fraction", self.warmup_fraction, at_least=0, below=1)
        for key in ("max_nonfinite", "val_every", "checkpoint_every", "checkpoints_kept"):
            require_number(f"{stage}.{key}", getattr(self, key), at_least=1, whole=True)
        require_count(f"{stage}.microbatch_size", self.microbatch_size)
        if self.checkpoint_minutes is not None:
            require_number(f"{stage}.checkpoint_minutes", self.checkpoint_minutes, above=0)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(StageConfig):
    """What SFT and reward modelling have in common."""

    finetune: Finetune
    epochs: float
    batch_size: int

    def check(self, stage: str) -> None:
        """As StageConfig.check."""
        super().check(stage)
        require_one_of(f"{stage}.finetune", self.finetune, get_args(Finetune))
        require_number(f"{stage}.epochs", self.epochs, above=0, at_most=MOST)
        require_count(f"{stage}.batch_size", self.batch_size)
        require_divides(
            f"{stage}.microbatch_size", self.microbatch_size, f"{stage}.batch_size", self.batch_size
        )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    def __post_init__(self) -> None:
        self.check("sft")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of a reward."""

    samples: int
    """Responses of the SFT model that are scored."""
    temperature: float
    """Sampling temperature of those."""
    batch_size: int
    """Responses that are sampled, or read by a head on the policy's base, at once."""

    def __post_init__(self) -> None:
        for key in ("samples", "batch_size"):
            require_count(f"eval.{key}", getattr(self, key))
        require_number("eval.temperature", self.temperature, above=0)


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """Reward modelling."""

    heads: int
    """Of the ensemble; their spread says how sure the reward model is."""
    margin_coef: float
    """Price of the margin that the data give, in units of reward."""
    label_smoothing: float
    """Share of the labels that are believed to be wrong."""
    center_coef: float
    """Weight of the pull of each pair's rewards towards 0."""
    calibration_samples: int
    """SFT samples on which the mean and standard deviation of the reward are measured."""
    temperature: float
    """Sampling temperature of those samples."""

    def __post_init__(self) -> None:
        self.check("rm")
        require_count("rm.heads", self.heads)
        require_number("rm.label_smoothing", self.label_smoothing, at_least=0, below=0.5)
        for key in ("margin_coef", "center_coef"):
            require_number(f"rm.{key}", getattr(self, key), at_least=0)
        require_count("rm.calibration_samples", self.calibration_samples, at_least=2)
        require_number("rm.temperature", self.temperature, above=0)


@dataclass(frozen=True, kw_only=True)
class Term:
    """How one component of a reward enters the score."""

    name: str
    weight: float
    """Below 0 for a penalty."""
    normalization: Normalization
    """none | stored: the source standardises its own number | running: by all numbers so far."""
    clip: float | None
    """The component, normalised, is kept within +- this; None = no clip."""

    @property
    def is_paid_as_reported(self) -> bool:
        """Whether `paid_sum` takes the very number that `weighted_sum` takes."""
        return self.normalization != "running" and self.clip is None
