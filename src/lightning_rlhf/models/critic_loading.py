"""The critic: a value head on the policy's trunk, on an adapter, or on a model of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import CriticKind
from lightning_rlhf.models.adapter import check_for_model
from lightning_rlhf.models.checkpoint import Final, load_head
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.loading import load_causal_lm, naming
from lightning_rlhf.models.roles import CRITIC, POLICY, REWARD, VALUE, Roles
from lightning_rlhf.models.weights import check_weights


def add_critic(
    roles: Roles,
    config: ModelConfig,
    kind: CriticKind,
    *,
    sft: Final | None,
    reward: Final | None,
    scale: tuple[float, float],
    seed: int,
) -> tuple[Roles, str]:
    """Add a value head on the policy's trunk, on an adapter of its own, or on a model of its own.

    reward: the reward model that the critic is initialised from; None starts every value at 0.
    scale: mean and standard deviation by which the reward model's output is standardised.

    Returns: the roles, and the name of the role in them, whose hidden states the head reads.

    Raises ConfigError where the critic is an adapter and the reward model is a whole model, or
    where the critic is a model and the weights are quantised.
    """
    match kind:
        case "head":
            owner, role = roles, POLICY
        case "adapter":
            owner, role = roles, CRITIC
            if reward is None:
                roles.add_adapter(CRITIC, config.lora, seed)
            elif reward.is_adapter:
                roles.load_adapter(CRITIC, reward.adapter, trainable=True)
            else:
                raise ConfigError(
                    f"ppo.critic is 'adapter' and starts from {reward.path}, which is a whole "
                    "model; allowed: ppo.critic=model, or ppo.critic_init=zero"
                )
        case "model":
            if config.quantization != "none":
                raise ConfigError(
                    "ppo.critic is 'model', whose weights are trained, but model.quantization is "
                    f"'{config.quantization}'; allowed: ppo.critic=head or adapter"
                )
            owner, role = Roles(whole_weights(config, sft, reward, seed), config.kernels), CRITIC
            owner.assign(CRITIC)
    owner.heads[VALUE] = ScalarHead.zeros(owner.hidden_size)
    if reward is not None:
        owner.heads[VALUE] = standardised_head(reward, owner.hidden_size, *scale)
    return owner, role


def whole_weights(
    config: ModelConfig, sft: Final | None, reward: Final | None, seed: int
) -> PreTrainedModel:
    """Return the reward model, or without one the SFT model, as trainable fp32 weights.

    An adapter is merged into the model that it was trained on: quantised weights are rounded, and
    their rounded values merged.
    """
    weights, adapters = None, []
    for final in (sft, reward):
        if final is not None and final.is_adapter:
            adapters.append(str(final.adapter))
        elif final is not None:
            weights, adapters = str(final.path), []
    if weights is None and sft is not None:  # an adapter on the base that it was trained on
        weights = sft.base_folder
        seed = sft.manifest.base_seed if sft.manifest else seed
    quantised = config.quantization != "none"
    model = load_causal_lm(config, weights, trainable=not quantised, seed=seed)
    if quantised:
        model = model.dequantize(torch.float32).float()
    for adapter in adapters:
        check_weights(Path(adapter))
        check_for_model(Path(adapter), model)
        with naming(adapter, "ppo.critic"):
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.requires_grad_(True)


def standardised_head(reward: Final, hidden_size: int, mean: float, std: float) -> ScalarHead:
    """Return a value head that computes (reward - mean) / std of the reward model's mean head."""
    heads = load_head(reward, REWARD, hidden_size)
    head = ScalarHead(hidden_size)
    with torch.no_grad():
        head.linear.bias.copy_(heads.linear.bias.mean().sub(mean).div(std))
        head.linear.weight.copy_(heads.linear.weight.mean(dim=0).div(std))
    return head
