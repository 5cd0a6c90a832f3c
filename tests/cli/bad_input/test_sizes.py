"""Sizes of models, adapters and responses that are zero, or more than a machine holds."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Refusals

PPO = ("stage=ppo", "run=next", "policy.checkpoint=sft", "reward.checkpoint=rm")
FROM_CONFIG: list[tuple[str, Any, list[str]]] = [
    ("num_hidden_layers", 0, ["num_hidden_layers is 0; allowed: 1 to 1000"]),
    ("num_hidden_layers", -1, ["num_hidden_layers is -1"]),
    ("num_hidden_layers", 10**9, ["num_hidden_layers is 1000000000"]),
    ("hidden_size", 0, ["embed_tokens.weight the shape (1792, 0)"]),
    ("intermediate_size", 0, ["the shape (0, 32)"]),
    ("vocab_size", 0, ["the shape (0, 32)"]),
    ("hidden_size", 10**7, ["describes", "GiB in float32, and this machine has"]),
    ("vocab_size", 10**12, ["describes", "GiB in float32"]),
    ("hidden_size", 10**12, ["model.from_config"]),
    ("num_attention_heads", 0, ["model.from_config"]),
    ("num_attention_heads", 3, ["model.from_config: The size of tensor"]),
    ("num_attention_heads", 10**12, ["model.from_config"]),
    ("head_dim", -1, ["model.from_config"]),
]


@pytest.mark.parametrize(("key", "value", "named"), FROM_CONFIG)
def test_sizes_of_a_model(refused: Refusals, key: str, value: Any, named: list[str]) -> None:
    refused.value(f"model.from_config.{key}", value, "stage=sft", named=named)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("r", 10**9, ["model.lora.r is 1000000000; allowed: at most 64"]),
        ("target_modules", "[", ["model.lora.target_modules is '['", "regular expression"]),
        ("target_modules", "nothing", ["model.lora.target_modules=nothing"]),
    ],
)
def test_adapters(refused: Refusals, key: str, value: Any, named: list[str]) -> None:
    refused.value(f"model.lora.{key}", value, "stage=sft", "sft.finetune=lora", named=named)


def test_responses_of_ppo(models: Refusals) -> None:
    """The embedded model has 512 positions, which it computes: that alone is a warning."""
    named = ["ppo.max_response_tokens is 100000000; allowed: at most ", "8 responses at once"]
    models.value("ppo.max_response_tokens", 10**8, *PPO, named=named)


@pytest.mark.parametrize("stage", ["rm", "eval_reward"])
def test_responses_that_are_sampled(models: Refusals, stage: str) -> None:
    named = ["data.max_response_tokens is 1000000000; allowed: at most ", "responses at once"]
    given = (f"stage={stage}", *PPO[1:3], *PPO[3:] * (stage == "eval_reward"))
    models.value("data.max_response_tokens", 10**9, *given, named=named)
