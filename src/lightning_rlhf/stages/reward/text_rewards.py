"""Reward models that read text: sequence classifiers, and models of stage=rm on another base."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from omegaconf import OmegaConf
from torch import Tensor

from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.collate import pad
from lightning_rlhf.data.rows import Message, prompt_row
from lightning_rlhf.models.build_roles import load_reward, warn_of_one_head
from lightning_rlhf.models.checkpoint import Final, find
from lightning_rlhf.models.classifier_loading import check_classifier, load_classifier, positions
from lightning_rlhf.models.loading import load_tokenizer, local_folder
from lightning_rlhf.models.manifest import FROM_CONFIG
from lightning_rlhf.models.roles import REWARD
from lightning_rlhf.rewards.config import ModelConfig
from lightning_rlhf.rewards.learned import Features, TextModel, TextReward
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.paths import CONF
from lightning_rlhf.stages.reward_section import read_reward
from lightning_rlhf.stages.trained import trained_as

if TYPE_CHECKING:  # its imports are in the extra "serve"
    from lightning_rlhf.rewards.server import Columns, Messages, Score

NOT_SERVED = ("kind", "name_or_path", "weight", "clip", "format_check", "format_tolerance", "unfit")
"""Keys of conf/reward/model.yaml that belong to the run that asks a server."""


def text_reward(
    config: ModelConfig, key: str, final: Final | None, device: torch.device
) -> TextReward:
    """Load and return the reward model of a checked `config`, the section `key`.

    final: local folder of the model; None for one from the hub.
    """
    final = final or found(config, key)
    on = torch.device(config.device) if config.device else device
    load = partial(own_model, final) if final.manifest is not None else classifier_model
    model, there = load(config, key, on)
    limit = min((n for n in (there, config.max_tokens) if n is not None), default=None)
    mean, std = final.reward_moments() if config.normalization == "stored" else (0.0, 1.0)
    batch_size = MicrobatchSize(f"{key}.batch_size", config.batch_size)
    return TextReward(model, mean, std, config.uncertainty_coef, batch_size, limit, key)


def found(config: ModelConfig, key: str) -> Final:
    """Return the folder of a reward model, downloaded from the hub where it is not local."""
    key = f"{key}.name_or_path"
    return find(str(local_folder(config.name_or_path, key, config.revision)), key)


def check_text_reward(config: ModelConfig, key: str, final: Final | None) -> None:
    """Raise an RLHFError for errors known before weights load; arguments as for `text_reward`."""
    final = final or found(config, key)
    if final.manifest is not None:
        check_own(final, config, key)
        return
    if config.normalization == "stored":
        raise ConfigError(
            f"{key}.normalization is 'stored', but {config.name_or_path} was not trained by "
            "stage=rm, which measures mean and deviation; allowed: none, running"
        )
    require(config.uncertainty_coef == 0, f"{key}.uncertainty_coef", config.uncertainty_coef,
            f"0, since {config.name_or_path} is no ensemble of stage=rm")  # fmt: skip
    check_classifier(final.path, config, key)


def check_own(final: Final, config: ModelConfig, key: str) -> None:
    """Raise ConfigError where an option does not fit a reward model of stage=rm."""
    for name in ("revision", "tokenizer", "chat_template", "label"):
        value = getattr(config, name)
        if value is not None:
            raise ConfigError(
                f"{key}.{name} is {value!r}, but {final.path} was written by stage=rm and brings "
                "its own; allowed: null"
            )
    manifest = final.require_manifest("rm")
    trained_as(final)
    require(config.quantization == "none" or manifest.base != FROM_CONFIG, f"{key}.quantization",
            config.quantization, f"none, since {final.path} stands on model.from_config, which has "
            "no weights to quantise")  # fmt: skip
    if config.normalization == "stored":
        final.reward_moments()


def classifier_model(
    config: ModelConfig, key: str, device: torch.device
) -> tuple[TextModel, int | None]:
    """Load a sequence classifier of any family; returns the same as `own_model`."""
    found = load_classifier(config, key, device)
    parts = (found.encode, found.read, found.show, found.problems, found.doubts, found.starts)
    return TextModel(*parts, found.model), positions(found.model.config)


def own_model(
    final: Final, config: ModelConfig, key: str, device: torch.device
) -> tuple[TextModel, int | None]:
    """Load a reward model of stage=rm on the base and with the format that it was trained with.

    Returns: the model, and its number of positions in tokens; None where it states none.
    """
    trained, template_kwargs = trained_as(final)
    base = replace(
        trained,
        # Full fine-tuning keeps float32 weights whatever model.dtype says.
        dtype=config.dtype or (trained.dtype if final.is_adapter else "float32"),
        quantization=config.quantization,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    roles = load_reward(final, base).to(device)
    warn_of_one_head(roles, REWARD, config.uncertainty_coef, key)
    tokenizer = load_tokenizer(base, final.path)
    chat = ChatFormat(tokenizer, template_kwargs)

    def encode(row: Mapping[str, Any], response: str) -> Features:
        prompt = chat.prompt_tokens(turns(row["messages"]))
        return {"input_ids": [*prompt, *chat.response_tokens(response)]}

    def read(features: Sequence[Features]) -> Float[Tensor, "n H"]:
        tokens, mask = pad([one["input_ids"] for one in features], chat.pad_token_id, "right")
        with torch.autocast(device.type, enabled=False):
            return roles.rewards(tokens.to(device), mask.to(device))

    longest = positions(roles.causal_lm.config)
    return TextModel(encode, read, chat.show, module=roles, role=REWARD), longest


def text_scorer(source: str, overrides: Sequence[str]) -> Score:
    """Return the score function of a server: the reward at a folder or hub id, on a GPU if any.

    Scores are standardised for a `final/` of stage=rm, which has mean and deviation; else raw.
    Prints the verdict of the model's fitness report, where it has one.
    overrides: `reward.KEY=VALUE`, keys of conf/reward/model.yaml that set how the model reads text.
    """
    final = find(str(local_folder(source, "final", None)), "final")
    for word in overrides:
        require(re.match(r"reward\.\w+=", word) is not None, "an option", word, "reward.KEY=VALUE")
        key = word.partition("=")[0]
        if key.removeprefix("reward.") in NOT_SERVED:
            raise ConfigError(f"{key} is given, but a server does not read it; allowed: in the run "
                              "that asks, with reward=http or reward=model")  # fmt: skip
    tree = OmegaConf.merge(
        {"reward": OmegaConf.load(CONF / "reward" / "model.yaml")},
        {"reward": {"name_or_path": str(final.path)}},
        {"reward": {"normalization": "stored" if final.manifest else "none"}},
        OmegaConf.from_dotlist(list(overrides)),
    )
    (config,) = read_reward(OmegaConf.to_container(tree.reward)).values()
    assert isinstance(config, ModelConfig)
    require(config.normalization != "running", "reward.normalization", "running",
            "none, stored: to a server every request is the first")  # fmt: skip
    check_text_reward(config, "reward", final)
    if final.verdict is not None:
        advice = " It is served all the same." * final.verdict.is_unfit
        print_line(f"reward {final.path}: {final.verdict.words}{advice}", final.verdict.style)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with Working("loading the reward model"):
        reward = text_reward(config, "reward", final, device)

    def score(prompts: list[Messages], responses: list[str], columns: Columns) -> list[float]:
        rows = [prompt_row(turns(prompt)) for prompt in prompts]
        return reward.score(rows, responses).tolist() if responses else []

    return score


def turns(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return the turns of a row as the chat template takes them."""
    return tuple(map(Message.of, messages))
