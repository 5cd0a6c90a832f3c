"""The server half of `rewards.http`: a reward behind one POST."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.rewards.protocol import Columns, Messages, Refused, read_request
from lightning_rlhf.rewards.quote import quoted

Score = Callable[[list[Messages], list[str], Columns], Sequence[float]]
"""(prompts, responses, columns) -> one number for each response."""

MAX_BODY_BYTES = 64 * 2**20
IDLE_S = 60.0
"""A client that sends nothing for so long is hung up on."""

_log = logging.getLogger(__name__)


def serve(score: Score, host: str, port: int, *, ready: Callable[[str], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM; requests that have come in are answered first.

    Args:
        score: asked for one request at a time.
        port: 0 for any that is free.
        ready: told the address once it answers.

    Raises:
        ConfigError: there can be no server at this host and port.
    """
    interrupted = contextlib.suppress(KeyboardInterrupt)
    with RewardServer(score, host, port) as server, _sigterm_as_interrupt(), interrupted:
        ready(server.url)
        server.serve_forever()


class RewardServer(ThreadingHTTPServer):
    """POST /score and GET /health; `serve_forever()` and `shutdown()` as of its base."""

    daemon_threads = False  # so that closing waits for requests that have come in
    request_queue_size = 128

    def __init__(
        self, score: Score, host: str, port: int, *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self.score, self.max_body_bytes = score, max_body_bytes
        self.lock = threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"there can be no server at {host}:{port}: {error}") from error
        self.url = f"http://{host}:{self.server_port}/score"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client hung up
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(HTTPStatus.OK, {"status": "ok"})
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        try:
            body = self._body()
            if self.path.partition("?")[0] != "/score":
                raise Refused(HTTPStatus.NOT_FOUND, _no_such("POST", self.path))
            self._answer(HTTPStatus.OK, {"scores": _scores(self.server, *read_request(body))})
        except Refused as refusal:
            self._answer(refusal.status, {"error": str(refusal)})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        reason = message or _no_such(self.command, self.path)
        self._answer(HTTPStatus(code), {"error": reason})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a path may hold a token."""

    def _body(self) -> bytes:
        length = self.headers["content-length"]
        if length is None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "there is no Content-Length")
        if re.fullmatch("[0-9]{1,18}", length) is None:
            raise Refused(HTTPStatus.BAD_REQUEST, f"Content-Length is {length!r}, no number")
        size, limit = int(length), self.server.max_body_bytes
        if size <= limit:
            return self.rfile.read(size)
        while size > 0 and (piece := self.rfile.read(min(size, 2**16))):  # a client reads last
            size -= len(piece)
        raise Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request has {length} bytes; allowed: {limit}; ask for fewer responses at once",
        )

    def _answer(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        body = json.dumps(answer, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _scores(
    server: RewardServer, prompts: list[Messages], responses: list[str], columns: Columns
) -> list[float]:
    try:
        with server.lock:
            scores = [float(score) for score in server.score(prompts, responses, columns)]
    except Exception as error:
        _log.exception("%d responses could not be scored", len(responses))
        raise _failed(f"{type(error).__name__}: {error}") from None
    if len(scores) != len(responses):
        raise _failed(f"the reward gave {len(scores)} scores for {len(responses)} responses")
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise _failed(f"the reward gave {score} for responses[{i}], {quoted(responses[i])}")
    return scores


def _no_such(method: str, path: str) -> str:
    return f"there is no {method} {path.partition('?')[0]}; allowed: POST /score, GET /health"


def _failed(reason: str) -> Refused:
    return Refused(HTTPStatus.INTERNAL_SERVER_ERROR, reason)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
