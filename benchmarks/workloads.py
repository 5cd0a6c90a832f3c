"""Workloads of the benchmarks: models with random weights, and their prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import ours
from common import Setting, random_prompts
from lightning_rlhf.core.ppo_config import CriticKind
from lightning_rlhf.core.records import Experience, Prompts, Record
from lightning_rlhf.modules.ppo import TRAINING, PPOModule

T = TypeVar("T")
SHORTEST, LONGEST = 16, 32
END_CHANCE = 0.0445  # per token; with at most 48 tokens, the mean length of a response is 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes of a model with random weights, and of its responses."""

    vocabulary: int = 2048
    """Number of tokens in the vocabulary."""
    hidden: int = 128
    """Size of a hidden state."""
    layers: int = 4
    """Number of layers."""
    intermediate: int = 344
    """Size of the MLP's hidden layer."""
    hybrid: bool = False
    """True for linear attention in all layers but the last."""
    dtype: torch.dtype = torch.float32
    """Data type of the weights."""
    early_end: bool = False
    """True for responses that end at random, False for responses of full length."""
    critic: CriticKind = "head"
    """Kind of critic."""
    episodes: int = 32
    """Number of responses per iteration."""
    response: int = 48
    """Largest number of tokens of a response."""


WORKLOADS = {
    "tiny": Workload(),
    "tiny-eos": Workload(early_end=True),
    "vocab32k": Workload(vocabulary=32768),
    "vocab32k-eos": Workload(vocabulary=32768, early_end=True),
    "hybrid": Workload(hybrid=True),
    "8m": Workload(vocabulary=4096, hidden=320, layers=6, intermediate=784),
    "8m-bf16": Workload(
        vocabulary=4096, hidden=320, layers=6, intermediate=784, dtype=torch.bfloat16
    ),
    "tiny-critic": Workload(critic="adapter"),
}


def build_model(workload: Workload) -> PreTrainedModel:
    """Return the model with random weights: nearly uniform over all tokens but the end token."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": workload.vocabulary,
        "hidden_size": workload.hidden,
        "intermediate_size": workload.intermediate,
        "num_hidden_layers": workload.layers,
        "num_attention_heads": workload.hidden // 32,
        "num_key_value_heads": workload.hidden // 32,
        "head_dim": 32,
        "max_position_embeddings": LONGEST + workload.response,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if workload.hybrid:
        config = Qwen3_5TextConfig(
            **common,
            layer_types=["linear_attention"] * (workload.layers - 1) + ["full_attention"],
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
        )
        model: PreTrainedModel = Qwen3_5ForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    if workload.early_end:
        give_end_token(model, END_CHANCE)
    return model.to(workload.dtype)


def give_end_token(model: PreTrainedModel, chance: float) -> None:
    """Set the probability of token 0 to `chance` at every position.

    Its weight is 0, and its logit is a bias of the output layer, which is not trained.
    """
    weight = model.get_input_embeddings().weight
    vocabulary, hidden = weight.shape
    head = nn.Linear(hidden, vocabulary)
    head.weight = weight
    nn.init.zeros_(head.bias)
    with torch.no_grad():
        weight[0] = 0
        others = (vocabulary - 1) * torch.exp(weight[1:].square().sum(1).mean() / 2)
        head.bias[0] = torch.log(others * chance / (1 - chance))
    head.bias.requires_grad_(False)
    model.set_output_embeddings(head)


def parameters(workload: Workload) -> int:
    """Return the model's number of parameters, counting the tied embedding once."""
    return sum(p.numel() for p in build_model(workload).parameters())


def low_tokens(tokens: Tensor, response_mask: Tensor) -> Tensor:
    """Return the share of response tokens with an id below 512: a reward of negligible cost."""
    low = (tokens[:, -response_mask.shape[1] :] < 512) & response_mask
    return low.sum(dim=1) / response_mask.sum(dim=1)


def prompts_of(workload: Workload) -> Prompts:
    """Return one batch of prompts of uneven lengths."""
    return random_prompts(
        1,
        workload.episodes,
        vocabulary=workload.vocabulary,
        shortest=SHORTEST,
        longest=LONGEST,
        seed=0,
    )[0]


def build_module(
    workload: Workload, device: torch.device, microbatch_size: int | None = None
) -> PPOModule:
    """Return PPO with one optimizer step over all episodes, and a learning rate of nearly 0.

    The adapter is not at zero, as after some training.

    microbatch_size: number of rows per micro-batch; None uses all episodes.
    """
    setting = Setting(
        iterations=1,
        episodes=workload.episodes,
        response_tokens=workload.response,
        end_token=0 if workload.early_end else workload.vocabulary + 1,
        score=low_tokens,
        lr=1e-9,
        epochs=1,
        minibatches=1,
    )
    module = ours.build(build_model(workload), setting, workload.critic)
    if microbatch_size is not None:
        module.microbatch.rows = microbatch_size
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.002, generator=generator)
    return module.to(device)


def experience_of(module: PPOModule, prompts: Prompts, draw: int = 0) -> Experience:
    """Return what the policy learns from: its own responses, scored; each draw has others."""
    rollout = module.collector.roll_out(prompts, module.generator(TRAINING, draw))
    return module.make_experience(rollout)


def fit(
    module: L.LightningModule, batch: Record, device: torch.device, precision: Any = "32-true"
) -> None:
    """Run one training step in Lightning's Trainer, without logging."""
    trainer = L.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    data = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data)


def within_fit(
    module: PPOModule,
    prompts: Prompts,
    device: torch.device,
    work: Callable[[Prompts], T],
    precision: Any = "32-true",
) -> T:
    """Return `work(prompts)`, run in place of a training step.

    The optimizer and the backward pass of `work` are then those of Lightning's Trainer.
    """
    found: list[T] = []

    def step(batch: Prompts, batch_idx: int) -> None:
        found.append(work(batch))

    module.training_step = step  # type: ignore
    fit(module, prompts, device, precision)
    return found[0]
