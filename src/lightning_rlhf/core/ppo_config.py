"""Validated configuration of stage=ppo. The values live in conf/stages/ppo.yaml."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core import config, validation

GROUPED = ("rloo", "grpo", "dr_grpo", "gdpo")
"""Estimators that compare the responses to one prompt."""
UNSHAPED: dict[str, object] = {"kl_in": "loss", "missing_eos": "none", "length_penalty": 0}
UNSHAPED |= {"score_normalization": "none", "score_clip": None, "whiten_rewards": False}
UNSHAPED |= {"overlong_after": None}
"""Keys with which the return of a response is made of the components of its reward alone."""

MissingEOS = Literal["none", "subtract", "replace"]
Reduction = Literal["token_mean", "sequence_mean", "constant"]
CriticKind = Literal["head", "adapter", "model"]
PolicyLossName = Annotated[
    str, validation.name_or_path("ppo", "gspo", "gspo_token", "cispo", "sapo", kind="function")
]
"""Name of a loss of the policy, or path of a function that returns one."""
KLEstimator = Annotated[
    str,
    validation.name_or_path(
        "k1", "k2", "k3", "k3+", "k3_weighted", "abs", "mse", "full", kind="function"
    ),
]
"""Name of an estimator of the KL, or path of a function that returns one."""
Advantage = Annotated[
    str,
    validation.name_or_path(
        *("gae", *GROUPED, "reinforce++", "reinforce", "remax"), kind="function"
    ),
]
"""Name of an estimator of advantages, or path of a function that returns them."""
AboveOne = Annotated[float, Field(gt=1)]
RatioBounds = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1)]],
    Field(strict=False),
    validation.described("[LOW, HIGH] with 0 <= LOW <= 1 <= HIGH"),
]


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class PPOStopConfig(config.StopConfig):
    """Rules by which a run of PPO ends before its last iteration."""

    max_kl: validation.PositiveFloat | None
    """Largest kl_divergence, in nats a response, with which the run goes on; None is any."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class PPOConfig(config.StageConfig):
    """Settings of proximal policy optimization. None switches a rule off."""

    step_key: ClassVar[str] = "minibatch_size"

    # sampling
    iterations: validation.PositiveInt
    rollout_batch_size: validation.Count
    samples_per_prompt: validation.Count
    max_response_tokens: validation.PositiveInt
    temperature: validation.Temperature
    stop_strings: validation.Texts
    rollout: config.SamplerName
    generation_batch_size: validation.Count | None
    # shaping of scores into rewards
    score_normalization: Literal["none", "running", "running_scale"]
    score_clip: validation.PositiveFloat | None
    length_penalty: validation.NonNegativeFloat
    missing_eos: MissingEOS
    missing_eos_penalty: validation.NonNegativeFloat
    whiten_rewards: bool
    overlong_after: validation.PositiveInt | None
    overlong_ramp: validation.PositiveInt
    # the penalty for leaving the reference
    kl_estimator: KLEstimator
    kl_in: Literal["reward", "loss"]
    kl_coef: validation.NonNegativeFloat
    kl_control: Literal["fixed", "linear", "adaptive"]
    kl_coef_end: validation.NonNegativeFloat
    kl_target: validation.PositiveFloat
    kl_horizon: validation.PositiveFloat
    # advantages
    advantage: Advantage
    gamma: validation.Fraction
    gae_lambda: validation.Fraction
    gae_lambda_critic: validation.Fraction | None
    gae_lambda_alpha: validation.PositiveFloat | None
    baseline_decay: Annotated[float, Field(ge=0, lt=1)]
    resample_groups: validation.NonNegativeInt
    """Largest number of rounds in which groups all alike are replaced by further prompts'."""
    whiten_advantages: Literal["none", "batch", "minibatch"]
    # the policy's loss
    policy_loss: PolicyLossName
    clip_range: Annotated[float, Field(gt=0, le=1)]
    clip_range_high: validation.PositiveFloat | None
    dual_clip: AboveOne | None
    sapo_tau_pos: validation.PositiveFloat
    sapo_tau_neg: validation.PositiveFloat
    importance_cap: validation.PositiveFloat | None
    """Largest weight of a token's loss, as `importance_factors`; None weighs all tokens by 1."""
    importance_mask: RatioBounds | None
    """Mean ratios of a response between which it counts, likewise; None counts all responses."""
    loss_reduction: Reduction
    ent_coef: validation.NonNegativeFloat
    ent_coef_end: validation.NonNegativeFloat | None
    ptx_coef: validation.NonNegativeFloat
    ptx_batch_size: validation.Count
    # the critic
    critic: CriticKind
    critic_init: Literal["zero", "reward"]
    critic_warmup: validation.NonNegativeInt
    clip_range_vf: validation.PositiveFloat | None
    vf_coef: validation.NonNegativeFloat
    value_lr_factor: validation.PositiveFloat
    # the inner loop
    ppo_epochs: validation.PositiveInt
    minibatch_size: validation.Count
    target_kl: validation.PositiveFloat | None
    max_ratio: AboveOne | None
    # evaluation and warnings
    val_samples_per_prompt: validation.Count
    samples_every: validation.PositiveInt
    kl_warning: validation.PositiveFloat | None
    """Largest kl_divergence, in nats a response, without a warning."""
    stop: Annotated[PPOStopConfig, validation.nested(PPOStopConfig)]

    @property
    def has_critic(self) -> bool:
        """Return whether advantages are computed with a learned critic; those of the user's are
        where vf_coef is above 0."""
        return self.advantage == "gae" or (":" in self.advantage and self.vf_coef > 0)

    @property
    def prompts_per_iteration(self) -> int:
        """Return the number of prompts; each gets samples_per_prompt responses."""
        return self.rollout_batch_size // self.samples_per_prompt

    @property
    def group_size(self) -> int:
        """Return the number of responses to one prompt that the advantage compares, 1 if none."""
        compares = self.advantage in GROUPED or ":" in self.advantage
        return self.samples_per_prompt if compares else 1

    def __post_init__(self) -> None:
        validation.check_divides(self, "samples_per_prompt", "rollout_batch_size")
        validation.check_divides(self, "minibatch_size", "rollout_batch_size")
        validation.check_divides(self, "microbatch_size", "minibatch_size")
        is_adaptive, fifth = self.kl_control == "adaptive", 0.2 * self.rollout_batch_size
        without = f"since advantage={self.advantage} has no critic"
        for holds, key, allowed in (
            (self.finetune == "lora" or self.rollout != "vllm", "rollout",
             "native, hf where ppo.finetune=full: servers are sent adapters, not whole weights"),
            *((getattr(self, key) is None or self.rollout not in ("native", "hf"), key,
               f"null where ppo.rollout={self.rollout}, which samples with the weights of the "
               "training") for key in ("importance_cap", "importance_mask")),
            (self.advantage not in GROUPED or self.samples_per_prompt > 1, "samples_per_prompt",
             f"at least 2, which advantage={self.advantage} compares"),
            (self.advantage != "remax" or self.rollout in ("native", "hf"), "rollout",
             "native, hf where ppo.advantage=remax, which also samples greedily"),
            *((self.advantage != "gdpo" or getattr(self, key) == plain, key,
               f"{'null' if plain is None else str(plain).lower()} where ppo.advantage=gdpo, which "
               "reads the components of the reward alone")
              for key, plain in UNSHAPED.items()),
            (self.resample_groups == 0 or self.advantage in GROUPED, "resample_groups",
             f"0 where ppo.advantage={self.advantage}, which compares no groups"),
            (self.kl_in == "reward" or self.kl_estimator != "k1", "kl_estimator",
             "k2, k3, k3+, k3_weighted, abs, mse, full where ppo.kl_in=loss: the gradient of k1 is "
             "0 on average, so it would hold nothing back"),
            (not is_adaptive or self.kl_coef > 0, "kl_coef",
             "a number > 0 to start from where ppo.kl_control=adaptive"),
            (not is_adaptive or self.kl_horizon > fifth, "kl_horizon",
             f"> {fifth:g}, a fifth of ppo.rollout_batch_size: one batch must not turn kl_coef "
             "negative"),
            (self.dual_clip is None or self.policy_loss not in ("cispo", "sapo"), "dual_clip",
             f"null where ppo.policy_loss={self.policy_loss}, which has no clipped surrogate"),
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
            validation.rule(holds, key, getattr(self, key), allowed)
