"""Sequence classifiers as reward models: of any family, with their own tokenizer and template."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_rlhf.core.config import require
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RewardError
from lightning_rlhf.models.config import DType, Quantization
from lightning_rlhf.models.loading import (
    leave_unpacked,
    local_folder,
    naming,
    quantization_config,
)
from lightning_rlhf.models.weights import check_weights

PAIR = "pair"
"""As a chat template: tokenizer(prompt, response)."""


class Classifier:
    """A reward model that says one number, or one of several, of a dialogue."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, label: int, pair: bool
    ) -> None:
        """pair: prompt and response are the two texts of a pair, and no chat template is used."""
        self.model = model
        self.tokenizer = tokenizer
        self.label = label
        self.pair = pair

    def encode(self, row: Mapping[str, Any], response: str) -> Mapping[str, list[int]]:
        """The dialogue in the model's own form."""
        if self.pair:
            return dict(self.tokenizer(row["prompt"], response))
        # The template writes the special tokens; the tokenizer must not add them again.
        return {"input_ids": list(self._written(row, response, tokenize=True, return_dict=False))}

    def _written(self, row: Mapping[str, Any], response: str, **form: bool) -> Any:
        """The dialogue as the chat template writes it."""
        messages = [*row["messages"], {"role": "assistant", "content": response}]
        try:
            return self.tokenizer.apply_chat_template(messages, **form)
        except Exception as error:  # a template is a program: it may fail in any way
            turns = ", ".join(turn["role"] for turn in messages)
            raise RewardError(
                f"the chat template of {self.tokenizer.name_or_path} refuses a dialogue with the "
                f"turns {turns}: {error}"
            ) from error

    def read(self, features: Sequence[Mapping[str, list[int]]]) -> Float[Tensor, "n 1"]:
        """The raw number of each, whatever is read together."""
        pad = self.model.config.get_text_config().pad_token_id
        if pad is None:  # the model reads at the last position, which padding must not take
            return torch.cat([self._forward([one], 0) for one in features])
        return self._forward(features, pad)

    def _forward(
        self, features: Sequence[Mapping[str, list[int]]], pad: int
    ) -> Float[Tensor, "n 1"]:
        longest = max(len(one["input_ids"]) for one in features)
        batch = {
            name: [[*one[name], *[pad if name == "input_ids" else 0] * (longest - len(one[name]))]
                   for one in features]
            for name in features[0]
            if name != "attention_mask"
        }  # fmt: skip
        batch["attention_mask"] = [
            [1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"]))
            for one in features
        ]
        device = self.model.device
        tensors = {name: torch.tensor(rows, device=device) for name, rows in batch.items()}
        with torch.autocast(device.type, enabled=False):
            return self.model(**tensors).logits[:, [self.label]]

    def show(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones visible."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def starts(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start are special."""
        special = set(self.tokenizer.all_special_ids)
        return next((i for i, token in enumerate(tokens) if token not in special), len(tokens))

    def problems(self, tokens: Sequence[int]) -> list[str]:
        """What is wrong with the tokens of a dialogue, in words."""
        start = self.tokenizer.bos_token_id
        if start is not None and list(tokens[:2]) == [start, start]:
            return [f"it starts with {self.tokenizer.bos_token!r} twice"]
        return []

    def doubts(self, row: Mapping[str, Any], response: str) -> list[str]:
        """What a chat template seldom does, in words; some are made that way."""
        if self.pair:
            return []
        text: str = self._written(row, response, tokenize=False)
        said, answer = row["messages"][-1]["content"].strip(), response.strip()
        at, end = text.find(said), text.rfind(answer)
        if at < 0:
            return ["the chat template leaves out what the user said last"]
        if end < at + len(said):
            return ["the chat template leaves out the response"]
        found = []
        if not text[at + len(said) : end].strip():
            found.append("the chat template puts nothing between the user's words and the response")
        if self.tokenizer.eos_token is not None and not text[end + len(answer) :].strip():
            found.append(
                f"the chat template ends with the response; no {self.tokenizer.eos_token!r} follows"
            )
        return found


def load_classifier(
    source: str,
    key: str,
    *,
    revision: str | None,
    tokenizer: str | None,
    chat_template: str | None,
    label: int | str | None,
    dtype: DType | None,
    quantization: Quantization,
    attn_implementation: str | None,
    trust_remote_code: bool,
    max_tokens: int | None,
    device: torch.device,
) -> Classifier:
    """The reward model at a folder or hub id, frozen; `key` is where the configuration names it.

    Raises:
        CheckpointError, HubError: it cannot be loaded, or lacks the weights of its head.
        ConfigError: an option does not fit it.
    """
    folder = local_folder(source, f"{key}.name_or_path", revision)
    config, reader = check_classifier(
        folder,
        key,
        tokenizer=tokenizer,
        chat_template=chat_template,
        label=label,
        trust_remote_code=trust_remote_code,
        max_tokens=max_tokens,
    )
    stored = config.dtype or torch.float32
    kept = stored if dtype is None else getattr(torch, dtype)
    with naming(source, f"{key}.name_or_path"):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=kept,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            quantization_config=quantization_config(quantization, kept),
            **({} if quantization == "none" else {"device_map": {"": device}}),
        )
    if info["missing_keys"]:
        raise CheckpointError(
            f"{source} lacks weights: {', '.join(sorted(info['missing_keys'])[:5])}; they would be "
            "random"
        )
    leave_unpacked(model)
    if quantization == "none":
        model.to(device)
    model.eval().requires_grad_(False)
    index = check_label(config, label, folder, key)
    return Classifier(model, reader, label=index, pair=chat_template == PAIR)


def check_classifier(
    folder: Path,
    key: str,
    *,
    tokenizer: str | None,
    chat_template: str | None,
    label: int | str | None,
    trust_remote_code: bool,
    max_tokens: int | None,
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer of the reward model in `folder`, without its weights.

    Raises as `load_classifier`, one error for all options that do not fit.
    """
    with naming(str(folder), f"{key}.name_or_path"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    faults: list[str] = []
    with collected(faults):
        check_label(config, label, folder, key)
    with collected(faults):
        check_length(config, max_tokens, key)
    with collected(faults):
        reader = load_reader(tokenizer or str(folder), chat_template, key, trust_remote_code)
    if faults:
        raise ConfigError("; and ".join(faults))
    check_weights(folder)
    return config, reader


@contextlib.contextmanager
def collected(faults: list[str]) -> Iterator[None]:
    """A ConfigError inside is put with the others, to be told together."""
    try:
        yield
    except ConfigError as error:
        faults.append(str(error))


def check_label(config: PretrainedConfig, label: int | str | None, folder: Path, key: str) -> int:
    """Which output is the reward. Raises where that is not clear."""
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
    """How many tokens the model has positions for, where it says that."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is not None and "roberta" in config.model_type:  # counts from behind its padding
        limit -= text.pad_token_id + 1
    return limit


def check_length(config: PretrainedConfig, max_tokens: int | None, key: str) -> None:
    """Raise ConfigError where the model has fewer positions than it may be given tokens."""
    limit = positions(config)
    fits = limit is None or max_tokens is None or max_tokens <= limit
    require(fits, f"{key}.max_tokens", max_tokens,
            f"null, or at most {limit}, the model's max_position_embeddings")  # fmt: skip


def load_reader(
    source: str, chat_template: str | None, key: str, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """The reward model's tokenizer, with the chat template that it is to use."""
    folder = local_folder(source, f"{key}.tokenizer", None)
    with naming(source, f"{key}.tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
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
