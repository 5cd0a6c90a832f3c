"""Compute the memory of a process by role and set-up for models of 0.8B to 32B, without weights.

    .venv/bin/python benchmarks/memory_plan.py

The models are made on torch's device `meta`, which has shapes and no memory; the plan is that of
the preflight. Nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common import ROOT, markdown_table
from lightning_rlhf.core.config import Quantization, SFTConfig
from lightning_rlhf.core.ppo_config import CriticKind, PPOConfig
from lightning_rlhf.data.lengths import DemonstrationTokens, PromptTokens
from lightning_rlhf.models import roles as role_models
from lightning_rlhf.models.checkpointing import recompute
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.heads import RewardHeads, ScalarHead
from lightning_rlhf.models.roles import CRITIC, POLICY, REWARD, SFT, VALUE, Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.parallel.replicas import Replicas
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.stages.preflight import memory_plan
from lightning_rlhf.stages.preflight.memory_plan import MemoryPlan, plan_memory
from machine import options, write
from true_shape import SHAPE

META = torch.device("meta")
QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
SHAPES: dict[str, PretrainedConfig] = {
    "Qwen3.5-0.8B": Qwen3_5TextConfig(**SHAPE),
    "Qwen3-1.7B": Qwen3Config(
        **QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, tie_word_embeddings=True,
    ),
    "Qwen3-8B": Qwen3Config(
        **QWEN3, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, tie_word_embeddings=False,
    ),
    "Qwen3-32B": Qwen3Config(
        **QWEN3, hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64,
        num_attention_heads=64, tie_word_embeddings=False,
    ),
}  # fmt: skip
PROMPT, LORA = 512, LoRASettings(r=16, alpha=32, target_modules="all-linear")
"""Tokens of the longest prompt, `data.max_prompt_tokens` of conf/data; adapters of conf/model."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Choices on which the memory of stage=ppo depends; the other keys have their defaults."""

    quantization: Quantization = "none"
    checkpointing: bool = False
    critic: CriticKind = "head"
    processes: int = 1


SETUPS = {
    "ppo, bf16": Setup(),
    "ppo, bf16, gradient checkpointing": Setup(checkpointing=True),
    "the same in 4 processes, each": Setup(checkpointing=True, processes=4),
    "ppo, int8, gradient checkpointing": Setup(checkpointing=True, quantization="int8"),
    "ppo, nf4, gradient checkpointing": Setup(checkpointing=True, quantization="nf4"),
    "ppo, nf4, the same, critic=adapter": Setup(
        checkpointing=True, quantization="nf4", critic="adapter"
    ),
    "ppo, bf16, the same, critic=model": Setup(checkpointing=True, critic="model"),
}


def language_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without memory, frozen."""
    kind: Any = Qwen3_5ForCausalLM if isinstance(config, Qwen3_5TextConfig) else Qwen3ForCausalLM
    with META:
        model: PreTrainedModel = kind(config)
    return model.to(dtype).eval().requires_grad_(False)


def quantise(roles: Roles, quantization: Quantization) -> None:
    """Give the linear layers of the base weights of the size that bitsandbytes makes them."""
    if quantization == "none":
        return
    for name, layer in roles.causal_lm.base_model.named_modules():
        if not isinstance(layer, nn.Linear) or "lora_" in name:
            continue
        outputs, inputs = layer.weight.shape
        if quantization == "int8":
            weight = torch.empty(outputs, inputs, dtype=torch.int8, device=META)
        else:
            weight = torch.empty(outputs * inputs // 2, 1, dtype=torch.uint8, device=META)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if quantization == "nf4":
            absmax = torch.empty(outputs * inputs // 64, device=META)
            layer.weight.quant_state = SimpleNamespace(absmax=absmax)  # type: ignore[attr-defined]


def ppo_plan(config: PretrainedConfig, setup: Setup) -> MemoryPlan:
    """Return the plan of stage=ppo with an SFT adapter and a reward adapter."""
    model = language_model(config, torch.bfloat16)
    if setup.checkpointing:
        recompute(model)
    roles = Roles(model, "plain")
    trained = (POLICY, CRITIC) if setup.critic == "adapter" else (POLICY,)
    for role in (SFT, REWARD, *trained):
        with META:
            roles.add_adapter(role, LORA)
        roles._stack(role, trainable=role in trained)
    roles.heads[REWARD] = RewardHeads(roles.hidden_size, 1).to(META).requires_grad_(False)
    owner, role = roles, POLICY
    if setup.critic == "adapter":
        role = CRITIC
    elif setup.critic == "model":
        whole = language_model(config, torch.float32)
        recompute(whole)
        owner, role = Roles(whole.requires_grad_(True), "plain"), CRITIC
        owner.assign(CRITIC)
    owner.heads[VALUE] = ScalarHead.zeros(roles.hidden_size).to(META)
    quantise(roles, setup.quantization)
    module = PPOModule(
        roles, Reward((), ()), PPOConfig(**section("ppo") | {"critic": setup.critic}),
        critic=Critic(owner, role), chat=CHAT, prompts={}, seed=0, replicas=shares(setup.processes),
    )  # fmt: skip
    prompts: Any = [PromptTokens([0] * PROMPT, 0)]
    return plan_memory(module, SimpleNamespace(train=prompts, val=[]), META)  # type: ignore


CHAT: Any = SimpleNamespace(end_token_ids=(0,), stop_at=lambda texts: None)


def shares(processes: int) -> Replicas:
    """Return the first of so many replicas, without a process group."""
    replicas = Replicas()
    replicas.size = processes
    return replicas


def sft_plan(config: PretrainedConfig, *, is_full: bool) -> MemoryPlan:
    """Return the plan of stage=sft: all weights in fp32, or an adapter on bf16 weights."""
    model = language_model(config, torch.float32 if is_full else torch.bfloat16)
    recompute(model)
    roles = Roles(model.requires_grad_(is_full), "plain")
    if not is_full:
        with META:
            roles.add_adapter(SFT, LORA)
    section_of = section("sft") | {"finetune": "full" if is_full else "lora"}
    module = SFTModule(roles, SFTConfig(**section_of))
    rows: Any = [DemonstrationTokens([0] * PROMPT, [0] * PROMPT)]
    return plan_memory(module, SimpleNamespace(train=rows, val=rows), META)  # type: ignore


def section(stage: str) -> dict[str, Any]:
    """Return the default values of a stage."""
    found: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/stages/{stage}.yaml"))
    if stage == "ppo":
        found = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/advantage/gae.yaml")) | found
    return found | {"final": "last"}  # type: ignore[no-any-return]


def row(name: str, plan: MemoryPlan) -> list[str]:
    """Return a row of the table, in GB."""
    roles, update = plan.roles.values(), plan.update(plan.rows)
    numbers = (
        plan.roles["base"].weights,
        sum(role.weights for role in roles) - plan.roles["base"].weights,
        sum(role.gradients for role in roles),
        sum(role.optimizer for role in roles),
        plan.rollout.cache, plan.rollout.logits + plan.rollout.activations + plan.rollout.weights,
        update.activations, update.logits, plan.peak(plan.rows),
    )  # fmt: skip
    return [name, *(f"{number / 1e9:.2f}" for number in numbers)]


def exchanged(plan: MemoryPlan, stage: str) -> list[str]:
    """Return the bytes of the gradients of an update, and of PPO's records in an iteration, MB."""
    gradients = sum(role.gradients for role in plan.roles.values())
    keys = section("ppo")
    rows, response = keys["rollout_batch_size"], keys["max_response_tokens"]
    records = rows * (9 * PROMPT + 22 * response + 4 + 29)
    updates = keys["ppo_epochs"] * rows // keys["minibatch_size"]
    if stage == "sft":
        return [f"{gradients / 1e6:,.1f}", "1", "-"]
    return [f"{gradients / 1e6:,.1f}", str(updates), f"{records / 1e6:.2f}"]


def main() -> None:
    args = options(str(__doc__))
    # It computes a few tokens, for which these models have no weights.
    role_models.check_output_layer = lambda model: None
    memory_plan.bytes_of_number = lambda roles: 2  # bf16 autocast, which `meta` does not know
    parts, traffic = [], []
    for name, config in SHAPES.items():
        rows = {
            "sft, LoRA, gradient checkpointing": sft_plan(config, is_full=False),
            "sft, full weights, gradient checkpointing": sft_plan(config, is_full=True),
        } | {what: ppo_plan(config, setup) for what, setup in SETUPS.items()}
        count = sum(p.numel() for p in language_model(config, torch.bfloat16).parameters())
        header = [f"{name}: {count / 1e9:.2f}B parameters", "base", "adapters, heads, own models",
                  "gradients", "optimizer", "rollout: cache", "rollout: logits, activations",
                  "update: activations", "update: logits", "peak"]  # fmt: skip
        parts.append(markdown_table(header, [row(what, plan) for what, plan in rows.items()]))
        for stage, what in (("sft", "sft, LoRA, gradient checkpointing"),
                            ("sft", "sft, full weights, gradient checkpointing"),
                            ("ppo", "ppo, bf16")):  # fmt: skip
            traffic.append([f"{name}, {what.removesuffix(', gradient checkpointing')}",
                            *exchanged(rows[what], stage)])  # fmt: skip
    header = ["", "gradients of an update, MB", "updates an iteration", "records an iteration, MB"]
    keys = section("ppo")
    write(
        args,
        "memory_plan",
        "Memory by role and set-up, computed",
        {"tables": parts, "exchanged": traffic},
        "GB (10^9 bytes) of one process by the plan of the preflight (docs/preflight.md), on "
        "shapes without weights; nothing here was measured. Defaults of conf: "
        f"{keys['rollout_batch_size']} responses of {keys['max_response_tokens']} tokens to "
        f"prompts of {PROMPT} tokens, micro-batches of {keys['microbatch_size']} rows, LoRA of "
        "rank 16 in fp32 on every linear layer, frozen weights in bf16; texts of "
        f"{2 * PROMPT} tokens in sft. PPO holds an adapter each of SFT, reward model and policy. "
        "peak = weights + gradients + optimizer + the larger of rollout and update.",
        *parts,
        "Bytes that processes exchange: gradients are summed in each update, records exchanged "
        "twice an iteration; docs/scaling.md has the formulas and their test.",
        markdown_table(header, traffic),
    )


if __name__ == "__main__":
    main()
