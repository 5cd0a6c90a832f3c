"""A reward model that reads text, here one that adds up its tokens: the letters' codes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.rewards.weighted import Features, TextModel, TextReward

from .conftest import make_replies


class Letters(TextModel):
    """Reads "prompt>response" as one token a letter; keeps which texts it was given at once."""

    def __init__(self) -> None:
        self.read_at_once: list[list[str]] = []
        self.had_gradients = False

    def encode(self, row: Any, response: str) -> Features:
        tokens = [ord(letter) for letter in f"{row['prompt']}>{response}"]
        return {"input_ids": tokens, "places": list(range(len(tokens)))}

    def read(self, features: Sequence[Features]) -> Tensor:
        self.had_gradients |= torch.is_grad_enabled()
        self.read_at_once.append([self.show(one["input_ids"]) for one in features])
        return torch.tensor([[sum(one["input_ids"])] for one in features], dtype=torch.bfloat16)

    def show(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def reward(letters: Letters, **changes: Any) -> TextReward:
    size = MicrobatchSize("reward.batch_size", 2)
    return replace(TextReward(letters, 0, 1, 0, size, 9, "reward.components.a"), **changes)


# "p>" is 112 + 62 = 174; "!" 33, " " 32.
REPLIES = make_replies(("p", "!!!!"), ("p", "!"), ("p", " !!"), ("p", ""), ("p", "!!"))
SUMS = [306, 207, 272, 174, 240]  # all of them exact in bf16's 8 bits


def test_the_order_is_that_of_the_replies_whatever_is_read_at_once() -> None:
    batches = {
        1: [["p>"], ["p>!"], ["p>!!"], ["p> !!"], ["p>!!!!"]],
        2: [["p>", "p>!"], ["p>!!", "p> !!"], ["p>!!!!"]],
        7: [["p>", "p>!", "p>!!", "p> !!", "p>!!!!"]],
    }
    for batch_size, expected in batches.items():
        letters = Letters()
        found = reward(letters, batch_size=MicrobatchSize("k", batch_size))(REPLIES)
        assert found.dtype == torch.float32
        assert found.tolist() == SUMS
        assert letters.read_at_once == expected
        assert not letters.had_gradients


def test_a_long_dialogue_loses_its_beginning_and_that_is_said_once() -> None:
    letters = Letters()
    model = reward(letters, max_tokens=5, batch_size=MicrobatchSize("k", 3))
    long = make_replies(("abc", "d!"), ("p", "!!!"), ("abcd", "!"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        # c + d + ">" + "!" + b = 99 + 100 + 62 + 33 + 98 = 392, exact as 49 * 8;
        # "p>!!!" = 174 + 99 = 273, in bf16 (steps of 2 from 256 on) 272; "bcd>!" = 392.
        assert model(long).tolist() == [392, 272, 392]
    assert letters.read_at_once == [["bc>d!", "p>!!!", "bcd>!"]]
    assert [str(warning.message) for warning in caught] == [
        "reward.components.a: dialogues of more than max_tokens=5 tokens lose their beginning "
        "before the reward model reads them"
    ]


def test_start_tokens_stay_where_some_models_read() -> None:
    class Starting(Letters):
        def starts(self, tokens: Sequence[int]) -> int:
            return 2

    letters, row = Starting(), make_replies(("[CLS]ab", "!")).rows[0]
    with pytest.warns(UserWarning, match="max_tokens=4"):
        found = reward(letters, max_tokens=4).encode(row, "!")
    assert letters.show(found["input_ids"]) == "[C>!"
