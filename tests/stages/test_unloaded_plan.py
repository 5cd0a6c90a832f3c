"""The memory plan of a run whose models are not loaded, by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_rlhf.library import configuration
from lightning_rlhf.models.loading import empty_model
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.stages.memory_plan import Bytes, plan_run

SHAPE = {
    "model_type": "qwen3", "vocab_size": 1792, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = 4 * 32 * 32 + 3 * 32 * 64
"""Numbers of the linear layers: q, k, v, o; gate, up, down."""
OTHERS = 1792 * 32 + 3 * 32 + 2 * 16
"""Numbers of the embedding, three norms of the width and two of the heads, in bf16."""
ADAPTER = 4 * 16 * (4 * (32 + 32) + 3 * (32 + 64))
"""Bytes of an adapter of rank 16 in fp32."""
SIZES = ("ppo.rollout_batch_size=8", "ppo.minibatch_size=4", "ppo.microbatch_size=4",
         "ppo.max_response_tokens=8", "data.max_prompt_tokens=24")  # fmt: skip


@pytest.mark.parametrize(("quantization", "linear"), [
    ("none", 2 * LINEAR), ("int8", LINEAR + 4 * (4 * 32 + 2 * 64 + 32)),
    ("nf4", LINEAR // 2 + 4 * LINEAR // 64),
])  # fmt: skip
def test_ppo_of_two_processes_on_gpus(tmp_path: Path, quantization: str, linear: int) -> None:
    """Of the model there is a config.json alone, and no GPU.

    int8 has a scale for each output; nf4 has half a byte a number and one for every 64.
    """
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    plan = plan_run(configuration(
        "ppo", "model=hub", "model.name=small", f"model.name_or_path={tmp_path}", "data=files",
        f"model.quantization={quantization}", "trainer=gpu", "trainer.devices=2", *SIZES,
    ))  # fmt: skip
    head = 4 * 33
    assert plan.roles == {
        "base": Bytes(weights=linear + 2 * OTHERS),
        "sft": Bytes(weights=ADAPTER),
        "reward": Bytes(weights=ADAPTER + head),
        "policy": Bytes(weights=ADAPTER, gradients=ADAPTER, optimizer=2 * ADAPTER),
        "critic": Bytes(weights=head, gradients=head, optimizer=2 * head),
    }
    # Four responses of a process: 32 tokens with keys and values in bf16, and what is sampled.
    assert plan.rollout.cache == 4 * 32 * (2 * 2 * 2 * 16 + 25)
    assert plan.rollout.weights == 0  # plain layers, which are the default on a GPU


def test_whole_weights_are_trained_beside_a_frozen_base(tmp_path: Path) -> None:
    """The one in fp32 with gradients and two moments, the other in bf16 below the adapters."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    words = ("model=hub", "model.name=small", f"model.name_or_path={tmp_path}", "data=files")
    words += ("trainer=gpu", "ppo.finetune=full", "ppo.critic=adapter", "dpo.finetune=full")
    whole, adapter, head = 4 * (LINEAR + OTHERS), Bytes(weights=ADAPTER), 4 * 33
    sizes = whole, ADAPTER + head
    trained, critic = (Bytes(weights=n, gradients=n, optimizer=2 * n) for n in sizes)
    dpo = {"base": trained, "reference": Bytes(weights=whole // 2), "sft": adapter}
    ppo = dpo | {"reward": Bytes(weights=ADAPTER + head), "critic": critic}
    for stage, expected in {"dpo": dpo, "ppo": ppo}.items():
        assert plan_run(configuration(stage, *words, stages=("dpo", "ppo"))).roles == expected
    words += ("trainer.strategy=fsdp", "trainer.devices=2")
    shared = plan_run(configuration("dpo", *words, stages=("dpo", "ppo"))).roles
    assert shared["base"] == Bytes(weights=whole // 2, gradients=whole, optimizer=whole)
    assert shared["reference"] == Bytes(weights=whole // 4)


@pytest.mark.parametrize(("targets", "numbers"), [
    ("all-linear", ADAPTER // 4), (r"model\..*\.(k_proj|up_proj)", 16 * (32 + 32 + 32 + 64)),
])  # fmt: skip
def test_the_adapters_of_a_plan_are_those_that_peft_makes(
    tmp_path: Path, targets: str, numbers: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    settings = configuration(
        "sft", "model=hub", "model.name=small", f"model.name_or_path={tmp_path}", "data=files",
    )  # fmt: skip
    lora = replace(settings.model.lora, target_modules=targets)
    settings = replace(settings, model=replace(settings.model, lora=lora))
    assert plan_run(settings).roles["sft"].weights == 4 * numbers
    roles = Roles(empty_model(settings.model), "plain")
    with torch.device("meta"):
        roles.add_adapter("sft", lora)
    assert sum(p.numel() for p in roles.trained_by("sft")) == numbers
