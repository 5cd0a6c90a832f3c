"""Rewards that a function computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_rlhf.core.errors import ConfigError, RewardError
from lightning_rlhf.rewards.functions import FunctionReward, length_band

from .conftest import make_replies, messages

NAME = "reward.components.mine"
REPLIES = make_replies(("2+2?", "4"), ("3+3?", "seven"), answer=["4", "6"], hint=[..., "even"])


def reward(function: Callable[..., Any], **arguments: Any) -> FunctionReward:
    return FunctionReward(function, arguments, NAME)


def test_texts_columns_and_arguments_are_given() -> None:
    """A column that no row of the batch has is None."""
    calls: list[dict[str, Any]] = []

    def function(prompts: Any, responses: Any, **others: Any) -> list[float]:
        calls.append({"prompts": prompts, "responses": responses, **others})
        return [1.0] * len(responses)

    source = reward(function, scale=2).for_columns(["prompt", "messages", "label"])
    assert source(REPLIES) == [1.0, 1.0]
    asked = {"messages": [messages("2+2?"), messages("3+3?")], "answer": ["4", "6"]}
    asked |= {"prompts": ["2+2?", "3+3?"], "responses": ["4", "seven"], "hint": [None, "even"]}
    assert calls == [asked | {"label": [None, None], "scale": 2}]


def test_a_function_that_fails_is_named_with_its_first_texts() -> None:
    def mine(prompts: Any, responses: Any) -> list[float]:
        return [float(response) for response in responses]

    with pytest.raises(RewardError) as found:
        reward(mine)(make_replies(("a" * 1000, "four"), ("q", "s")))
    message = str(found.value)
    assert message.startswith(f"{NAME}: the function ")
    line = mine.__code__.co_firstlineno + 1
    assert f'mine fails at test_function.py:{line}: ValueError("could not convert' in message
    assert "the first of 2 prompts is 'aaa" in message
    assert len(message) < 660
    # One that refuses its arguments is a fault of the configuration.
    with pytest.raises(ConfigError, match="the function length_band refuses: longest is 2"):
        reward(length_band, shortest=3, longest=2)(REPLIES)


def takes_answer(prompts: Any, responses: Any, answer: Any, *, scale: float = 1) -> list[float]:
    return [scale] * len(responses)


def test_a_function_that_cannot_be_called_is_named_before_it_is() -> None:
    """With what it takes, and all that it can be given."""
    source = reward(takes_answer, scale=2)
    with pytest.raises(ConfigError) as found:
        source.for_columns(["prompt", "messages", "label"])
    message = str(found.value)
    assert message.startswith(f"{NAME}: the function takes_answer needs answer; allowed: a column")
    assert f"have label, or a value in {NAME}.arguments (" in message
    with pytest.raises(ConfigError, match="takes_answer needs answer"):
        source(make_replies(("p", "r"), label=[1]))
    assert source.for_columns(["answer"])(REPLIES) == [2, 2]
    reward(takes_answer, answer=["4", "6"]).for_columns([])
    with pytest.raises(ConfigError, match="unexpected keyword argument 'scael'"):
        reward(takes_answer, scael=2).for_columns(["answer"])
    with pytest.raises(ConfigError, match="responses come before prompts"):
        reward(lambda responses, prompts: []).for_columns([])


def test_ctrl_c_in_a_function_is_ctrl_c() -> None:
    def score(prompts: list[str], responses: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FunctionReward(score, {}, "reward")(make_replies(("p", "r")))
