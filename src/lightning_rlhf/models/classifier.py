"""Sequence classifiers of any family as reward models, with their own tokenizer and template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.core.config import PAIR, ClassifierConfig
from lightning_rlhf.core.errors import CheckpointError, RewardError, require
from lightning_rlhf.models import checkpoint, loading


@dataclass(frozen=True, eq=False)
class Classifier:
    """A reward model: one output of a sequence classifier, computed for a dialogue."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    label: int
    """Index of the output that is the reward."""
    pair: bool
    """True if prompt and response are encoded as a pair of texts, without chat template."""

    def encode(self, row: Mapping[str, Any], response: str) -> Mapping[str, list[int]]:
        """Return the dialogue as input_ids and what else the tokenizer gives to the model."""
        if self.pair:
            return dict(self.tokenizer(row["prompt"], response))
        # The template writes the special tokens; the tokenizer must not add them again.
        text = self._written(row, response)
        return {"input_ids": self.tokenizer(text, add_special_tokens=False).input_ids}

    def _written(self, row: Mapping[str, Any], response: str) -> str:
        """Return the dialogue rendered by the chat template. Raises RewardError where it fails."""
        messages = [*row["messages"], {"role": "assistant", "content": response}]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template is a program: it may fail in any way
            turns = ", ".join(turn["role"] for turn in messages)
            raise RewardError(
                f"the chat template of {self.tokenizer.name_or_path} refuses a dialogue with the "
                f"turns {turns}: {error}"
            ) from error

    def read(self, features: Sequence[Mapping[str, list[int]]]) -> Float[torch.Tensor, "n 1"]:
        """Return the raw reward of each dialogue, independent of the others in the batch."""
        pad = self.model.config.get_text_config().pad_token_id
        if pad is None and len(features) > 1:  # the output is at the last position: no padding
            return torch.cat([self.read([one]) for one in features])
        lengths = [torch.ones(len(one["input_ids"]), dtype=torch.long) for one in features]
        inputs = {"attention_mask": pad_sequence(lengths, batch_first=True)}
        for name in features[0].keys() - {"attention_mask"}:
            rows = [torch.tensor(one[name]) for one in features]
            fill = (pad or 0) if name == "input_ids" else 0
            inputs[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
        device = self.model.device
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        with torch.autocast(device.type, enabled=False):
            return self.model(**inputs).logits[:, [self.label]]

    def show(self, tokens: Sequence[int]) -> str:
        """Return the tokens decoded to text, special tokens included."""
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def starts(self, tokens: Sequence[int]) -> int:
        """Return the number of special tokens at the start."""
        special = set(self.tokenizer.all_special_ids)
        return next((i for i, token in enumerate(tokens) if token not in special), len(tokens))

    def problems(self, tokens: Sequence[int]) -> list[str]:
        """Return descriptions of errors in the tokens of a dialogue; empty if there are none."""
        start = self.tokenizer.bos_token_id
        if start is not None and list(tokens[:2]) == [start, start]:
            return [f"it starts with {self.tokenizer.bos_token!r} twice"]
        return []

    def doubts(self, row: Mapping[str, Any], response: str) -> list[str]:
        """Return descriptions of unusual behaviour of the chat template; empty if there is none.

        It is not always an error: some models are trained with such a template.
        """
        if self.pair:
            return []
        text = self._written(row, response)
        last, answer = row["messages"][-1]["content"].strip(), response.strip()
        at, end = text.find(last), text.rfind(answer)
        if at < 0:
            return ["the chat template leaves out what the user said last"]
        if end < at + len(last):
            return ["the chat template leaves out the response"]
        found = []
        if not text[at + len(last) : end].strip():
            found.append("the chat template puts nothing between the user's words and the response")
        eos = self.tokenizer.eos_token
        if eos is not None and not text[end + len(answer) :].strip():
            found.append(f"the chat template ends with the response; no {eos!r} follows")
        return found


def load_classifier(config: ClassifierConfig, key: str, device: torch.device) -> Classifier:
    """Return the reward model, frozen.

    key: configuration key of the model's section, for error messages.

    Raises:
        CheckpointError, HubError: the model cannot be loaded, or lacks the weights of its head.
        ConfigError: an option does not fit the model.
    """
    source, key_of_source = config.name_or_path, f"{key}.name_or_path"
    folder = checkpoint.local_folder(source, key_of_source, config.revision)
    own, label, reader = check_classifier(folder, config, key)
    stored = own.dtype or torch.float32
    kept = stored if config.dtype is None else getattr(torch, config.dtype)
    placed = {} if config.quantization == "none" else {"device_map": {"": device}}
    kind = transformers.AutoModelForSequenceClassification
    model = loading.read_weights(kind, folder, config, kept, source, key_of_source, **placed)
    if not placed:
        model.to(device)
    model.eval().requires_grad_(False)
    return Classifier(model, reader, label, config.chat_template == PAIR)


def check_classifier(
    folder: Path, config: ClassifierConfig, key: str
) -> tuple[PretrainedConfig, int, PreTrainedTokenizerBase]:
    """Return configuration, index of the reward and tokenizer of a model, without its weights.

    Raises the errors of `load_classifier`: CheckpointError for a model that is no sequence
    classifier, ConfigError where `label` names no single output or there is no chat template.
    """
    checkpoint.check_references(folder / "config.json")
    trusts = {"trust_remote_code": config.trust_remote_code}
    with checkpoint.naming(str(folder), f"{key}.name_or_path"):
        own = transformers.AutoConfig.from_pretrained(folder, **trusts)
    kinds = own.architectures or []
    if kinds and not any("SequenceClassification" in kind for kind in kinds):
        raise CheckpointError(
            f"{folder} is a {kinds[0]}, which has no reward head; allowed: a model for sequence "
            "classification, or the final/ folder of a stage=rm run"
        )
    count, names = own.num_labels, {name: index for index, name in own.id2label.items()}
    label = 0 if config.label is None and count == 1 else names.get(config.label, config.label)
    outputs = f"0 to {count - 1} or {', '.join(names)}, the outputs of {folder}"
    require(isinstance(label, int) and label < count, f"{key}.label", config.label, outputs)
    limit, most = positions(own), config.max_tokens
    allowed = f"null, or at most {limit}, the model's max_position_embeddings"
    fits = limit is None or most is None or most <= limit
    require(fits, f"{key}.max_tokens", most, allowed)
    source, template = config.tokenizer or str(folder), config.chat_template
    there = checkpoint.local_folder(source, f"{key}.tokenizer", None)
    with checkpoint.naming(source, f"{key}.tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(there, **trusts)
    if template not in (None, PAIR):
        file = Path(str(template)).expanduser()
        allowed = f"a Jinja file that exists, {PAIR}, null for the tokenizer's own"
        require(file.is_file(), f"{key}.chat_template", template, allowed)
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    is_known = tokenizer.chat_template is not None or template == PAIR
    none = f"since the tokenizer of {source} has none"
    allowed = f"{PAIR} for tokenizer(prompt, response), or a Jinja file of the dialogues, {none}"
    require(is_known, f"{key}.chat_template", template, allowed)
    checkpoint.check_weights(folder)
    assert isinstance(label, int)
    return own, label, tokenizer


def positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions of the model, in tokens; None where it is not stated."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is not None and "roberta" in config.model_type:  # starts after pad_token_id
        limit -= text.pad_token_id + 1
    return limit
