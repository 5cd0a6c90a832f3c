"""What the client says where there are no scores to be had."""

from __future__ import annotations

import contextlib
import gzip
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.rewards.http import ANSWER_BYTES, SCORE_BYTES, HTTPReward

from .conftest import Answer, Script, Scripted, make_replies, running, scores

REPLIES = make_replies(("2+2?", "four"), ("3+3?", "six"))


def make_reward(url: str, **changes: Any) -> HTTPReward:
    settings: dict[str, Any] = {
        "batch_size": 8, "timeout_s": 5.0, "retries": 2, "backoff_s": 0.0, "cache_size": 100,
        "token_env": None, "name": "reward.components.far",
        "warn": lambda line: None,
    }  # fmt: skip
    return HTTPReward(url, **{**settings, **changes})


def failure(url: str, **changes: Any) -> str:
    """What is told of REPLIES."""
    with pytest.raises(RewardError) as found:
        make_reward(url, **changes)(REPLIES)
    return str(found.value).removeprefix("reward.components.far: the server ")


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address that is taken, where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/score"


ALLOWED = '; allowed: {"scores": [2 numbers]}'
FINITE = "; allowed: a finite number"
FIRST = f"the response 'four' to the prompt '2+2?'{FINITE}"
SECOND = f"the response 'six' to the prompt '3+3?'{FINITE}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (scores(1), "gave 1 score for 2 responses"),
        (scores(1, 2, 3), "gave 3 scores for 2 responses"),
        (scores(1, float("nan")), f"gave nan for {SECOND}"),
        (scores(float("-inf"), 1), f"gave -inf for {FIRST}"),
        (scores(10**400, 1), f"gave inf for {FIRST}"),
        (scores(1, None), f"gave None for {SECOND}"),
        (scores("1", 2), f"gave '1' for {FIRST}"),
        (scores(True, 2), f"gave True for {FIRST}"),
        ((200, {}, b'{"scores": 1}'), f'answered "scores": 1.0{ALLOWED}'),
        ((200, {}, b'{"score": [1, 2]}'),
         f"answered {{'score': [1.0, 2.0]}}, which has no \"scores\"{ALLOWED}"),
        ((200, {}, b"[1, 2]"), f'answered [1.0, 2.0], which has no "scores"{ALLOWED}'),
        ((200, {}, b"<html>\nhello"), f"answered no JSON: <html>{ALLOWED}"),
        ((200, {}, b"\xff\x00"), f"answered no JSON: \ufffd\x00{ALLOWED}"),
        ((200, {}, b""), f"answered no JSON: nothing{ALLOWED}"),
        ((204, {}, b""), "answered 204: nothing"),
        ((302, {"location": "http://elsewhere.invalid/"}, b"there"),
         "answered 302: there; a redirect to '"
         "http://elsewhere.invalid/' is not followed: reward.components.far.url is to be it"),
        ((501, {}, b""), "answered 501: nothing"),
        ((400, {}, b"\n  too long\nby far"), "answered 400: too long"),
        ((401, {}, b""), "answered 401: nothing; no token was sent: "
         "reward.components.far.token_env names the environment variable that holds it"),
        ((404, {}, b"no such model"), "answered 404: no such model"),
        ((404, {}, b"x" * 1000), "answered 404: " + "x" * 300),
        ((200, {"content-encoding": "gzip"}, b"garbage"), "cannot be used: its answer cannot be "
         "unpacked: ('Received response with content-encoding: gzip, but failed to decode it.', "
         "error('Error -3 while decompressing data: incorrect header check'))"),
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


@pytest.mark.parametrize(("retries", "tries"), [(0, "1 try"), (2, "3 tries")])
def test_a_server_that_goes_away_is_waited_for(retries: int, tries: str) -> None:
    server = Scripted(lambda k, request: scores(1, 2))
    reward = make_reward(server.url, retries=retries, cache_size=0)
    with running(server):
        reward(REPLIES)
    with pytest.raises(RewardError) as found:
        reward(REPLIES)
    assert f"{server.url} did not answer for {tries}: it is away: " in str(found.value)
    assert "Connection refused" in str(found.value)


def test_a_server_that_stays_in_trouble(script: Script) -> None:
    server = script(*[(500, {}, b'{"error": "out of memory"}\nfar too long')] * 3)
    assert failure(server.url) == (
        f'{server.url} answered 500 to the last of 3 tries: {{"error": "out of memory"}}'
    )
    assert len(server.requests) == 3


def test_a_host_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    told = failure("http://nowhere.invalid/score")
    assert told.startswith("http://nowhere.invalid/score is away: ")
    assert "Name or service not known" in told


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
        make_reward(url, name="reward", warn=told.append, **changes).greet()
    except RewardError as error:
        told.append(str(error))
    return [line.removeprefix(f"reward: the server {url} ") for line in told]


@pytest.mark.parametrize(
    "answer", [scores(), (400, {}, b"none?"), (422, {}, b""), (500, {}, b""), (503, {}, b""), None]
)
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
        ((405, {}, b""), "answered 405: nothing"),
        ((501, {}, b""), "answered 501: nothing"),
        ((301, {"location": "http://h/?key=word"}, b""), "answered 301: nothing; a redirect to "
         "'http://h/?***' is not followed: reward.url is to be it"),
        ((403, {}, b""), "answered 403: nothing; no token was sent: reward.token_env names the "
         "environment variable that holds it"),
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
def talking(talk: Talk, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[int]]]:
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
            if tls is not None:
                connection = tls.wrap_socket(connection, server_side=True)
            connection.recv(2**16)
            talk(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}/score", came
        listening.shutdown(socket.SHUT_RDWR)


def for_ever(piece: bytes, pause_s: float = 0.0, head: bytes = b"") -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(pause_s)

    return talk


@pytest.mark.parametrize(
    "talk",
    [
        for_ever(b"", 0.05),
        for_ever(b"x", 0.05, OK + b"X: "),
        for_ever(b"HTTP/1.1 100 Continue\r\n\r\n"),
        for_ever(b" ", 0.05, OK + b"Content-Length: 100\r\n\r\n"),
        for_ever(b"1\r\n \r\n", 0.05, OK + b"Transfer-Encoding: chunked\r\n\r\n"),
        for_ever(b"X: y\r\n", 0.0, OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"),
        for_ever(gzip.compress(b""), 0.0, OK + b"Content-Encoding: gzip\r\n\r\n"),
    ],
    ids=["silence", "drips a header", "100 as a flood",
         "drips a body", "drips chunks", "endless trailers", "endless empty gzip"],
)  # fmt: skip
def test_a_try_ends_with_its_deadline(talk: Talk) -> None:
    began = time.monotonic()
    with talking(talk) as (url, came):
        told = failure(url, retries=1, timeout_s=0.2)
        assert len(came) == 2
    assert told.startswith(f"{url} did not answer for 2 tries: it gave no answer: ")
    assert told.endswith("no whole answer within 0.2 s")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"\r\n", b" " * 2**16),
        (b"Content-Encoding: gzip\r\n\r\n", gzip.compress(bytes(2**24))),
    ],
    ids=["endless", "gzip"],
)
def test_an_answer_has_a_largest_size(head: bytes, piece: bytes) -> None:
    with talking(for_ever(piece, 0.0, OK + head)) as (url, came):
        told = failure(url, retries=3)
        assert told.endswith(f"its answer has more than {ANSWER_BYTES + 2 * SCORE_BYTES} bytes")
        assert len(came) == 1


def test_a_certificate_that_is_not_trusted_is_told_at_once(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
         "-keyout", key, "-out", certificate, "-days", "2"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with talking(lambda connection: None, context) as (url, came):
        assert "its certificate is not trusted: " in failure(url, retries=3)
        assert len(came) == 1


def test_a_server_without_tls_is_told_at_once() -> None:
    with talking(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")) as (url, came):
        told = failure(url.replace("http:", "https:"), retries=3)
        assert "no TLS can be spoken with it: " in told
        assert len(came) == 1


HEADERS = st.sampled_from(
    [b"Content-Length: 2", b"Content-Length: " + b"9" * 5000, b"Content-Length: -1",
     b"Location: \xff",
     b"Transfer-Encoding: chunked", b"Content-Encoding: gzip", b"Content-Encoding: br, gzip, x",
     b"Retry-After: soon", b"\xff: \x00", b": ", b"Connection: close", b"X" * 70_000]
)  # fmt: skip
BODIES = st.sampled_from(
    [b'{"scores": [1e400]}', b'{"scores": [' + b"9" * 5000 + b"]}", b'{"scores": [', b"[" * 5000,
     b'{"scores": [1, 2]}', b"\xff\xfe{", b'{"scores": {"a": "\\ud83d\x1b]8;;x\x07"}}',
     b"ffffffffffff\r\n",
     b"-1\r\n", b"\x1f\x8b\x08\x00broken"]
)  # fmt: skip
STATUSES = st.sampled_from(
    [b"200 OK", b"429", b"500 \x1b[31m", b"999", b"0", b"abc", b"301 x", b"100 x"]
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATUSES, st.lists(HEADERS, max_size=3), BODIES | st.binary(max_size=200), st.booleans())
def test_random_answers_are_one_error(
    status: bytes, headers: list[bytes], body: bytes, is_raw: bool
) -> None:
    head = b"".join(header + b"\r\n" for header in headers)
    sent = body if is_raw else b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n" + body
    with talking(lambda connection: connection.sendall(sent)) as (url, _):
        assert len(failure(url, retries=0).splitlines()) == 1
