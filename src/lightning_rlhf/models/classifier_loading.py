"""Loading of a sequence classifier from a folder or hub id, with checks of its options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from lightning_rlhf.core.classifier_config import PAIR, ClassifierConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.models.classifier import Classifier
from lightning_rlhf.models.loading import (
    local_folder,
    naming,
    read_weights,
)
from lightning_rlhf.models.weights import check_references, check_weights


def load_classifier(config: ClassifierConfig, key: str, device: torch.device) -> Classifier:
    """Return the reward model, frozen.

    key: configuration key of the model's section, for error messages.

    Raises:
        CheckpointError, HubError: the model cannot be loaded, or lacks the weights of its head.
        ConfigError: an option does not fit the model.
    """
    source = config.name_or_path
    folder = local_folder(source, f"{key}.name_or_path", config.revision)
    own, reader = check_classifier(folder, config, key)
    stored = own.dtype or torch.float32
    kept = stored if config.dtype is None else getattr(torch, config.dtype)
    model = read_weights(
        AutoModelForSequenceClassification,
        folder,
        config,
        kept,
        source,
        f"{key}.name_or_path",
        **({} if config.quantization == "none" else {"device_map": {"": device}}),
    )
    if config.quantization == "none":
        model.to(device)
    model.eval().requires_grad_(False)
    index = check_label(own, config.label, folder, key)
    return Classifier(model, reader, label=index, pair=config.chat_template == PAIR)


def check_classifier(
    folder: Path, config: ClassifierConfig, key: str
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Return configuration and tokenizer of the reward model in `folder`, without its weights.

    Raises the errors of `load_classifier`; one ConfigError names all options that do not fit.
    """
    check_references(folder / "config.json")
    with naming(str(folder), f"{key}.name_or_path"):
        own = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    faults: list[str] = []
    with collected(faults):
        check_label(own, config.label, folder, key)
    with collected(faults):
        check_length(own, config.max_tokens, key)
    with collected(faults):
        reader = load_reader(folder, config, key)
    if faults:
        raise ConfigError("; and ".join(faults))
    check_weights(folder)
    return own, reader


@contextlib.contextmanager
def collected(faults: list[str]) -> Iterator[None]:
    """Append the message of a ConfigError raised in the block to `faults`, and suppress it."""
    try:
        yield
    except ConfigError as error:
        faults.append(str(error))


def check_label(config: PretrainedConfig, label: int | str | None, folder: Path, key: str) -> int:
    """Return the index of the output that is the reward.

    label: index or name of the output; None where the model has a single one.

    Raises:
        CheckpointError: the model is no sequence classifier.
        ConfigError: `label` is not an output, or is None and the model has several.
    """
    kinds = config.architectures or []
    if kinds and not any("SequenceClassification" in kind for kind in kinds):
        raise CheckpointError(
            f"{folder} is a {kinds[0]}, which has no reward head; allowed: a model for sequence "
            "classification, or the final/ folder of a stage=rm run"
        )
    count = config.num_labels
    names = {name: index for index, name in config.id2label.items()}
    allowed = f"0 to {count - 1} or {', '.join(names)}, the outputs of {folder}"
    if label is None:
        require(count == 1, f"{key}.label", None, allowed)
        return 0
    if isinstance(label, str):
        require(label in names, f"{key}.label", label, allowed)
        return names[label]
    require(label < count, f"{key}.label", label, allowed)
    return label


def positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions of the model, in tokens; None where it is not stated."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is not None and "roberta" in config.model_type:  # starts after pad_token_id
        limit -= text.pad_token_id + 1
    return limit


def check_length(config: PretrainedConfig, max_tokens: int | None, key: str) -> None:
    """Raise ConfigError where `max_tokens` is larger than the model's number of positions."""
    limit = positions(config)
    fits = limit is None or max_tokens is None or max_tokens <= limit
    require(fits, f"{key}.max_tokens", max_tokens,
            f"null, or at most {limit}, the model's max_position_embeddings")  # fmt: skip


def load_reader(folder: Path, config: ClassifierConfig, key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the reward model in `folder`, with the configured chat template.

    Raises ConfigError where there is no chat template to use.
    """
    source, chat_template = config.tokenizer or str(folder), config.chat_template
    there = local_folder(source, f"{key}.tokenizer", None)
    with naming(source, f"{key}.tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(there, trust_remote_code=config.trust_remote_code)
    if chat_template not in (None, PAIR):
        file = Path(os.path.expanduser(str(chat_template)))
        if not file.is_file():
            raise ConfigError(
                f"{key}.chat_template is {chat_template!r}, and there is no such file; allowed: a "
                f"Jinja file, {PAIR}, null for the tokenizer's own"
            )
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    if tokenizer.chat_template is None and chat_template != PAIR:
        raise ConfigError(
            f"{key}.chat_template is null, but the tokenizer of {source} has none; allowed: a "
            f"Jinja file that writes dialogues as the model was trained on, or {PAIR} for "
            "tokenizer(prompt, response)"
        )
    return tokenizer
