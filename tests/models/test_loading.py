"""From a hub id, a folder or a configuration to a model, and the errors when that fails."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.core.errors import CheckpointError, HubError
from lightning_rlhf.models.config import BASE, POLICY, LoRASettings
from lightning_rlhf.models.loading import load_causal_lm, load_tokenizer, quantization_of
from lightning_rlhf.models.roles import Roles

from .conftest import build_config, build_model

ABSENT = "nobody-at-all/no-such-model"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A whole model folder, as a download leaves it."""
    path = tmp_path / "model"
    build_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_without_a_network_a_hub_id_fails_fast_and_says_the_way_to_a_local_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    def unknown_host(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    monkeypatch.setattr(time, "sleep", slept.append)
    started = time.perf_counter()
    with pytest.raises(HubError) as caught:
        load_causal_lm(build_config(name_or_path=ABSENT), trainable=False, seed=0)
    seconds = time.perf_counter() - started + sum(slept)
    message = str(caught.value)
    assert f"hf download {ABSENT} --local-dir FOLDER" in message
    assert "model.name_or_path=FOLDER" in message
    assert len(message.splitlines()) == 1
    assert seconds < 20


def test_missing_weights_are_refused_and_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if "q_proj" in name)
    del state[name]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="q_proj"):
        load_causal_lm(build_config(name_or_path=str(folder)), trainable=False, seed=0)


def test_the_tokenizer_is_the_checkpoints_else_the_presets_else_the_models(
    folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Three copies, caught apart by a token."""

    def marked(name: str) -> Path:
        tokenizer.save_pretrained(tmp_path / name)
        file = tmp_path / name / "tokenizer_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"model_max_length": len(name)}))
        return tmp_path / name

    own = build_config(name_or_path=str(folder))
    preset = build_config(name_or_path=str(folder), tokenizer=str(marked("preset")))
    checkpoint = marked("checkpoint")
    assert load_tokenizer(own).model_max_length == tokenizer.model_max_length
    assert load_tokenizer(preset).model_max_length == len("preset")
    assert load_tokenizer(preset, checkpoint).model_max_length == len("checkpoint")
    # An adapter as peft alone saves it has none.
    (adapter := tmp_path / "adapter").mkdir()
    assert load_tokenizer(own, adapter).model_max_length == tokenizer.model_max_length
    assert load_tokenizer(preset, adapter).model_max_length == len("preset")


def test_weights_are_frozen_in_the_given_dtype_or_trainable_in_fp32(folder: Path) -> None:
    config = build_config(name_or_path=str(folder), dtype="bfloat16")
    frozen = load_causal_lm(config, trainable=False, seed=0)
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in frozen.parameters())
    with pytest.warns(UserWarning, match=r"model\.dtype=bfloat16 .* in float32"):
        trained = load_causal_lm(config, trainable=True, seed=0)
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in trained.parameters())
    for model in (frozen, trained):
        assert not any(module.training for module in model.modules())


QUANTISED: dict[str, dict[str, Any]] = {
    # Sizes that nf4 takes on a CPU: blocks of 64 weights, 32 outputs.
    "qwen3": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
              "num_key_value_heads": 4},
    "qwen3_5_text": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
                     "num_key_value_heads": 4, "linear_num_value_heads": 32},
}  # fmt: skip


def dequantised(model: PreTrainedModel, whole: PreTrainedModel) -> PreTrainedModel:
    """`whole` with the rounded weights of the quantised `model`."""
    state = {
        f"{name}.weight": bnb.functional.dequantize_4bit(m.weight.data, m.weight.quant_state)
        if isinstance(m, bnb.nn.Linear4bit)
        else m.weight.data * m.state.SCB[:, None] / 127
        for name, m in model.named_modules()
        if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)
    }
    least = 1e-3 if quantization_of(model) == "nf4" else 1e-4
    assert all((whole.state_dict()[name] - state[name]).abs().max() > least for name in state)
    whole.load_state_dict(state, strict=False)
    return whole


@pytest.mark.parametrize("model_type", list(QUANTISED))
@pytest.mark.parametrize(
    # Weights alone are rounded: it is the model with those weights.
    ("quantization", "layer"), [("int8", bnb.nn.Linear8bitLt), ("nf4", bnb.nn.Linear4bit)],
)  # fmt: skip
def test_a_quantised_base_loads_runs_and_carries_a_trainable_adapter(
    tmp_path: Path, model_type: str, quantization: str, layer: type
) -> None:
    build_model(model_type, **QUANTISED[model_type]).save_pretrained(tmp_path)
    config = build_config(name_or_path=str(tmp_path))
    whole = load_causal_lm(config, trainable=False, seed=0)
    config = build_config(name_or_path=str(tmp_path), quantization=quantization)
    model = load_causal_lm(config, trainable=False, seed=0)
    linear = [m for n, m in model.named_modules() if n.endswith("_proj")]
    assert linear
    assert all(isinstance(module, layer) for module in linear)
    Roles(model).probe(BASE)
    whole = dequantised(model, whole)

    # After a pass without gradients, as in a rollout, logits and gradients are those due.
    logits, gradients = [], []
    for roles in (Roles(model), Roles(whole)):
        torch.manual_seed(0)
        roles.add_adapter(POLICY, LoRASettings(r=2, alpha=4, target_modules="all-linear"))
        logits.append(roles.probe(POLICY))
        tokens = torch.arange(2, 14).reshape(2, 6)
        roles.hidden(tokens).square()[..., :9].sum().backward()
        assert all("lora_" in n for n, p in roles.named_parameters() if p.requires_grad)
        matrices = [p for n, p in roles.named_parameters() if "lora_B" in n]
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in matrices)
        gradients.append(torch.cat([p.grad.flatten() for p in matrices]))
    found, expected = logits
    assert (found - expected).square().mean() < 1e-4**2 * expected.square().mean()
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "float32"), ("nf4", "bfloat16")])
@torch.no_grad()
def test_a_row_of_quantised_weights_does_not_depend_on_the_rows_beside_it(
    tmp_path: Path, quantization: str, dtype: str
) -> None:
    """Also where some rows have activations above 6, which LLM.int8() takes out of all rows."""
    model = build_model("qwen3", **QUANTISED["qwen3"])
    for layer in model.model.layers:
        layer.input_layernorm.weight[5] = 12
    model.save_pretrained(tmp_path)
    config = build_config(name_or_path=str(tmp_path), quantization=quantization, dtype=dtype)
    roles = Roles(load_causal_lm(config, trainable=False, seed=0))
    tokens = torch.arange(2, 98).reshape(8, 12) % 97
    together = roles.head(roles.hidden(tokens)).float()
    alone = torch.cat([roles.head(roles.hidden(row[None])) for row in tokens]).float()
    limit = 1e-5 if dtype == "float32" else 1e-2
    assert (together - alone).square().mean() < limit**2 * alone.square().mean()
