"""Valid arguments of each stage's configuration, to change one at a time."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.core.config import PPOConfig, RMConfig, SFTConfig
from lightning_rlhf.core.validation import build

STAGE: dict[str, Any] = {
    "lr": 1e-3,
    "adam_beta2": 0.99,
    "adam_eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "max_nonfinite": 5,
    "lr_schedule": "constant",
    "warmup_fraction": 0.0,
    "microbatch_size": 2,
    "val_every": 10,
    "checkpoint_every": 10,
    "checkpoint_minutes": None,
    "checkpoints_kept": 2,
    "final": "last",
    "ema_decay": None,
    "best": {"metric": None, "mode": None},
    "stop": {"patience": None, "metric": None, "mode": None, "min_gain": 0.0},
}
SFT = STAGE | {"finetune": "lora", "epochs": 1.0, "batch_size": 4}
RM = SFT | {
    "heads": 1,
    "margin_coef": 0.0,
    "label_smoothing": 0.0,
    "center_coef": 0.01,
    "calibration_samples": 8,
    "temperature": 1.0,
}
PPO = STAGE | {
    "iterations": 10,
    "rollout_batch_size": 8,
    "samples_per_prompt": 1,
    "max_response_tokens": 6,
    "temperature": 1.0,
    "stop_strings": (),
    "rollout": "native",
    "generation_batch_size": None,
    "score_normalization": "none",
    "score_clip": None,
    "length_penalty": 0.0,
    "missing_eos": "none",
    "missing_eos_penalty": 1.0,
    "whiten_rewards": False,
    "kl_estimator": "k1",
    "kl_in": "reward",
    "kl_coef": 0.1,
    "kl_control": "fixed",
    "kl_coef_end": 0.0,
    "kl_target": 6.0,
    "kl_horizon": 10_000.0,
    "advantage": "gae",
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "whiten_advantages": "batch",
    "clip_range": 0.2,
    "clip_range_high": None,
    "dual_clip": None,
    "loss_reduction": "token_mean",
    "ent_coef": 0.0,
    "ptx_coef": 0.0,
    "ptx_batch_size": 4,
    "critic": "head",
    "critic_init": "zero",
    "critic_warmup": 0,
    "clip_range_vf": None,
    "vf_coef": 0.1,
    "value_lr_factor": 10.0,
    "ppo_epochs": 2,
    "minibatch_size": 4,
    "target_kl": None,
    "max_ratio": None,
    "val_samples_per_prompt": 1,
    "samples_every": 10,
    "kl_warning": None,
    "stop": STAGE["stop"] | {"max_kl": None},
}
STAGES: dict[str, tuple[type, dict[str, Any]]] = {
    "sft": (SFTConfig, SFT),
    "rm": (RMConfig, RM),
    "ppo": (PPOConfig, PPO),
}


def ppo_config(**changes: Any) -> PPOConfig:
    return build(PPOConfig, PPO | changes, "ppo")
