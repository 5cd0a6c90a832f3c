"""The client: what it sends, caches and asks again, and its errors without scores."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.rewards.http import ANSWER_BYTES

from . import conftest
from .conftest import Answer, Script, Scripted, make_replies, make_reward, messages, scores

TEXTS = [("2+2?", "four"), ("3+3?", "sechs 🎈"), ("Größe?", ""), ("4+4?", "\u2028eight\ud83d")]


def lengths(k: int, request: Mapping[str, Any]) -> Answer:
    """Of prompt and response together, in characters."""
    pairs = zip(request["prompts"], request["responses"], strict=True)
    return scores(*(len(p[0]["content"]) + len(r) for p, r in pairs))


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody sleeps; how long they wanted to."""
    wanted: list[float] = []
    stub = SimpleNamespace(sleep=wanted.append, monotonic=time.monotonic)
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
    columns = {"answer": ["4", None], "level": [1, None], "tags": [{"a": [1]}, []]}
    sent = {"prompts": [messages("2+2?"), messages("é")], "responses": ["4", "\U0001f388"]}
    assert server.requests == [sent | {"columns": columns | {"raw": [None, "text"]}}]
    assert server.headers[0]["content-type"] == "application/json"


def test_the_batch_size_changes_no_score(script: Script) -> None:
    for batch_size, requests in ((1, [1, 1, 1, 1]), (3, [3, 1])):
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


def test_what_was_wanted_longest_ago_is_forgotten(script: Script) -> None:
    server = script(lengths)
    reward = make_reward(server.url, cache_size=2)
    for response in ("a", "b", "a", "c", "a", "b"):
        reward(make_replies(("p", response)))
    # c pushes b out, since a was wanted after b; then b is asked again
    assert asked(server) == ["a", "b", "c", "b"]


# What is asked again


def test_the_pause_doubles(script: Script, naps: list[float]) -> None:
    server, warnings = script((408, {}, b""), *[(500, {}, b"")] * 3, scores(3)), list[str]()
    reward = make_reward(server.url, retries=4, backoff_s=0.5, warn=warnings.append)
    reward(make_replies(("p", "r")))
    assert naps == [0, 1, 2, 4]  # none after the first try, then 0.5 * 2^1, 2^2, 2^3
    line = f"reward: the server {server.url} answered 500; try"
    assert warnings[1:] == [f"{line} {k} of 5 in {s} s" for k, s in ((3, 1), (4, 2), (5, 4))]


def test_a_server_may_say_how_long_to_wait(script: Script, naps: list[float]) -> None:
    later = {"retry-after": "7"}
    server = script((429, later, b""), (503, later, b""), (500, {}, b""), scores(3))
    make_reward(server.url, backoff_s=0.5)(make_replies(("p", "r")))
    assert naps == [7, 7, 2]


# Where there are no scores to be had


REPLIES = make_replies(("2+2?", "four"), ("3+3?", "six"))


def failure(url: str, **changes: Any) -> str:
    """Texts in the errors about REPLIES."""
    reward = make_reward(url, name="reward.components.far", **{"retries": 2} | changes)
    with pytest.raises(RewardError) as found:
        reward(REPLIES)
    return str(found.value).removeprefix("reward.components.far: the server ")


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address that is taken, where no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/score"


ALLOWED = '; allowed: {"scores": [2 numbers]}'
FINITE = "to the prompt '3+3?'; allowed: a finite number"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (scores(1), f"answered {{'scores': [1.0]}}{ALLOWED}"),
        (scores(1, float("nan")), f"gave nan for the response 'six' {FINITE}"),
        ((200, {}, b"<html>\nhello"), f"answered no JSON: <html>{ALLOWED}"),
        ((302, {"location": "http://elsewhere.invalid/?key=word"}, b"there"),
         "answered 302: there; its redirect to 'http://elsewhere.invalid/?***' is not followed"),
        ((401, {}, b""), "answered 401: nothing; reward.components.far.token_env names the "
         "variable with the token that it asks for"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_an_error_at_once(script: Script, answer: Answer, message: str) -> None:
    server = script(answer)
    assert failure(server.url) == f"{server.url} {message}"
    assert len(server.requests) == 1


def test_a_server_that_never_was_there_is_reported_at_once() -> None:
    with nobody() as url:
        message = failure(url, retries=8, backoff_s=100.0)
    assert message.startswith(f"{url} is away: ")
    assert message.endswith("; it has never answered: start it, or fix reward.components.far.url")


def test_a_server_that_goes_away_is_waited_for() -> None:
    server = Scripted(lambda k, request: scores(1, 2))
    reward = make_reward(server.url, cache_size=0, retries=2)
    with conftest.running(server):
        reward(REPLIES)
    with pytest.raises(RewardError, match=r"did not answer in 3 tries: it is away: .* refused"):
        reward(REPLIES)


def test_no_secret_is_shown_or_logged(
    script: Script, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the server gives our words back, nor where it is away."""
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")

    def answer(k: int, request: Any) -> Answer:
        words = (server.paths[k] + server.headers[k]["authorization"]).encode()
        return 404, {}, b"no such page: " + words

    server = script(answer)
    shown = server.url + "?***"
    with caplog.at_level(logging.DEBUG), nobody() as away:
        messages = [
            failure(server.url + "?key=word", token_env="JUDGE_TOKEN"),
            failure(away + "?key=word", token_env="JUDGE_TOKEN"),
            failure(away.replace("//", "//me:word@")),
        ]
    assert messages[0] == f"{shown} answered 404: no such page: /score?***Bearer ***"
    assert messages[1].startswith(f"{away}?*** is away")
    assert messages[2].startswith(f"{away.replace('//', '//***@')} is away")
    log = caplog.text + str([vars(record) for record in caplog.records])
    for secret in ("word", "s3cret", "bWU6d29yZA"):
        assert secret not in " ".join(messages) + log


@pytest.mark.parametrize("answer", [scores(), (503, {}, b""), None])
def test_a_server_need_not_know_what_to_say_of_nothing(script: Script, answer: Any) -> None:
    """None: it breaks down, and hangs up."""

    def broken(k: int, request: Any) -> Answer:
        raise ConnectionAbortedError

    server, warnings = script(broken if answer is None else answer), list[str]()
    make_reward(server.url, warn=warnings.append).check_server()
    assert ["did not answer the first request: it gave no" in line for line in warnings] == (
        [True] * (answer is None)
    )
    assert server.requests == [{"prompts": [], "responses": [], "columns": {}}]


# Servers that never end, send too much, or say anything at all


OK = b"HTTP/1.1 200 OK\r\n"
Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def talking(talk: Talk) -> Iterator[tuple[str, list[int]]]:
    """A server that sends to each connection what `talk` does; its address, and who came."""
    came: list[int] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            came.append(1)
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(2**16)
            talk(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/score", came
        listening.shutdown(socket.SHUT_RDWR)


def for_ever(piece: bytes, pause_s: float = 0.0, head: bytes = b"") -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(head)
        end = time.monotonic() + 10  # the thread ends with the test
        while time.monotonic() < end:
            connection.sendall(piece)
            time.sleep(pause_s)

    return talk


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "talk", [for_ever(b"x", 0.05, OK + b"X: "), for_ever(b"1\r\n \r\n", 0.05, CHUNKED)]
)
def test_a_try_ends_with_its_deadline(talk: Talk) -> None:
    """Although the server drips a header, or chunks of its answer, without end."""
    began = time.monotonic()
    with talking(talk) as (url, came):
        message = failure(url, retries=1, timeout_s=0.2)
        assert len(came) == 2
    assert message.startswith(f"{url} did not answer in 2 tries: it gave no answer: ")
    assert message.endswith("no whole answer in 0.2 s")
    assert time.monotonic() - began < 5


def test_an_answer_has_a_largest_size() -> None:
    with talking(for_ever(b" " * 2**16, 0.0, OK + b"\r\n")) as (url, came):
        message = failure(url, retries=3)
        assert message.endswith(f"its answer has over {ANSWER_BYTES} bytes")
        assert len(came) == 1
