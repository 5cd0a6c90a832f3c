"""The client: what it sends, keeps and asks again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import (
    Answer,
    Script,
    Scripted,
    make_replies,
    make_reward,
    messages,
    scores,
    serving,
)

TEXTS = [("2+2?", "four"), ("3+3?", "sechs 🎈"), ("Größe?", ""), ("4+4?", "\u2028eight\ud83d")]


def lengths(k: int, request: Mapping[str, Any]) -> Answer:
    """Of prompt and response together, in characters."""
    pairs = zip(request["prompts"], request["responses"], strict=True)
    return scores(*(len(p[0]["content"]) + len(r) for p, r in pairs))


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody sleeps; how long they wanted to."""
    wanted: list[float] = []
    stub = SimpleNamespace(sleep=wanted.append, monotonic=monotonic)
    monkeypatch.setattr("lightning_rlhf.rewards.http.time", stub)
    return wanted


# What is sent


def test_a_request_holds_messages_responses_and_columns(script: Script) -> None:
    server = script(scores(1, 2.5))
    decoded = make_replies(
        ("2+2?", "4"), ("é", "\U0001f388"),
        answer=["4", None], level=[1, ...], tags=[{"a": [1]}, ()],
        raw=[b"bytes", "text"], noise=[math.nan, math.inf], gone=[None, None],
    )  # fmt: skip
    assert make_reward(server.url)(decoded) == [1.0, 2.5]
    assert server.requests == [
        {
            "prompts": [messages("2+2?"), messages("é")],
            "responses": ["4", "\U0001f388"],
            "columns": {
                "answer": ["4", None],
                "level": [1, None],
                "tags": [{"a": [1]}, []],
                "raw": [None, "text"],
            },
        }
    ]
    assert server.headers[0]["content-type"] == "application/json"


def test_secrets_are_sent(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    server = script(lengths)
    decoded = make_replies(*TEXTS)
    make_reward(server.url + "?key=word", token_env="JUDGE_TOKEN")(decoded)
    make_reward(server.url.replace("//", "//me:word@"))(decoded)
    assert server.paths == ["/score?key=word", "/score"]
    sent = [headers["authorization"] for headers in server.headers]
    assert sent == ["Bearer s3cret", "Basic bWU6d29yZA=="]


@pytest.mark.parametrize(("batch_size", "requests"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (9, [4])])
def test_the_batch_size_changes_no_score(
    script: Script, batch_size: int, requests: list[int]
) -> None:
    server = script(lengths)
    found = make_reward(server.url, batch_size=batch_size)(make_replies(*TEXTS))
    # characters: 4 + 4, 4 + 7, 6 + 0, 4 + 7 (half an emoji is one)
    assert found == [8, 11, 6, 11]
    assert [len(request["responses"]) for request in server.requests] == requests


# What is kept


def asked(server: Scripted) -> list[str]:
    return [response for request in server.requests for response in request["responses"]]


def test_nothing_is_asked_twice(script: Script) -> None:
    server = script(lengths)
    reward = make_reward(server.url)
    batch = make_replies(("p", "a"), ("p", "bb"), ("p", "a"))
    assert reward(batch) == [2, 3, 2]
    assert reward(batch) == [2, 3, 2]
    assert reward(make_replies(("p", "ccc"), ("p", "bb"))) == [4, 3]
    assert asked(server) == ["a", "bb", "ccc"]


def test_what_differs_is_asked(script: Script) -> None:
    server = script(lengths)
    reward = make_reward(server.url)
    texts = [("p", "a"), ("pp", "a"), ("p", "a"), ("p", "a")]
    reward(make_replies(*texts, answer=[..., ..., "1", 1]))
    assert asked(server) == ["a"] * 4
    # A column that is not sent makes no difference, nor does null against none.
    reward(make_replies(("p", "a"), ("p", "a"), raw=[b"bytes", ...], answer=[None, ...]))
    assert asked(server) == ["a"] * 4


def test_what_was_wanted_longest_ago_is_forgotten(script: Script) -> None:
    server = script(lengths)
    reward = make_reward(server.url, cache_size=2)
    for response in ("a", "b", "a", "c", "a", "b"):
        reward(make_replies(("p", response)))
    # c pushes b out, since a was wanted after b; then b is asked again
    assert asked(server) == ["a", "b", "c", "b"]


# What is asked again


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_server_in_trouble_is_asked_again(script: Script, status: int) -> None:
    server = script((status, {}, b""), (status, {}, b"busy"), scores(3))
    assert make_reward(server.url, retries=2)(make_replies(("p", "r"))) == [3]


def test_the_pause_doubles(script: Script, naps: list[float]) -> None:
    server, told = script(*[(500, {}, b"")] * 4, scores(3)), list[str]()
    reward = make_reward(server.url, retries=4, backoff_s=0.5, warn=told.append)
    reward(make_replies(("p", "r")))
    assert naps == [0, 1, 2, 4]  # none after the first try, then 0.5 * 2^1, 2^2, 2^3
    line = f"reward: the server {server.url} answered 500; try"
    assert told == [f"{line} {k} of 5 in {s} s" for k, s in ((2, 0), (3, 1), (4, 2), (5, 4))]


def test_a_server_may_say_how_long_to_wait(script: Script, naps: list[float]) -> None:
    later = {"retry-after": "7"}
    server, told = script((429, later, b""), (503, later, b""), (500, {}, b""), scores(3)), []
    make_reward(server.url, backoff_s=0.5, warn=told.append)(make_replies(("p", "r")))
    assert naps == [7, 7, 2]
    assert [line.rpartition(" in ")[2] for line in told] == ["7 s", "7 s", "2 s"]


@pytest.mark.parametrize("later", ["soon", "9" * 5000, "Mon, 99 Foo 0000"])
def test_a_wait_that_cannot_be_read_is_no_wait(
    script: Script, naps: list[float], later: str
) -> None:
    server = script(*[(429, {"retry-after": later}, b"")] * 2, scores(3))
    assert make_reward(server.url, backoff_s=0.5)(make_replies(("p", "r"))) == [3]
    assert naps == [0, 1]


def test_a_server_that_was_started_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        with serving(by_length) as first:
            reward, port = make_reward(first.url, backoff_s=1.0), first.port
            assert reward(make_replies(("p", "a"))) == [1]

        def sleep(seconds: float) -> None:
            if seconds:
                stack.enter_context(serving(by_length, port))

        stub = SimpleNamespace(sleep=sleep, monotonic=monotonic)
        monkeypatch.setattr("lightning_rlhf.rewards.http.time", stub)
        assert reward(make_replies(("p", "a"), ("p", "bb"))) == [1, 2]


def by_length(prompts: Any, responses: Any, columns: Any) -> list[float]:
    return [len(response) for response in responses]
