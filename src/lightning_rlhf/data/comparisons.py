"""Rows of well-known data sets of compared, scored and labelled responses."""

from __future__ import annotations

import math
import re
from typing import Any

from lightning_rlhf.data.fields import flag_in, number_in, text_in, user_turn
from lightning_rlhf.data.instructions import completion_demonstration
from lightning_rlhf.data.native import parse_preference, preference, prompt_of
from lightning_rlhf.data.parsing import (
    BadRow,
    Row,
    UnusedRow,
    check_prompt,
    dialogue,
    has,
    messages_in,
    split_last,
)
from lightning_rlhf.data.rows import Demonstration, Messages, Preference, Prompt, Scored

_STEER_TURN = re.compile(r"\n*<extra_id_1>(User|Assistant)\n")
"""Start of a turn after the first in a prompt of HelpSteer2."""
TIE = "the two responses have the same score"
"""Reason for leaving out a pair without a preference."""


# UltraFeedback, binarised: {"prompt", "chosen", "rejected", "score_chosen", "score_rejected"}


def _without_prompt(row: Row) -> Row:
    """Return the row without its prompt where its responses are whole dialogues."""
    sides = (row["chosen"], row["rejected"])
    if all(isinstance(side, list) and len(side) > 1 for side in sides):
        return {key: value for key, value in row.items() if key != "prompt"}
    return row


def ultrafeedback_demonstration(row: Row) -> Demonstration:
    """Parse the chosen side."""
    return Demonstration(*split_last(dialogue(_without_prompt(row), "chosen"), "chosen"))


def ultrafeedback_preference(row: Row) -> Preference:
    """Parse both sides; the margin is the difference of their scores."""
    margin = number_in(row, "score_chosen") - number_in(row, "score_rejected")
    if margin < 0:
        raise BadRow("score_chosen is below score_rejected")
    if margin == 0:
        raise UnusedRow(TIE)
    pair = parse_preference(_without_prompt(row))
    return Preference(pair.prompt, pair.chosen, pair.rejected, margin)


# SHP: {"history", "human_ref_A", "human_ref_B", "labels", "score_ratio"}; labels 1: A is preferred


def shp_preference(row: Row) -> Preference:
    """Parse a pair of comments; the margin is the logarithm of the ratio of their scores."""
    sides = (text_in(row, "human_ref_A"), text_in(row, "human_ref_B"))
    chosen, rejected = sides if flag_in(row, "labels") else sides[::-1]
    margin = None
    if has(row, "score_ratio"):
        ratio = number_in(row, "score_ratio")
        margin = math.log(ratio) if ratio >= 1 else None
    return preference(user_turn(text_in(row, "history")), chosen, rejected, margin)


def shp_demonstration(row: Row) -> Demonstration:
    """Parse the preferred comment."""
    pair = shp_preference(row)
    return Demonstration(pair.prompt, pair.chosen)


def shp_prompt(row: Row) -> Prompt:
    """Parse the post."""
    return prompt_of(user_turn(text_in(row, "history")), row)


# TL;DR: {"info": {...}, "summaries": [{"text"}, {"text"}], "choice"} or
# {"subreddit", "title", "post", "summary"}


def _post(fields: Any) -> Messages:
    """Return the request of Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix B."""
    if not isinstance(fields, dict):
        raise BadRow("field 'info' is no object", f"found {type(fields).__name__}")
    subreddit, title, post = (text_in(fields, name) for name in ("subreddit", "title", "post"))
    name = f"r/{subreddit.removeprefix('r/')}"
    return user_turn(f"SUBREDDIT: {name}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:")


def tldr_preference(row: Row) -> Preference:
    """Parse {"info", "summaries", "choice"}; choice: position of the preferred summary."""
    summaries, choice = row["summaries"], flag_in(row, "choice")
    if not isinstance(summaries, list) or len(summaries) != 2 or not all(
        isinstance(summary, dict) for summary in summaries
    ):  # fmt: skip
        raise BadRow("field 'summaries' is not two objects {\"text\"}")
    chosen, rejected = (text_in(summaries[i], "text") for i in (choice, not choice))
    return preference(_post(row["info"]), chosen, rejected, None)


def tldr_compared_prompt(row: Row) -> Prompt:
    """Parse {"info"}."""
    return prompt_of(_post(row["info"]), row)


def tldr_demonstration(row: Row) -> Demonstration:
    """Parse {"subreddit", "title", "post", "summary"}."""
    return Demonstration(_post(row), text_in(row, "summary").strip())


def tldr_prompt(row: Row) -> Prompt:
    """Parse {"subreddit", "title", "post"}."""
    return prompt_of(_post(row), row)


# HelpSteer: {"prompt", "response", "helpfulness"}, or two responses and a preference, below 0 where
# the first is better


def _steer_messages(row: Row) -> Messages:
    first, *rest = _STEER_TURN.split(text_in(row, "prompt"))
    turns = [{"role": "user", "content": first}]
    turns += [
        {"role": role.lower(), "content": text}
        for role, text in zip(rest[::2], rest[1::2], strict=True)
    ]
    return messages_in(turns, "prompt")


def helpsteer_demonstration(row: Row) -> Demonstration:
    """Parse {"prompt", "response"}."""
    return Demonstration(_steer_messages(row), text_in(row, "response"))


def helpsteer_scored(row: Row) -> Scored:
    """Parse {"prompt", "response", "helpfulness"}."""
    found = helpsteer_demonstration(row)
    score = number_in(row, "helpfulness")
    return Scored(found.prompt, found.response, score, is_graded=True)


def helpsteer_prompt(row: Row) -> Prompt:
    """Parse {"prompt"}."""
    return prompt_of(_steer_messages(row), row)


def _compared(row: Row, prompt: Messages, sides: tuple[str, str], strength: float) -> Preference:
    if strength == 0:
        raise UnusedRow(TIE)
    better, worse = sides if strength < 0 else sides[::-1]
    return preference(prompt, text_in(row, better), text_in(row, worse), abs(strength))


def helpsteer2_preference(row: Row) -> Preference:
    """Parse {"prompt", "response_1", "response_2", "preference_strength"}."""
    strength = number_in(row, "preference_strength")
    return _compared(row, _steer_messages(row), ("response_1", "response_2"), strength)


def helpsteer3_preference(row: Row) -> Preference:
    """Parse {"context", "response1", "response2", "overall_preference"}."""
    strength = number_in(row, "overall_preference")
    prompt = messages_in(row["context"], "context")
    check_prompt(prompt)
    return _compared(row, prompt, ("response1", "response2"), strength)


def helpsteer3_prompt(row: Row) -> Prompt:
    """Parse {"context"}."""
    return prompt_of(messages_in(row["context"], "context"), row)


# KTO: {"prompt", "completion", "label"}


def kto_scored(row: Row) -> Scored:
    """Parse {"prompt", "completion", "label"}."""
    label = flag_in(row, "label")
    found = completion_demonstration(row)
    return Scored(found.prompt, found.response, float(label), is_graded=False)


def kto_demonstration(row: Row) -> Demonstration:
    """Parse a completion whose label is true."""
    if not flag_in(row, "label"):
        raise UnusedRow("its label is false")
    return completion_demonstration(row)
