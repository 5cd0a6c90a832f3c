"""Scalar heads on hidden states, and reward models as sequence classifiers of transformers."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.models.checkpoint import OF_ADAPTER, json_object


class ScalarHeads(nn.Module):
    """Linear maps from a hidden state to a value or to rewards, computed in fp32.

    All weights are 0 at first, so that training of a value head starts from V = 0.
    """

    def __init__(self, hidden_size: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, count)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @classmethod
    def random(cls, hidden_size: int, count: int, generator: torch.Generator) -> ScalarHeads:
        """Return `count` heads with weights drawn from N(0, std = 1 / sqrt(d + 1)) and bias 0.

        Source: Stiennon et al. 2020, appendix C, https://arxiv.org/abs/2009.01325
        """
        heads, std = cls(hidden_size, count), 1 / math.sqrt(hidden_size + 1)
        nn.init.normal_(heads.linear.weight, std=std, generator=generator)
        return heads

    def forward(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch H"]:
        """Return the fp32 output of each of the H heads for each hidden state."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float())


SCORE = "score"
"""Name of the output layer of transformers' sequence classifiers of decoder models."""
OWN_PAD = "language_model_pad_token_id"
"""Key of a classifier's config.json: the pad token id of the language model that it is made of,
which decides whether the embedding of that token is trained."""


def trunk_name(config: PretrainedConfig, causal_lm: PreTrainedModel) -> str | None:
    """Return the name that the trunk of `causal_lm` has in the classifier that `config` describes.

    None where transformers has no such classifier, or one with an output layer of another form.
    """
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    with torch.device("meta"):
        empty = transformers.AutoModelForSequenceClassification.from_config(config)
    if not isinstance(getattr(empty, SCORE, None), nn.Linear):
        return None
    trunk = type(causal_lm.base_model)
    return next((name for name, part in empty.named_modules() if type(part) is trunk), None)


def score_weight(heads: Any) -> Float[Tensor, "1 d"]:
    """Return the weight of a classifier's output layer, which has no bias.

    score = mean over heads of (reward - bias); the constant means nothing to Bradley-Terry rewards.
    """
    return heads.linear.weight.detach().float().mean(dim=0, keepdim=True).cpu()


def score_bias(heads: Any) -> float:
    """Return the constant by which the reward is larger than a classifier's score."""
    return float(heads.linear.bias.detach().float().mean())


def classifier_adapter(
    config: LoraConfig, state: dict[str, Tensor], causal_lm: PreTrainedModel, heads: nn.Module
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return an adapter on a language model as one on the classifier of the same base weights.

    A multimodal base is a classifier with a vision tower, which the adapter leaves out. Where
    transformers has no classifier for the base, the adapter is returned as it is.
    """
    config_file = Path(causal_lm.name_or_path) / "config.json"
    stored: PretrainedConfig = causal_lm.config  # the folder's may be that of a larger model
    if config_file.is_file() and json_object(config_file).get("model_type") != stored.model_type:
        stored = transformers.AutoConfig.from_pretrained(config_file.parent)
    name = trunk_name(stored, causal_lm)
    if name is None:
        return config, state
    own = f"base_model.model.{causal_lm.base_model_prefix}."
    trunk = f"base_model.model.{name}."
    state = {key.replace(own, trunk, 1): tensor for key, tensor in state.items()}
    state[f"base_model.model.{SCORE}.weight"] = score_weight(heads)
    targets: Any = config.target_modules
    if own != trunk:
        alternatives = targets if isinstance(targets, str) else "|".join(map(re.escape, targets))
        targets = rf"{re.escape(name)}\..*?({alternatives})"
    saved: Any = {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
    return dataclasses.replace(config, target_modules=targets, **saved), state


def save_adapter(
    folder: Path, model: PeftModel, name: str, base: str, rewards: nn.Module | None = None
) -> None:
    """Write an adapter of the model.

    base: folder or hub id of the weights that it is applied to.
    rewards: heads with which the adapter is written as that of a sequence classifier, where
        transformers has one for the base; None writes that of the language model.
    """
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    config: Any = dataclasses.replace(model.peft_config[name], inference_mode=True)
    if isinstance(config.target_modules, set):  # its order differs between runs
        config.target_modules = sorted(config.target_modules)
    if rewards is not None:
        config, state = classifier_adapter(config, state, model.get_base_model(), rewards)
    config.base_model_name_or_path = base
    state = {name: matrix.detach().cpu().contiguous() for name, matrix in state.items()}
    save_file(state, folder / OF_ADAPTER)
    config.save_pretrained(str(folder))


def save_whole(
    folder: Path, causal_lm: PreTrainedModel, state: dict[str, Tensor], heads: nn.Module | None,
    pad_token_id: int | None,
) -> None:  # fmt: skip
    """Write a language model; with heads, where transformers has one, as a sequence classifier.

    That has one label. The output layer of the language model stays in the file where it is not
    tied to the embedding: the stages here compare its logits with the fingerprint.
    """
    config = copy.deepcopy(causal_lm.config)
    if heads is None or trunk_name(config, causal_lm) != causal_lm.base_model_prefix:
        causal_lm.save_pretrained(folder, state_dict=state)
        return
    score = {f"{SCORE}.weight": score_weight(heads).to(causal_lm.dtype)}
    causal_lm.save_pretrained(folder, state_dict=state | score)
    (folder / "generation_config.json").unlink(missing_ok=True)
    kind = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    config.architectures = [kind.__name__]
    config.num_labels = 1
    setattr(config, OWN_PAD, config.pad_token_id)
    config.pad_token_id = pad_token_id
    config.save_pretrained(folder)


def restore_padding(causal_lm: PreTrainedModel) -> None:
    """Give a language model that was read from a classifier's folder its own pad token again.

    Training would leave out the embedding of that token.
    """
    config = causal_lm.config
    if hasattr(config, OWN_PAD):
        config.pad_token_id = getattr(config, OWN_PAD)
        causal_lm.get_input_embeddings().padding_idx = config.pad_token_id
        delattr(config, OWN_PAD)


def with_padding(
    tokenizer: PreTrainedTokenizerBase, end_token_ids: Collection[int]
) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer whose pad token ends no response.

    Sequence classifiers read their score at the last token that is not the pad token. The pad token
    stays as it is where it fits or where no special token does.
    """
    ends = set(end_token_ids)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return tokenizer
    changed, known = copy.deepcopy(tokenizer), tokenizer.added_tokens_decoder
    special = [token for token in known if known[token].special and token not in ends]
    special.sort(key=lambda token: ("pad" not in known[token].content.lower(), token))
    if special:
        changed.pad_token = known[special[0]].content
    return changed
