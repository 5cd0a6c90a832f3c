"""A reward model as AutoModelForSequenceClassification and so every other program loads it."""

import copy
import json
import shutil
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from lightning_rlhf.models.build_roles import attach_reward, start_from, whole_reward
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.models.config import REWARD
from lightning_rlhf.models.heads import ScalarHeads, score_bias, with_padding
from lightning_rlhf.models.loading import load_causal_lm
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.stages.final import write_final

from .conftest import build_config, build_manifest, build_model

PAD = 0
LONG, SHORT = [5, 9, 23, 41, 7, 77], [8, 14, 3]


def batch(side: str) -> dict[str, Tensor]:
    """Two dialogues, padded on one side."""
    fill = [PAD] * (len(LONG) - len(SHORT))
    short = [*fill, *SHORT] if side == "left" else [*SHORT, *fill]
    tokens = torch.tensor([LONG, short])
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


@torch.no_grad()
def ours(roles: Roles) -> Tensor:
    """The rewards of the two dialogues without the constant of the heads, each by itself."""
    bias = score_bias(roles.heads[REWARD])
    rows = [torch.tensor([row]) for row in (LONG, SHORT)]
    return torch.cat([roles.reward(x, torch.ones_like(x, dtype=torch.bool)) for x in rows]) - bias


@torch.no_grad()
def check_scores(model: Any, expected: Tensor) -> None:
    assert (expected[0] - expected[1]).abs() > 1e-2  # dialogues that are told apart
    for side in ("left", "right"):
        scores = model.eval()(**batch(side)).logits
        assert scores.shape == (2, 1)
        torch.testing.assert_close(scores[:, 0], expected, atol=1e-5, rtol=0)


def test_the_adapter_is_complete_on_the_base_of_the_sft_model(lineage: Any, tmp_path: Any) -> None:
    """Whether SFT trained an adapter or all weights, which the reward's adapter is applied to."""
    roles = attach_reward(
        start_from(lineage.config, lineage.sft, trainable=False, seed=0), REWARD, lineage.rm,
        lineage.config, lineage.hash,
    )  # fmt: skip
    folder = tmp_path / "rm"
    shutil.copytree(lineage.rm.path, folder)
    named = folder / "adapter_config.json"  # a fixture's manifest names no base
    base = str(lineage.base if lineage.finetune == "lora" else lineage.sft.path)
    named.write_text(json.dumps(json.loads(named.read_text()) | {"base_model_name_or_path": base}))
    options: dict[str, Any] = {"num_labels": 1, "pad_token_id": PAD}
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert info["missing_keys"] <= {"score.weight"}  # of the base; the adapter brings it
    check_scores(model, ours(roles))
    peft = AutoPeftModelForSequenceClassification.from_pretrained(folder, **options)
    check_scores(peft, ours(roles))


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", "untied"])
def test_a_fully_trained_one_loads_without_an_argument(
    model_type: str, tmp_path: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """With an ensemble, whose mean is the score, and a bias, which a classifier cannot have."""
    changes = {"tie_word_embeddings": False} if model_type == "untied" else {}
    own = Roles(build_model("llama" if changes else model_type, **changes), "plain")
    own.heads[REWARD] = ScalarHeads.random(own.hidden_size, 3, torch.Generator().manual_seed(0))
    with torch.no_grad():
        own.heads[REWARD].linear.bias.copy_(torch.tensor([0.5, -0.1, 0.2]))
    own.assign(REWARD)
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.convert_ids_to_tokens(PAD)
    write_final(tmp_path / "final", own, REWARD, padded, build_manifest("rm"), REWARD)

    weights = sorted(file.name for file in (tmp_path / "final").glob("*.safetensors"))
    assert weights == ["model.safetensors"]
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "final", output_loading_info=True
    )
    assert info["missing_keys"] == set()
    tied = own.causal_lm.config.tie_word_embeddings
    assert info["unexpected_keys"] == (set() if tied else {"lm_head.weight"})
    assert model.config.num_labels == 1
    check_scores(model, ours(own))

    # The stages here read the same folder as before, as a language model and heads with a bias.
    final = find(str(tmp_path / "final"), "reward.checkpoint")
    again = whole_reward(final, REWARD, build_config(name_or_path="unused", kernels="plain"))
    torch.testing.assert_close(ours(again), ours(own), atol=0, rtol=0)
    assert score_bias(again.heads[REWARD]) == pytest.approx(0.2)  # (0.5 - 0.1 + 0.2) / 3


def test_a_critic_that_starts_from_it_trains_the_embedding_of_every_token(
    tmp_path: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A pad token in a configuration stops the gradient of its embedding; the model had none."""
    own = Roles(build_model("qwen3", pad_token_id=None), "plain")
    assert own.causal_lm.config.pad_token_id is None
    own.heads[REWARD] = ScalarHeads.random(own.hidden_size, 1, torch.Generator().manual_seed(0))
    own.assign(REWARD)
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.convert_ids_to_tokens(PAD)
    write_final(tmp_path / "final", own, REWARD, padded, build_manifest("rm"), REWARD)
    folder = tmp_path / "final"
    assert AutoConfig.from_pretrained(folder).pad_token_id == PAD
    config = build_config(name_or_path="unused")
    model = load_causal_lm(config, str(folder), trainable=True, seed=0)
    assert model.config.pad_token_id is None
    assert model.get_input_embeddings().padding_idx is None


def test_the_pad_token_ends_no_response(tokenizer: PreTrainedTokenizerBase) -> None:
    """A classifier would read the score before it."""
    pad, end = tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>"])
    assert tokenizer.pad_token_id == pad
    assert with_padding(tokenizer, [end]) is tokenizer
    shared = copy.deepcopy(tokenizer)
    shared.pad_token = "<|end|>"
    assert with_padding(shared, [end]).pad_token_id == pad
    assert shared.pad_token_id == end  # left as it was


def test_a_model_without_a_classifier_in_transformers_stays_a_language_model(
    tmp_path: Any, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {})
    own = Roles(build_model("llama"), "plain")
    own.heads[REWARD] = ScalarHeads.random(own.hidden_size, 1, torch.Generator().manual_seed(0))
    own.assign(REWARD)
    write_final(tmp_path / "final", own, REWARD, tokenizer, build_manifest("rm"), REWARD)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "final"), LlamaForCausalLM)
    final = find(str(tmp_path / "final"), "reward.checkpoint")
    again = whole_reward(final, REWARD, build_config(name_or_path="unused", kernels="plain"))
    torch.testing.assert_close(ours(again), ours(own), atol=0, rtol=0)
