"""The validated configuration of PPO. Values and their sources: conf/stages/ppo.yaml."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core.config import StageConfig, StopConfig
from lightning_rlhf.core.validation import (
    STRICT,
    Count,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Temperature,
    Texts,
    check_divides,
    described,
    rule,
    section,
)

ScoreNormalization = Literal["none", "running", "running_scale"]
MissingEOS = Literal["none", "subtract", "replace"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "mse", "full"]
KLPlace = Literal["reward", "loss"]
KLControl = Literal["fixed", "linear", "adaptive"]
Advantage = Literal["gae", "rloo", "grpo", "dr_grpo", "reinforce++"]
Whitening = Literal["none", "batch", "minibatch"]
Reduction = Literal["token_mean", "sequence_mean", "constant"]
CriticKind = Literal["head", "adapter", "model"]
CriticInit = Literal["zero", "reward"]

GROUPED = ("rloo", "grpo", "dr_grpo")
"""Estimators that compare the responses to one prompt."""

SamplerName = Annotated[
    str,
    Field(pattern=r"^(native|hf)$|:"),
    described("native, hf, 'path/to/file.py:Class' or 'package.module:Class'"),
]
"""Name of a sampler, or path of a class that implements one."""
AboveOne = Annotated[float, Field(gt=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPOStopConfig(StopConfig):
    """Rules by which a run of PPO ends before its last iteration."""

    max_kl: PositiveFloat | None
    """Largest kl_divergence, in nats a response, with which the run goes on; None is any."""

    @property
    def is_on(self) -> bool:
        return super().is_on or self.max_kl is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPOConfig(StageConfig):
    """Settings of proximal policy optimization. None switches a rule off."""

    # sampling
    iterations: PositiveInt
    rollout_batch_size: Count
    samples_per_prompt: Count
    max_response_tokens: PositiveInt
    temperature: Temperature
    stop_strings: Texts
    rollout: SamplerName
    generation_batch_size: Count | None
    # shaping of scores into rewards
    score_normalization: ScoreNormalization
    score_clip: PositiveFloat | None
    length_penalty: NonNegativeFloat
    missing_eos: MissingEOS
    missing_eos_penalty: NonNegativeFloat
    whiten_rewards: bool
    # the penalty for leaving the reference
    kl_estimator: KLEstimator
    kl_in: KLPlace
    kl_coef: NonNegativeFloat
    kl_control: KLControl
    kl_coef_end: NonNegativeFloat
    kl_target: PositiveFloat
    kl_horizon: PositiveFloat
    # advantages
    advantage: Advantage
    gamma: Fraction
    gae_lambda: Fraction
    whiten_advantages: Whitening
    # the policy's loss
    clip_range: Annotated[float, Field(gt=0, lt=1)]
    clip_range_high: PositiveFloat | None
    dual_clip: AboveOne | None
    loss_reduction: Reduction
    ent_coef: NonNegativeFloat
    ptx_coef: NonNegativeFloat
    ptx_batch_size: Count
    # the critic
    critic: CriticKind
    critic_init: CriticInit
    critic_warmup: NonNegativeInt
    clip_range_vf: PositiveFloat | None
    vf_coef: NonNegativeFloat
    value_lr_factor: PositiveFloat
    # the inner loop
    ppo_epochs: PositiveInt
    minibatch_size: Count
    target_kl: PositiveFloat | None
    max_ratio: AboveOne | None
    # evaluation and warnings
    val_samples_per_prompt: Count
    samples_every: PositiveInt
    kl_warning: PositiveFloat | None
    """Largest kl_divergence, in nats a response, without a warning."""
    stop: Annotated[PPOStopConfig, section(PPOStopConfig)]

    @property
    def has_critic(self) -> bool:
        """Return whether advantages are computed with a learned critic."""
        return self.advantage == "gae"

    @property
    def prompts_per_iteration(self) -> int:
        """Return the number of prompts; each gets samples_per_prompt responses."""
        return self.rollout_batch_size // self.samples_per_prompt

    @property
    def updates_per_iteration(self) -> int:
        """Return the number of updates of an iteration that ppo.target_kl does not end."""
        return self.ppo_epochs * (self.rollout_batch_size // self.minibatch_size)

    @property
    def group_size(self) -> int:
        """Return the number of responses to one prompt that the advantage compares, 1 if none."""
        return self.samples_per_prompt if self.advantage in GROUPED else 1

    def __post_init__(self) -> None:
        for small, large in (
            ("samples_per_prompt", "rollout_batch_size"),
            ("minibatch_size", "rollout_batch_size"),
            ("microbatch_size", "minibatch_size"),
        ):
            check_divides(small, getattr(self, small), large, getattr(self, large))
        is_adaptive, fifth = self.kl_control == "adaptive", 0.2 * self.rollout_batch_size
        without = f"since advantage={self.advantage} has no critic"
        for holds, key, allowed in (
            (self.advantage not in GROUPED or self.samples_per_prompt > 1, "samples_per_prompt",
             f"at least 2, which advantage={self.advantage} compares"),
            (self.kl_in == "reward" or self.kl_estimator != "k1", "kl_estimator",
             "k2, k3, abs, mse, full where ppo.kl_in=loss: the gradient of k1 is 0 on average, so "
             "it would hold nothing back"),
            (not is_adaptive or self.kl_coef > 0, "kl_coef",
             "a number > 0 to start from where ppo.kl_control=adaptive"),
            (not is_adaptive or self.kl_horizon > fifth, "kl_horizon",
             f"> {fifth:g}, a fifth of ppo.rollout_batch_size: one batch must not turn kl_coef "
             "negative"),
            (self.critic_warmup < self.iterations, "critic_warmup",
             f"< ppo.iterations, {self.iterations}, or the policy never learns"),
            (self.critic_warmup == 0 or self.vf_coef > 0, "vf_coef",
             "a number > 0 where ppo.critic_warmup lets the critic learn first"),
            (self.has_critic or self.critic_warmup == 0, "critic_warmup", f"0, {without}"),
            (self.has_critic or self.critic == "head", "critic", f"head, {without}"),
            (self.has_critic or self.critic_init == "zero", "critic_init", f"zero, {without}"),
            (self.critic_init == "zero" or self.critic != "head", "critic",
             "adapter, model where ppo.critic_init=reward: a head on the policy's trunk cannot "
             "read what the reward model's head was trained on"),
        ):  # fmt: skip
            rule(holds, key, getattr(self, key), allowed)
