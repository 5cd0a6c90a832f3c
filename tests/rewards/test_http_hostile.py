"""The client against servers that never end, send too much, or say anything at all."""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.rewards.http import ANSWER_BYTES, HTTPReward

from .conftest import make_replies

REPLIES = make_replies(("2+2?", "four"))
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


def error_of(url: str, retries: int = 0, timeout_s: float = 0.3) -> str:
    reward = HTTPReward(
        url, batch_size=8, timeout_s=timeout_s, retries=retries, backoff_s=0.0, cache_size=0,
        token_env=None, name="reward", warn=lambda line: None,
    )  # fmt: skip
    with pytest.raises(RewardError) as found:
        reward(REPLIES)
    assert len(str(found.value).splitlines()) == 1
    return str(found.value)


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
        lambda connection: connection.recv(1),  # type: ignore[misc, return-value]
        for_ever(b"x", 0.05, OK + b"X: "),
        for_ever(b"X: y\r\n", 0.05, OK),
        for_ever(b"HTTP/1.1 100 Continue\r\n\r\n"),
        for_ever(b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
        for_ever(b" ", 0.05, OK + b"Content-Length: 100\r\n\r\n"),
        for_ever(b"1\r\n \r\n", 0.05, OK + b"Transfer-Encoding: chunked\r\n\r\n"),
        for_ever(b"X: y\r\n", 0.0, OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"),
        for_ever(gzip.compress(b""), 0.0, OK + b"Content-Encoding: gzip\r\n\r\n"),
    ],
    ids=["silence", "drips a header", "drips headers", "100 as a flood", "100 slowly",
         "drips a body", "drips chunks", "endless trailers", "endless empty gzip"],
)  # fmt: skip
def test_a_try_ends_with_its_deadline(talk: Talk) -> None:
    began, before = time.monotonic(), threading.active_count()
    with talking(talk) as (url, came):
        assert "did not answer for 2 tries: it gave no answer: " in error_of(url, retries=1)
        assert len(came) == 2
    assert time.monotonic() - began < 5
    while threading.active_count() > before + 1:  # neither side's threads stay
        assert time.monotonic() - began < 10
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"\r\n", b" " * 2**16),
        (b"Content-Encoding: gzip\r\n\r\n", gzip.compress(bytes(2**24))),
        (b"Content-Encoding: gzip, gzip\r\n\r\n", gzip.compress(gzip.compress(bytes(2**26)))),
    ],
    ids=["endless", "gzip", "gzip twice"],
)
def test_an_answer_has_a_largest_size(head: bytes, piece: bytes) -> None:
    with talking(for_ever(piece, 0.0, OK + head)) as (url, came):
        told = error_of(url, retries=3, timeout_s=20)
        assert told.endswith(f"its answer has more than {ANSWER_BYTES + 2**12} bytes")
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
        assert "its certificate is not trusted: " in error_of(url, retries=3, timeout_s=10)
        assert len(came) == 1


def test_a_server_without_tls_is_told_at_once() -> None:
    with talking(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")) as (url, came):
        told = error_of(url.replace("http:", "https:"), retries=3, timeout_s=10)
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATUSES, st.lists(HEADERS, max_size=3), BODIES | st.binary(max_size=200), st.booleans())
def test_random_answers_are_one_error(
    status: bytes, headers: list[bytes], body: bytes, is_raw: bool
) -> None:
    head = b"".join(header + b"\r\n" for header in headers)
    sent = body if is_raw else b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n" + body
    with talking(lambda connection: connection.sendall(sent)) as (url, _):
        error_of(url, timeout_s=5)
