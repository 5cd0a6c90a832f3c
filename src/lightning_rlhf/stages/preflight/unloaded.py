"""The memory plan of a run before anything is trained or downloaded: models without weights.

The models are made on torch's device `meta`, which has shapes and no memory.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from rich import get_console
from torch import nn
from transformers import PreTrainedModel

from lightning_rlhf.core.config import DPOConfig, Quantization, RMConfig, SFTConfig
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens, PromptTokens
from lightning_rlhf.kernels.decoder import family
from lightning_rlhf.models.checkpointing import recompute
from lightning_rlhf.models.config import BASE, ModelConfig
from lightning_rlhf.models.copies import copied_bytes, linear_layers
from lightning_rlhf.models.heads import RewardHeads, ScalarHead
from lightning_rlhf.models.loading import empty_model
from lightning_rlhf.models.roles import CRITIC, POLICY, REWARD, SFT, VALUE, Roles
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.ptx import PTX
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.rewards.config import HeadConfig, RandomConfig
from lightning_rlhf.rewards.config import ModelConfig as RewardModelConfig
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.folders import reward_role
from lightning_rlhf.stages.preflight.memory_plan import MemoryPlan, Planned, plan_memory
from lightning_rlhf.stages.preflight.table import plan_shown
from lightning_rlhf.stages.stage import Settings, reward_key

META = torch.device("meta")
CHAT: Any = SimpleNamespace(end_token_ids=(0,), stop_at=lambda texts: None)
"""The part of a chat format that a sampler reads when it is made."""
BLOCK = 64
"""Number of nf4 weights that share one fp32 scale in bitsandbytes."""


def print_plan(settings: Settings) -> None:
    """Print the memory plan of a run, and what it assumes. Raises an RLHFError as `plan_run`."""
    plan, data, count = plan_run(settings), settings.data, settings.trainer.processes
    get_console().print(plan_shown(plan))
    response = getattr(settings.config, "max_response_tokens", data.max_response_tokens)
    print_line(
        f"for {'one process' if count == 1 else f'each of {count} processes'} on a "
        f"{settings.trainer.accelerator.upper()}, with prompts of {data.max_prompt_tokens} and "
        f"responses of {response} tokens, without what libraries take; no weights were read"
    )
    if starts_from_sft(settings):
        print_line(
            "assumed: models of earlier stages are LoRA adapters on this base (finetune=lora)"
        )
    for name, component in settings.reward.items() if settings.definition.reads_reward else ():
        if isinstance(component, RewardModelConfig):
            print_line(f"not counted: the model of {reward_key(settings, name)}", "yellow")


def plan_run(settings: Settings) -> MemoryPlan:
    """Return the memory plan of a process of a run, of whose model only the configuration is read.

    Rows are as long as `data.max_prompt_tokens` and the limit of responses allow. The SFT model
    and reward models of stage=rm are taken to be LoRA adapters, which is the default; a reward
    model with a base of its own is not counted.

    Raises: ConfigError for a stage without a plan, CheckpointError or HubError where the
        configuration of the model cannot be read.
    """
    with torch.autocast(
        "cpu", dtype=torch.bfloat16, enabled=settings.trainer.precision == "bf16-mixed"
    ):
        module, example = module_of(settings)
        model = module.roles.causal_lm
        quantise(model, settings.model.quantization)
        rows: Any = SimpleNamespace(train=[example], val=[])
        plan = plan_memory(module, rows, META, processes=settings.trainer.processes)
        if isinstance(module, PPOModule) and is_fast(settings, model):
            plan = replace(plan, rollout=replace(plan.rollout, weights=copied_bytes(model)))
        return plan


def is_fast(settings: Settings, model: PreTrainedModel) -> bool:
    """Return whether the run computes with the layers of this package."""
    kernels, accelerator = settings.model.kernels, settings.trainer.accelerator
    is_chosen = kernels == "fast" or (kernels == "auto" and accelerator == "cpu")
    return is_chosen and family(model) is not None


def module_of(settings: Settings) -> tuple[Planned, Any]:
    """Return the module of a stage without weights, and the longest row of its data."""
    config, data = settings.config, settings.data
    prompt, response = [0] * data.max_prompt_tokens, [0] * data.max_response_tokens
    match config:
        case SFTConfig():
            roles = start(settings, is_full=config.finetune == "full")
            own(roles, SFT, settings.model, config.finetune)
            return SFTModule(roles, config), DemonstrationTokens(prompt, response)
        case RMConfig():
            roles = start(settings, is_full=config.finetune == "full")
            own(roles, REWARD, settings.model, config.finetune)
            roles.heads[REWARD] = RewardHeads(roles.hidden_size, config.heads).to(META)
            module = RewardModule(roles, config, seed=settings.seed)
            return module, PreferenceTokens(prompt, response, response, 0.0)
        case DPOConfig():
            roles = start(settings)
            own(roles, POLICY, settings.model)
            return DPOModule(roles, config), PreferenceTokens(prompt, response, response, 0.0)
        case PPOConfig():
            return ppo_module(settings, config), PromptTokens(prompt, 0)
    raise ConfigError(
        f"stage={settings.stage} has no memory plan; allowed: sft, rm, ppo, dpo, or a stage of "
        "your own with one of their configurations"
    )


def ppo_module(settings: Settings, config: PPOConfig) -> PPOModule:
    """Return the module of PPO with policy, reward and critic, without weights."""
    roles, model = start(settings), settings.model
    for name, component in settings.reward.items():
        role = reward_role(settings, name)
        if isinstance(component, HeadConfig):
            own(roles, role, model, is_trained=False)
        if isinstance(component, HeadConfig | RandomConfig):
            head = RewardHeads(roles.hidden_size, 1).to(META)
            roles.heads[role] = head.requires_grad_(False)
    own(roles, POLICY, model)
    critic = None
    if config.has_critic:
        owner, role = roles, POLICY if config.critic == "head" else CRITIC
        if config.critic == "adapter":
            own(roles, CRITIC, model)
        elif config.critic == "model":
            owner = empty_roles(settings, is_full=True)
            owner.assign(CRITIC)
        owner.heads[VALUE] = ScalarHead(roles.hidden_size).to(META)
        critic = Critic(owner, role)
    ptx, data = None, settings.data
    if config.ptx_coef > 0:
        text = [0] * data.max_prompt_tokens, [0] * data.max_response_tokens
        ptx = PTX([DemonstrationTokens(*text)] * config.ptx_batch_size, config, pad_id=0, seed=0)
    config = replace(config, rollout="native")  # a sampler of the user's own may read the weights
    return PPOModule(
        roles, Reward((), ()), config, critic=critic, chat=CHAT, prompts={}, seed=0,
        stage=settings.stage, ptx=ptx,
    )  # fmt: skip


def start(settings: Settings, *, is_full: bool = False) -> Roles:
    """Return the model that a stage starts from, with the adapter of the SFT model if it has one.

    is_full: True if all weights are trained, which is without adapters.
    """
    roles = empty_roles(settings, is_full=is_full)
    if starts_from_sft(settings) and not is_full:
        own(roles, SFT, settings.model, is_trained=False)
    return roles


def starts_from_sft(settings: Settings) -> bool:
    """Return whether the stage starts from an SFT model rather than from the base."""
    return settings.definition.reads_sft and settings.policy.checkpoint != BASE


def own(
    roles: Roles, role: str, model: ModelConfig, finetune: str = "lora", *, is_trained: bool = True
) -> None:
    """Add a role with an adapter of its own, or with finetune=full as the whole model."""
    if finetune == "full":
        roles.assign(role)
        return
    with META:
        roles.add_adapter(role, model.lora)
    for parameter in roles.trained_by(role):
        parameter.requires_grad_(is_trained)


def empty_roles(settings: Settings, *, is_full: bool) -> Roles:
    """Return the base model, frozen or in fp32 and trained."""
    config = settings.model
    model = empty_model(config).to(torch.float32 if is_full else getattr(torch, config.dtype))
    if config.gradient_checkpointing:
        recompute(model)
    # The fast layers are tried when they are made, which takes weights.
    return Roles(model.eval().requires_grad_(is_full), "plain")


def quantise(model: PreTrainedModel, quantization: Quantization) -> None:
    """Give the linear layers of the base weights of the size that bitsandbytes makes them."""
    if quantization == "none":
        return
    for layer in linear_layers(model.base_model):
        outputs, inputs = layer.weight.shape
        shape, dtype = (outputs, inputs), torch.int8
        if quantization == "nf4":
            shape, dtype = (outputs * inputs // 2, 1), torch.uint8
        weight = torch.empty(shape, dtype=dtype, device=META)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if quantization == "nf4":
            absmax = torch.empty(outputs * inputs // BLOCK, device=META)
            layer.weight.quant_state = SimpleNamespace(absmax=absmax)  # type: ignore[attr-defined]
