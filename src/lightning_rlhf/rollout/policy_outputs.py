"""Predictions of the policy, of which PPO's loss is made."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.ppo_terms import PolicyOutputs
from lightning_rlhf.core.types import Experience
from lightning_rlhf.models.roles import REFERENCE, Roles
from lightning_rlhf.rollout.score import response_hidden, response_kl, response_logprobs


def policy_outputs(
    roles: Roles, hidden: Float[Tensor, "N d"], micro_batch: Experience, config: PPOConfig
) -> PolicyOutputs:
    """Return the predictions of the active role for a micro-batch, with a gradient.

    hidden: hidden states of the role, as `response_hidden` returns them.
    """
    vocabulary_kl = None
    logprobs, entropy = response_logprobs(
        roles, hidden, micro_batch, config.temperature, learn_entropy=config.ent_coef > 0
    )
    if config.kl_in == "loss" and config.kl_estimator == "full":
        with torch.no_grad(), roles.use_role(REFERENCE):
            ref_hidden = response_hidden(roles, micro_batch)
        vocabulary_kl = response_kl(roles, hidden, ref_hidden, config.temperature)
    return PolicyOutputs(logprobs=logprobs, entropy=entropy, vocabulary_kl=vocabulary_kl)
