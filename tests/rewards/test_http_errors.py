"""What the client says where there are no scores to be had."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.rewards.http import ANSWER_BYTES

from .conftest import Answer, Script, Scripted, make_replies, make_reward, running, scores

REPLIES = make_replies(("2+2?", "four"), ("3+3?", "six"))


def failure(url: str, **changes: Any) -> str:
    """What is told of REPLIES."""
    reward = make_reward(url, name="reward.components.far", **{"retries": 2} | changes)
    with pytest.raises(RewardError) as found:
        reward(REPLIES)
    return str(found.value).removeprefix("reward.components.far: the server ")


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address that is taken, where nobody listens."""
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
        (scores(1, "1"), f"gave '1' for the response 'six' {FINITE}"),
        (scores(1, 10**400), f"gave inf for the response 'six' {FINITE}"),
        ((200, {}, b'{"scores": 1}'), f"answered {{'scores': 1.0}}{ALLOWED}"),
        ((200, {}, b"[1, 2]"), f"answered [1.0, 2.0]{ALLOWED}"),
        ((200, {}, b"<html>\nhello"), f"answered no JSON: <html>{ALLOWED}"),
        ((200, {}, b""), f"answered no JSON: nothing{ALLOWED}"),
        ((302, {"location": "http://elsewhere.invalid/?key=word"}, b"there"),
         "answered 302: there; a redirect to 'http://elsewhere.invalid/?***' is not followed: "
         "reward.components.far.url is to be it"),
        ((401, {}, b""), "answered 401: nothing; no token was sent: "
         "reward.components.far.token_env names the variable with it"),
        ((404, {}, b"\n  " + b"x" * 1000), "answered 404: " + "x" * 300),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_an_error_at_once(script: Script, answer: Answer, message: str) -> None:
    server = script(answer)
    assert failure(server.url) == f"{server.url} {message}"
    assert len(server.requests) == 1


def test_a_server_that_never_was_there_is_told_at_once() -> None:
    with nobody() as url:
        told = failure(url, retries=8, backoff_s=100.0)
    assert told.startswith(f"{url} is away: ")
    assert "Connection refused" in told
    assert told.endswith("; it has never answered: start it, or mend reward.components.far.url")


def test_a_server_that_goes_away_is_waited_for() -> None:
    server = Scripted(lambda k, request: scores(1, 2))
    reward = make_reward(server.url, cache_size=0, retries=2)
    with running(server):
        reward(REPLIES)
    with pytest.raises(RewardError) as found:
        reward(REPLIES)
    assert f"{server.url} did not answer in 3 of 3 tries: it is away: " in str(found.value)
    assert "Connection refused" in str(found.value)


def test_a_server_that_stays_in_trouble(script: Script) -> None:
    server = script(*[(500, {}, b'{"error": "out of memory"}\nfar too long')] * 3)
    assert failure(server.url) == (
        f'{server.url} answered 500 to the last of 3 tries: {{"error": "out of memory"}}'
    )
    assert len(server.requests) == 3


def test_no_secret_is_told_or_logged(
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
        told = [
            failure(server.url + "?key=word", token_env="JUDGE_TOKEN"),
            failure(away + "?key=word", token_env="JUDGE_TOKEN"),
            failure(away.replace("//", "//me:word@")),
        ]
    assert told[0] == f"{shown} answered 404: no such page: /score?***Bearer ***"
    assert told[1].startswith(f"{away}?*** is away")
    assert told[2].startswith(f"{away.replace('//', '//***@')} is away")
    log = caplog.text + str([vars(record) for record in caplog.records])
    for secret in ("word", "s3cret", "bWU6d29yZA"):
        assert secret not in " ".join(told) + log


def greeted(url: str, **changes: Any) -> list[str]:
    """What is told while nobody is asked for anything; nothing where all is well."""
    told: list[str] = []
    try:
        make_reward(url, warn=told.append, **changes).greet()
    except RewardError as error:
        told.append(str(error))
    return [line.removeprefix(f"reward: the server {url} ") for line in told]


@pytest.mark.parametrize("answer", [scores(), (422, {}, b""), (503, {}, b""), None])
def test_a_server_need_not_know_what_to_say_of_nothing(script: Script, answer: Any) -> None:
    """None: it breaks down, and hangs up."""

    def broken(k: int, request: Any) -> Answer:
        raise ConnectionAbortedError

    server = script(broken if answer is None else answer)
    silent = ["did not answer the greeting within 5 s; the run goes on"]
    assert greeted(server.url) == (silent if answer is None else [])
    assert server.requests == [{"prompts": [], "responses": [], "columns": {}}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {}, b"no such page"), "answered 404: no such page"),
        ((200, {}, b"<html>"), 'answered no JSON: <html>; allowed: {"scores": [0 numbers]}'),
    ],
)  # fmt: skip
def test_another_server_than_the_one_that_is_meant(
    script: Script, answer: Answer, message: str
) -> None:
    assert greeted(script(answer).url) == [message]


# Servers that never end, send too much, or say anything at all


OK = b"HTTP/1.1 200 OK\r\n"
Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def talking(talk: Talk) -> Iterator[tuple[str, list[int]]]:
    """A server that says to each connection what it likes; its address, and who came."""
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


@pytest.mark.parametrize(
    "talk",
    [
        for_ever(b"", 0.05),
        for_ever(b"x", 0.05, OK + b"X: "),
        for_ever(b"1\r\n \r\n", 0.05, OK + b"Transfer-Encoding: chunked\r\n\r\n"),
    ],
    ids=["silence", "drips a header", "drips chunks"],
)
def test_a_try_ends_with_its_deadline(talk: Talk) -> None:
    began = time.monotonic()
    with talking(talk) as (url, came):
        told = failure(url, retries=1, timeout_s=0.2)
        assert len(came) == 2
    assert told.startswith(f"{url} did not answer in 2 of 2 tries: it gave no answer: ")
    assert told.endswith("no whole answer within 0.2 s")
    assert time.monotonic() - began < 5


def test_an_answer_has_a_largest_size() -> None:
    with talking(for_ever(b" " * 2**16, 0.0, OK + b"\r\n")) as (url, came):
        told = failure(url, retries=3)
        assert told.endswith(f"its answer has over {ANSWER_BYTES} bytes")
        assert len(came) == 1


def test_a_server_without_tls_is_told_at_once() -> None:
    with talking(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")) as (url, came):
        told = failure(url.replace("http:", "https:"), retries=3)
        assert "no trusted TLS: " in told
        assert len(came) == 1
