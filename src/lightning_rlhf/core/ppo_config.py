"""The frozen configuration of PPO: types and bounds. Values and sources: conf/stages/ppo.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_rlhf.core.config import (
    StageConfig,
    require,
    require_count,
    require_divides,
    require_flag,
    require_number,
    require_one_of,
)

RolloutKind = Literal["native", "hf"]
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


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StageConfig):
    """Proximal policy optimization from a reward source. None switches a rule off."""

    # sampling
    iterations: int
    rollout_batch_size: int
    samples_per_prompt: int
    max_response_tokens: int
    temperature: float
    stop_strings: tuple[str, ...]
    rollout: RolloutKind
    # from a score to rewards
    score_normalization: ScoreNormalization
    score_clip: float | None
    length_penalty: float
    missing_eos: MissingEOS
    missing_eos_penalty: float
    whiten_rewards: bool
    # the leash
    kl_estimator: KLEstimator
    kl_in: KLPlace
    kl_coef: float
    kl_control: KLControl
    kl_coef_end: float
    kl_target: float
    kl_horizon: float
    # advantages
    advantage: Advantage
    gamma: float
    gae_lambda: float
    whiten_advantages: Whitening
    # the policy's loss
    clip_range: float
    clip_range_high: float | None
    dual_clip: float | None
    loss_reduction: Reduction
    ent_coef: float
    # the critic
    critic: CriticKind
    critic_init: CriticInit
    critic_warmup: int
    clip_range_vf: float | None
    vf_coef: float
    value_lr_factor: float
    # the inner loop
    ppo_epochs: int
    minibatch_size: int
    target_kl: float | None
    max_ratio: float | None
    # what is looked at
    val_samples_per_prompt: int
    samples_every: int
    kl_warning: float | None
    """Nats a response of kl_divergence above which a run warns."""

    @property
    def has_critic(self) -> bool:
        """Whether advantages are measured against a value that is learned."""
        return self.advantage == "gae"

    @property
    def prompts_per_iteration(self) -> int:
        """Each is answered samples_per_prompt times."""
        return self.rollout_batch_size // self.samples_per_prompt

    def __post_init__(self) -> None:
        self.check("ppo")
        for key in ("iterations", "ppo_epochs", "max_response_tokens", "samples_every"):
            require_number(f"ppo.{key}", getattr(self, key), at_least=1, whole=True)
        for key in (
            "rollout_batch_size",
            "samples_per_prompt",
            "minibatch_size",
            "val_samples_per_prompt",
        ):
            require_count(f"ppo.{key}", getattr(self, key))
        require_number("ppo.critic_warmup", self.critic_warmup, at_least=0, whole=True)
        for key in ("temperature", "kl_target", "kl_horizon", "value_lr_factor"):
            require_number(f"ppo.{key}", getattr(self, key), above=0)
        for key in ("kl_coef", "kl_coef_end", "vf_coef", "ent_coef", "length_penalty",
                    "missing_eos_penalty"):  # fmt: skip
            require_number(f"ppo.{key}", getattr(self, key), at_least=0)
        for key in ("gamma", "gae_lambda"):
            require_number(f"ppo.{key}", getattr(self, key), at_least=0, at_most=1)
        for key in ("score_clip", "clip_range_high", "clip_range_vf", "target_kl", "kl_warning"):
            if getattr(self, key) is not None:
                require_number(f"ppo.{key}", getattr(self, key), above=0)
        for key in ("dual_clip", "max_ratio"):
            if getattr(self, key) is not None:
                require_number(f"ppo.{key}", getattr(self, key), above=1)
        require_number("ppo.clip_range", self.clip_range, above=0, below=1)
        require_flag("ppo.whiten_rewards", self.whiten_rewards)
        for key, choices in (
            ("rollout", RolloutKind),
            ("score_normalization", ScoreNormalization),
            ("missing_eos", MissingEOS),
            ("kl_estimator", KLEstimator),
            ("kl_in", KLPlace),
            ("kl_control", KLControl),
            ("advantage", Advantage),
            ("whiten_advantages", Whitening),
            ("loss_reduction", Reduction),
            ("critic", CriticKind),
            ("critic_init", CriticInit),
        ):
            require_one_of(f"ppo.{key}", getattr(self, key), get_args(choices))
        texts = self.stop_strings
        require(isinstance(texts, tuple), "ppo.stop_strings", texts, "texts")
        for text in texts:
            require(isinstance(text, str) and text != "", "ppo.stop_strings", text, "texts")
        self._check_sizes()
        self._check_combinations()

    def _check_sizes(self) -> None:
        for small, large in (
            ("samples_per_prompt", "rollout_batch_size"),
            ("minibatch_size", "rollout_batch_size"),
            ("microbatch_size", "minibatch_size"),
        ):
            require_divides(f"ppo.{small}", getattr(self, small), f"ppo.{large}",
                            getattr(self, large))  # fmt: skip

    def _check_combinations(self) -> None:
        if self.advantage in GROUPED:
            require(self.samples_per_prompt > 1, "ppo.samples_per_prompt", self.samples_per_prompt,
                    f"at least 2, which advantage={self.advantage} compares")  # fmt: skip
        if self.kl_in == "loss":
            require(self.kl_estimator != "k1", "ppo.kl_estimator", self.kl_estimator,
                    "k2, k3, abs, mse, full where ppo.kl_in=loss: the gradient of k1 is 0 on "
                    "average, so it would hold nothing back")  # fmt: skip
        if self.kl_control == "adaptive":
            require(self.kl_coef > 0, "ppo.kl_coef", self.kl_coef,
                    "a number > 0 to start from where ppo.kl_control=adaptive")  # fmt: skip
            fifth = 0.2 * self.rollout_batch_size
            require(self.kl_horizon > fifth, "ppo.kl_horizon", self.kl_horizon,
                    f"> {fifth:g}, a fifth of ppo.rollout_batch_size: one batch must not turn "
                    "kl_coef negative")  # fmt: skip
        require(self.critic_warmup < self.iterations, "ppo.critic_warmup", self.critic_warmup,
                f"< ppo.iterations, {self.iterations}, or the policy never learns")  # fmt: skip
        if self.critic_warmup > 0:
            require(self.vf_coef > 0, "ppo.vf_coef", self.vf_coef,
                    "a number > 0 where ppo.critic_warmup lets the critic learn first")  # fmt: skip
        if not self.has_critic:
            for key, allowed in (("critic_warmup", 0), ("critic", "head"), ("critic_init", "zero")):
                found = getattr(self, key)
                require(found == allowed, f"ppo.{key}", found,
                        f"{allowed}, since advantage={self.advantage} has no critic")  # fmt: skip
        if self.critic_init == "reward":
            require(self.critic != "head", "ppo.critic", self.critic,
                    "adapter, model where ppo.critic_init=reward: a head on the policy's trunk "
                    "cannot read what the reward model's head was trained on")  # fmt: skip
