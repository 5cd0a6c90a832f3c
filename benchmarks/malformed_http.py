"""Malformed HTTP answers to the client of reward=http."""

from __future__ import annotations

import gzip
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import mutations as m
from malformed_cases import MINI, SMALL, Case, Kind

Answer = Callable[[int], Iterator[bytes]]
"""Function of the number of requested scores that yields the bytes of an answer in pieces."""
Pieces = Iterator[bytes]


def reply(body: bytes, status: str = "200 OK", headers: bytes = b"", length: str = "") -> bytes:
    """Return an HTTP answer; length: value of content-length, by default the correct one."""
    size = length or str(len(body))
    head = f"HTTP/1.1 {status}\r\ncontent-length: {size}\r\n".encode("latin-1")
    return head + headers + b"\r\n" + body


def scores(count: int) -> bytes:
    """Return the body of a correct answer."""
    return json.dumps({"scores": [0.5] * count}).encode()


def endless(start: bytes, piece: bytes, pause_s: float = 0.0) -> Answer:
    """Return an answer that continues until the client closes the connection."""

    def answer(_: int) -> Pieces:
        yield start
        while True:
            time.sleep(pause_s)
            yield piece

    return answer


def fixed(data: bytes) -> Answer:
    """Return an answer that does not depend on the request."""
    return lambda _: iter([data])


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
ZIPPED = b"content-encoding: gzip\r\n"
ANSWERS: dict[str, Answer] = {
    "nothing": lambda _: iter([]),
    "no HTTP": fixed(b"hello\r\n\r\n"),
    "TLS": fixed(b"\x16\x03\x01\x02\x00" + bytes(200)),
    "a status line alone": fixed(OK),
    "no status": fixed(b"HTTP/1.1 \r\n\r\n"),
    "status abc": fixed(reply(b"", "abc")),
    "status 999": fixed(reply(b"{}", "999 X")),
    "status -1": fixed(reply(b"{}", "-1 X")),
    "status 200000": fixed(reply(b"{}", "200000 X")),
    "HTTP/9.9": fixed(b"HTTP/9.9 200 OK\r\n\r\n{}"),
    "a long status line": fixed(b"HTTP/1.1 200 " + b"a" * 100_000 + b"\r\n\r\n"),
    "a long header": fixed(OK + b"x: " + b"a" * 100_000 + b"\r\n\r\n"),
    "10,000 headers": fixed(OK + b"x: y\r\n" * 10_000 + b"\r\n"),
    "headers without end": endless(OK, b"x: y\r\n"),
    "100 Continue without end": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body without end": endless(OK + b"\r\n", b" " * 65536),
    "chunks without end": endless(CHUNKED, b"1\r\n \r\n"),
    "a body that drips": endless(OK + b"content-length: 1000000\r\n\r\n", b" ", 0.3),
    "headers that drip": endless(OK, b"x", 0.3),
    "silence": endless(b"", b"", 0.3),
    "silence after the head": endless(OK + b"content-length: 5\r\n\r\n", b"", 0.3),
    "a short body": fixed(reply(b"{", length="100")),
    "a length that is negative": fixed(reply(b"{}", length="-5")),
    "a length that is no number": fixed(reply(b"{}", length="x")),
    "a length that is huge": fixed(reply(b"{}", length="9" * 30)),
    "two lengths": fixed(reply(b"{}", headers=b"content-length: 1\r\n")),
    "a chunk of size x": fixed(CHUNKED + b"x\r\n"),
    "a chunk of huge size": fixed(CHUNKED + b"f" * 40 + b"\r\n"),
    "a chunk that is cut": fixed(CHUNKED + b"ff\r\nabc"),
    "no gzip": fixed(reply(b"{}", headers=ZIPPED)),
    "gzip that is cut": fixed(reply(gzip.compress(b"{}" * 99)[:15], headers=ZIPPED)),
    "a gzip bomb": fixed(reply(gzip.compress(b" " * 300_000_000, 1), headers=ZIPPED)),
    "deflate in deflate": fixed(reply(b"{}", headers=b"content-encoding: deflate, deflate\r\n")),
    "an unknown encoding": fixed(reply(b"{}", headers=b"content-encoding: x\r\n")),
    "300 encodings": fixed(reply(b"{}", headers=b"content-encoding: " + b"gzip," * 300 + b"\r\n")),
    "50 MB of brackets": fixed(reply(b"[" * 50_000_000)),
    "a redirect to itself": fixed(reply(b"", "302 Found", b"location: /score\r\n")),
    "a redirect to a file": fixed(reply(b"", "302 Found", b"location: file:///etc/passwd\r\n")),
    "Retry-After: soon": fixed(reply(b"", "503 X", b"retry-after: soon\r\n")),
    "Retry-After: -1": fixed(reply(b"", "503 X", b"retry-after: -1\r\n")),
    "Retry-After: a day that is gone": fixed(
        reply(b"", "429 X", b"retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n")
    ),
    "escapes": fixed(reply(b"\x1b]0;title\x07\x1b[2J\x9b31m", "500 \x1b[31m")),
    "a cookie": fixed(reply(b"{}", headers=b"set-cookie: \xff\x00\r\n")),
}
"""Description -> malformed answer of a server."""
BODIES = [
    b"", b" ", b"null", b"[]", b"{}", b"5", b'"x"', b"\xff", b"\xff\xfe{\0}\0", b"<html>", b"NaN",
    b"[" * 100_000, b"9" * 5000, b'{"scores": null}', b'{"scores": 5}', b'{"scores": []}',
    b'{"scores": {}}', b'{"score": [1]}', b'{"scores": [1]}', b'{"scores": "12345678"}',
    b'{"scores": [1], "scores": [2]}', b'{"scores": ["\x1b[31m"]}', b"\xef\xbb\xbf{}",
]  # fmt: skip
STATUSES = ["201 X", "204 X", "206 X", "304 X", "400 X", "401 X", "403 X", "404 X", "405 X",
            "413 X", "418 X", "429 X", "500 X", "501 X", "503 X", "599 X", "600 X"]  # fmt: skip


def serve_answers(answer: Answer, after: int) -> int:
    """Start a server thread that answers the first `after` requests correctly; returns the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen = 0

    def one(connection: socket.socket) -> None:
        nonlocal seen
        with suppress(OSError), connection:
            while (count := responses_asked(connection)) is not None:
                seen += 1
                if seen <= after:
                    connection.sendall(reply(scores(count)))
                    continue
                for piece in answer(count):
                    connection.sendall(piece)
                return

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=one, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def responses_asked(connection: socket.socket) -> int | None:
    """Return the number of responses in the next request; None where there is no request."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := connection.recv(65536)):
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    size = int(found[1]) if found else 0
    while len(body) < size:
        if not (piece := connection.recv(65536)):
            return None
        body += piece
    return len(json.loads(body)["responses"])


def client_kind(share: float) -> Kind:
    """Return the kind of malformed HTTP answers to `reward=http`."""

    def of_answer(answer: Answer, after: int, what: str) -> Case:
        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            port = serve_answers(answer, after)
            http = ["reward=http", f"reward.url=http://127.0.0.1:{port}/score", "reward.retries=1",
                    "reward.timeout_s=2", "reward.backoff_s=0.01"]  # fmt: skip
            words = ["stage=ppo", *MINI, *SMALL["ppo"], "policy.checkpoint=base", *http]
            return f"after {after} right answers: {what}", words

        return Case(prepare, ["data"], "step")

    def with_body(body: bytes, status: str, after: int) -> Case:
        what = f"{status}, {m.shown(body)}"
        return of_answer(lambda _: iter([reply(body, status)]), after, what)

    def draw(dice: random.Random) -> Case:
        after, seed = dice.choice([0, 1, 2]), dice.random()
        match dice.choice(["answer", "body", "status", "changed"]):
            case "answer":
                what = dice.choice([*ANSWERS])
                return of_answer(ANSWERS[what], after, what)
            case "body":
                return with_body(dice.choice(BODIES), "200 OK", after)
            case "status":
                return with_body(b'{"error": "x"}', dice.choice(STATUSES), after)

        def answer(count: int) -> Pieces:
            own = random.Random(seed)
            if own.random() < 0.5:
                tree, _ = m.mutated(json.loads(scores(count)), own)
                yield reply(json.dumps(tree).encode())
            else:
                yield m.mutated_bytes(reply(scores(count)), own)[0]

        return of_answer(answer, after, f"a change drawn by {seed}")

    return Kind("HTTP answers to reward=http", draw, share)
