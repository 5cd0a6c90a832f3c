"""Small configurations of the stages, to change one value at a time."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.core.config import DPOConfig, RMConfig, SFTConfig
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.validation import build

from ..composing import section_of

SMALL: dict[str, Any] = {"microbatch_size": 2, "checkpoint_minutes": None}
SUPERVISED = SMALL | {"batch_size": 4}
PPO = section_of("ppo") | SMALL | {
    "iterations": 10, "rollout_batch_size": 8, "minibatch_size": 4, "max_response_tokens": 6,
    "missing_eos": "none", "kl_coef": 0.1, "clip_range_vf": None, "kl_warning": None,
}  # fmt: skip
STAGES: dict[str, tuple[type, dict[str, Any]]] = {
    "sft": (SFTConfig, section_of("sft") | SUPERVISED),
    "rm": (RMConfig, section_of("rm") | SUPERVISED),
    "dpo": (DPOConfig, section_of("dpo") | SUPERVISED),
    "ppo": (PPOConfig, PPO),
}


def dpo_config(**changes: Any) -> DPOConfig:
    return build(DPOConfig, STAGES["dpo"][1] | changes, "dpo")


def ppo_config(**changes: Any) -> PPOConfig:
    return build(PPOConfig, PPO | changes, "ppo")
