"""Sequence classifiers as reward models: of any family, with their own tokenizer and template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.core.bounded import write_dialogue
from lightning_rlhf.core.errors import ConfigError, RewardError


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
        text = self._written(row, response)
        return {"input_ids": self.tokenizer(text, add_special_tokens=False).input_ids}

    def _written(self, row: Mapping[str, Any], response: str) -> str:
        """The dialogue as the chat template writes it."""
        messages = [*row["messages"], {"role": "assistant", "content": response}]
        try:
            return write_dialogue(self.tokenizer, messages)
        except ConfigError:
            raise
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
        text = self._written(row, response)
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
