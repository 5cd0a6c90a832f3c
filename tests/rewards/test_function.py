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


def recorded(**arguments: Any) -> tuple[list[dict[str, Any]], FunctionReward]:
    """A function that takes everything, and what it was given."""
    calls: list[dict[str, Any]] = []

    def function(prompts: Any, responses: Any, **others: Any) -> list[float]:
        calls.append({"prompts": prompts, "responses": responses, **others})
        return [1.0] * len(responses)

    return calls, FunctionReward(function, arguments, NAME)


def reward(function: Callable[..., Any], **arguments: Any) -> FunctionReward:
    return FunctionReward(function, arguments, NAME)


def test_texts_columns_and_arguments_are_given() -> None:
    calls, source = recorded(scale=2)
    assert source(REPLIES) == [1.0, 1.0]
    assert calls == [
        {
            "prompts": ["2+2?", "3+3?"],
            "responses": ["4", "seven"],
            "messages": [messages("2+2?"), messages("3+3?")],
            "answer": ["4", "6"],
            "hint": [None, "even"],
            "scale": 2,
        }
    ]


def test_a_column_that_no_row_of_the_batch_has_is_none() -> None:
    calls, source = recorded()
    source.for_columns(["prompt", "messages", "label"])(make_replies(("p", "r"), ("q", "s")))
    assert calls[0]["label"] == [None, None]
    assert "prompt" not in calls[0]


def test_a_function_that_fails_is_named_with_its_first_texts() -> None:
    def mine(prompts: Any, responses: Any) -> list[float]:
        return [float(response) for response in responses]

    with pytest.raises(RewardError) as found:
        reward(mine)(make_replies(("a" * 1000, "four"), ("q", "s")))
    told = str(found.value)
    assert told.startswith(f"{NAME}: the function ")
    line = mine.__code__.co_firstlineno + 1
    assert f'mine fails at test_function.py:{line}: ValueError("could not convert' in told
    assert "the first of 2 prompts is 'aaa" in told
    assert told.endswith("its response 'four'; debug=true shows the traceback")
    assert len(told) < 660


def test_a_function_that_refuses_its_arguments_is_a_fault_of_the_configuration() -> None:
    source = reward(length_band, shortest=3, longest=2)
    with pytest.raises(
        ConfigError, match=rf"{NAME}: the function length_band refuses: longest is 2"
    ):
        source(REPLIES)


# The signature, before anything is asked


def takes_answer(prompts: Any, responses: Any, answer: Any, *, scale: float = 1) -> list[float]:
    return [scale] * len(responses)


def test_a_parameter_that_nothing_gives_is_named() -> None:
    message = (
        rf"{NAME}: the function takes_answer cannot be called: missing a required argument: "
        rf"'answer', neither in "
        rf"{NAME}.arguments \(scale\) nor a column of the data \(label\) nor messages"
    )
    source = reward(takes_answer, scale=2)
    with pytest.raises(ConfigError, match=message):
        source.for_columns(["prompt", "messages", "label"])
    with pytest.raises(ConfigError, match=message):
        source(make_replies(("p", "r"), label=[1]))
    assert source.for_columns(["answer"])(REPLIES) == [2, 2]
    reward(takes_answer, answer=["4", "6"]).for_columns([])


def test_an_argument_that_is_not_taken_is_named() -> None:
    with pytest.raises(ConfigError) as found:
        reward(takes_answer, scael=2)
    told = str(found.value)
    assert told.startswith(f"{NAME}.arguments has 'scael', but {NAME}: the function takes_answer")
    assert told.endswith("allowed: answer, scale")
    with pytest.raises(ConfigError, match="arguments has 'responses'"):
        reward(lambda prompts, responses, **others: [], responses=1)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (lambda responses: [], r"\(responses\)"),
        (lambda responses, prompts: [], r"\(responses, prompts\)"),
    ],
)
def test_a_function_takes_prompts_and_responses(function: Any, signature: str) -> None:
    allowed = r"allowed: \(prompts, responses, \.\.\.\)"
    with pytest.raises(ConfigError, match=f"takes {signature}; {allowed}"):
        reward(function)


def test_ctrl_c_in_a_function_is_ctrl_c() -> None:
    def score(prompts: list[str], responses: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FunctionReward(score, {}, "reward")(make_replies(("p", "r")))
