"""Reward models that read text: sequence classifiers, and what stage=rm left for another policy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_rlhf.cli.main import CONF
from lightning_rlhf.cli.settings import read_model, read_reward
from lightning_rlhf.core.config import require
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message, prompt_row
from lightning_rlhf.models.checkpoint import Final, find
from lightning_rlhf.models.classifier import load_classifier
from lightning_rlhf.models.handover import load_reward
from lightning_rlhf.models.loading import load_tokenizer, local_folder
from lightning_rlhf.rewards.config import ModelConfig
from lightning_rlhf.rewards.protocol import Columns, Messages
from lightning_rlhf.rewards.serve import Score
from lightning_rlhf.rewards.text import Features, TextModel, TextReward


def text_reward(
    config: ModelConfig, key: str, final: Final | None, device: torch.device
) -> TextReward:
    """The reward model of `config`, which stands at `key`.

    final: its folder, where it is one of this machine.
    """
    if final is None:
        folder = local_folder(config.name_or_path, f"{key}.name_or_path", config.revision)
        final = find(str(folder), f"{key}.name_or_path")
    on = torch.device(config.device) if config.device else device
    mean, std = 0.0, 1.0
    if final.manifest is not None:
        if config.normalization == "stored":
            mean, std = final.reward_moments()
        model, limit = own_model(final, config, key, on)
        max_tokens = min(config.max_tokens, limit)
    else:
        if config.normalization == "stored":
            raise ConfigError(
                f"{key}.normalization is 'stored', but {config.name_or_path} was not trained by "
                "stage=rm, which measures mean and deviation; allowed: none, running"
            )
        model, max_tokens = classifier_model(config, key, on), config.max_tokens
    return TextReward(model, mean, std, config.batch_size, max_tokens, key)


def classifier_model(config: ModelConfig, key: str, device: torch.device) -> TextModel:
    """A sequence classifier of any family."""
    classifier = load_classifier(
        config.name_or_path,
        key,
        revision=config.revision,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        label=config.label,
        dtype=config.dtype,
        quantization=config.quantization,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        max_tokens=config.max_tokens,
        device=device,
    )
    return TextModel(
        classifier.encode, classifier.read, classifier.show, classifier.problems, classifier.starts
    )


def own_model(
    final: Final, config: ModelConfig, key: str, device: torch.device
) -> tuple[TextModel, int]:
    """What stage=rm left, on the base that it was trained on, with the format of its training.

    Returns: the model, and how many tokens it has positions for.
    """
    for name in ("revision", "tokenizer", "chat_template", "label"):
        found = getattr(config, name)
        if found is not None:
            raise ConfigError(
                f"{key}.{name} is {found!r}, but {final.path} was written by stage=rm and brings "
                "its own; allowed: null"
            )
    manifest = final.require_manifest("rm")
    base = replace(
        read_model(manifest.config),
        dtype=config.dtype,
        quantization=config.quantization,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    roles = load_reward(final, base).to(device)
    tokenizer = load_tokenizer(base, final.path)
    chat = ChatFormat(tokenizer, manifest.config["data"]["chat_template_kwargs"])

    def encode(row: Mapping[str, Any], response: str) -> Features:
        prompt = chat.prompt_tokens(turns(row["messages"]))
        return {"input_ids": [*prompt, *chat.response_tokens(response)]}

    def read(features: Sequence[Features]) -> Float[Tensor, " n"]:
        rows = [torch.tensor(one["input_ids"]) for one in features]
        tokens = pad_sequence(rows, batch_first=True, padding_value=chat.pad_token_id).to(device)
        real = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        mask = pad_sequence(real, batch_first=True).to(device)
        with torch.autocast(device.type, enabled=False):
            return roles.reward(tokens, mask)

    limit = getattr(roles.causal_lm.config, "max_position_embeddings", None)
    return TextModel(encode, read, chat.show), limit or config.max_tokens


def text_scorer(source: str, overrides: Sequence[str]) -> Score:
    """What a server answers with: the reward at a folder or hub id, on the GPU where there is one.

    Standardised where it is a `final/` of stage=rm, which has mean and deviation; else raw.

    overrides: `reward.KEY=VALUE`, of the keys in conf/reward/model.yaml.
    """
    final = find(str(local_folder(source, "reward.name_or_path", None)), "reward.name_or_path")
    for word in overrides:
        require(re.match(r"reward\.\w+=", word) is not None, "an option", word, "reward.KEY=VALUE")
    tree = OmegaConf.merge(
        {"reward": OmegaConf.load(CONF / "reward" / "model.yaml")},
        {"reward": {"name_or_path": str(final.path)}},
        {"reward": {"normalization": "stored" if final.manifest else "none"}},
        OmegaConf.from_dotlist(list(overrides)),
    )
    (config,) = read_reward(OmegaConf.to_container(tree.reward)).values()
    assert isinstance(config, ModelConfig)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    reward = text_reward(config, "reward", final, device)

    def score(prompts: list[Messages], responses: list[str], columns: Columns) -> list[float]:
        rows = [prompt_row(turns(prompt)) for prompt in prompts]
        return reward.score(rows, responses).tolist()

    return score


def turns(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The turns of a row as the chat template takes them."""
    return tuple(Message(turn["role"], turn["content"]) for turn in messages)
