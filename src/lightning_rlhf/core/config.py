"""Validated configurations of the stages. The values live in conf/stages/*.yaml."""

import dataclasses
import math
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core.validation import (
    MOST,
    STRICT,
    Count,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_divides,
)

Schedule = Literal["constant", "linear", "cosine"]
Finetune = Literal["lora", "full"]
Stage = str
"""Name of a stage."""
DType = Literal["float32", "bfloat16"]
Quantization = Literal["none", "int8", "nf4"]
KernelChoice = Literal["auto", "fast", "plain"]
Normalization = Literal["none", "stored", "running"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StageConfig:
    """AdamW, its schedule, and the rhythm of validations and checkpoints of every stage."""

    lr: PositiveFloat
    adam_beta2: Annotated[float, Field(gt=0, lt=1)]
    adam_eps: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat
    lr_schedule: Schedule
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)]
    microbatch_size: Count
    val_every: PositiveInt
    checkpoint_every: PositiveInt
    checkpoint_minutes: PositiveFloat | None
    """Minutes after which a checkpoint is also written, however few the steps; None is never."""
    checkpoints_kept: PositiveInt
    """Number of the latest checkpoints that are kept, beside the best one."""
    max_nonfinite: PositiveInt

    def validation_interval(self, steps: int) -> int:
        """Return the steps between validations of a run of `steps`.

        val_every, or a tenth of a run that is shorter, rounded up.
        """
        return self.val_every if self.val_every <= steps else math.ceil(steps / 10)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedConfig(StageConfig):
    """Keys that supervised fine-tuning and reward modelling have in common."""

    finetune: Finetune
    epochs: Annotated[float, Field(gt=0, le=MOST)]
    batch_size: Count

    def __post_init__(self) -> None:
        check_divides("microbatch_size", self.microbatch_size, "batch_size", self.batch_size)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig:
    """Evaluation of a reward."""

    samples: Count
    """Number of responses of the SFT model that are scored."""
    temperature: PositiveFloat
    """Sampling temperature of those responses."""
    batch_size: Count
    """Number of responses that are sampled, or read by a head on the policy's base, at once."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RMConfig(SupervisedConfig):
    """Reward modelling."""

    heads: Count
    """Number of heads of the ensemble, whose spread says how sure the reward model is."""
    margin_coef: NonNegativeFloat
    """Price of the margin that the data give, in units of reward."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    """Share of the labels that are believed to be wrong."""
    center_coef: NonNegativeFloat
    """Weight of the pull of each pair's rewards towards 0."""
    calibration_samples: Annotated[int, Field(ge=2, le=MOST)]
    """Number of SFT samples on which the reward's mean and standard deviation are measured."""
    temperature: PositiveFloat
    """Sampling temperature of those samples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """Weight, normalization and clip with which one component of a reward enters the score."""

    name: str
    weight: float
    """Factor of the component; below 0 for a penalty."""
    normalization: Normalization
    """none | stored: the source standardises its own number | running: by all numbers so far."""
    clip: float | None
    """Bound of the normalised component's absolute value; None = no clip."""

    @property
    def is_paid_as_reported(self) -> bool:
        """Return whether `paid_sum` takes the very number that `weighted_sum` takes."""
        return self.normalization != "running" and self.clip is None
