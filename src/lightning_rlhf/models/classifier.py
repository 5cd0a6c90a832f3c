"""Sequence classifiers of any model family as reward models, with their own tokenizer and chat
template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.core.errors import RewardError


class Classifier:
    """A reward model: one output of a sequence classifier, computed for a dialogue."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, label: int, pair: bool
    ) -> None:
        """Store the model, its tokenizer and how a dialogue is given to them.

        label: index of the output that is the reward.
        pair: if True, prompt and response are encoded as a pair of texts, without chat template.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.label = label
        self.pair = pair

    def encode(self, row: Mapping[str, Any], response: str) -> Mapping[str, list[int]]:
        """Return the dialogue as the model's inputs: input_ids and others that the tokenizer
        gives."""
        if self.pair:
            return dict(self.tokenizer(row["prompt"], response))
        # The template writes the special tokens; the tokenizer must not add them again.
        text = self._written(row, response)
        return {"input_ids": self.tokenizer(text, add_special_tokens=False).input_ids}

    def _written(self, row: Mapping[str, Any], response: str) -> str:
        """Return the dialogue rendered by the chat template.

        Raises RewardError where the template fails.
        """
        messages = [*row["messages"], {"role": "assistant", "content": response}]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template is a program: it may fail in any way
            turns = ", ".join(turn["role"] for turn in messages)
            raise RewardError(
                f"the chat template of {self.tokenizer.name_or_path} refuses a dialogue with the "
                f"turns {turns}: {error}"
            ) from error

    def read(self, features: Sequence[Mapping[str, list[int]]]) -> Float[Tensor, "n 1"]:
        """Return the raw reward of each dialogue, independent of the others in the batch."""
        pad = self.model.config.get_text_config().pad_token_id
        if pad is None:  # the model takes its output at the last position: no padding possible
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
        """Return the tokens decoded to text, special tokens included."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

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
        if self.tokenizer.eos_token is not None and not text[end + len(answer) :].strip():
            found.append(
                f"the chat template ends with the response; no {self.tokenizer.eos_token!r} follows"
            )
        return found
