"""DecodedResponses made of invented texts, and servers with the answers of a test."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
import yaml

from lightning_rlhf.core.records import DecodedResponses, Rollout
from lightning_rlhf.rewards.config import HTTPConfig
from lightning_rlhf.rewards.http import HTTPReward
from lightning_rlhf.rewards.server import RewardServer, Score, listening_socket
from lightning_rlhf.runs.console import HOME

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


def make_replies(*texts: tuple[str, str], **columns: Sequence[Any]) -> DecodedResponses:
    """A reply for each (prompt, response). A column's `...` is a row without it."""
    rows = []
    for i, (prompt, _) in enumerate(texts):
        others = {name: values[i] for name, values in columns.items() if values[i] is not ...}
        rows.append({"prompt": prompt, "messages": messages(prompt), **others})
    size = len(texts)
    masks = {"mask": (size, 2), "response_mask": (size, 1), "ended": (size,)}
    rollout = Rollout(
        tokens=torch.zeros(size, 2, dtype=torch.long), logprobs=torch.zeros(size, 1),
        values=torch.zeros(size, 1), index=torch.arange(size),
        **{name: torch.ones(shape, dtype=torch.bool) for name, shape in masks.items()},
    )  # fmt: skip
    responses = [response for _, response in texts]
    return DecodedResponses(rollout=rollout, rows=rows, responses=responses, decode=str)


TOKENS = torch.tensor([[0, 3, 5], [2, 4, 0], [6, 7, 8]])
MASK = torch.tensor([[False, True, True], [True, True, False], [True, True, True]])


def three_replies(
    responses: Sequence[str] = ("one", "two", "three"), rows: Sequence[int] = (0, 1, 2)
) -> DecodedResponses:
    """Three replies of 2, 2 and 3 tokens, two padded; `rows`: in which order they come."""
    texts = [(f"question {i}", text) for i, text in zip(rows, responses, strict=True)]
    found, order = make_replies(*texts), torch.tensor(rows)
    tensors = {"tokens": TOKENS[order], "mask": MASK[order], "response_mask": MASK[order, 2:]}
    return replace(found, rollout=replace(found.rollout, **tensors))


def messages(prompt: str) -> list[dict[str, str]]:
    """A dialogue of one turn."""
    return [{"role": "user", "content": prompt}]


def scores(*numbers: Any) -> Answer:
    """Answer of a reward server."""
    return 200, {}, json.dumps({"scores": numbers}).encode()


def make_reward(url: str, **changes: Any) -> HTTPReward:
    """A reward that asks `url`, by default up to four times without a pause."""
    own: dict[str, Any] = {"name": "reward", "warn": lambda line: None}
    own |= {key: changes.pop(key) for key in own if key in changes}
    preset = yaml.safe_load((HOME / "conf" / "reward" / "http.yaml").read_text())
    limits = {"batch_size": 8, "timeout_s": 5.0, "retries": 3, "backoff_s": 0.0, "cache_size": 100}
    return HTTPReward(HTTPConfig(**preset | limits | changes | {"url": url}), **own)


class Scripted(ThreadingHTTPServer):
    """Gives `answer(k, request)` to its k-th request, counted from 0, and keeps the requests."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Answer], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client hung up, as it was meant to."""


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(request)
        self.server.headers.append({name.lower(): x for name, x in self.headers.items()})
        self.server.paths.append(self.path)
        status, headers, body = self.server.answer(len(self.server.requests) - 1, request)
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextlib.contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    """The server answers in a thread."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def serving(score: Score, port: int = 0, token: str | None = None) -> Iterator[RewardServer]:
    """A reward server answers in a thread."""
    server = RewardServer(score, listening_socket("127.0.0.1", port), token=token)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture(autouse=True)
def _loggers_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra, where an earlier test ran it in this process, has silenced them."""
    monkeypatch.setattr(logging.getLogger("lightning_rlhf.rewards.server"), "disabled", False)


Script = Callable[..., Scripted]


@pytest.fixture
def script() -> Iterator[Script]:
    """script(answer, ...): a server that gives these in turn; or one that asks a function."""
    with contextlib.ExitStack() as stack:

        def start(*answers: Any) -> Scripted:
            function = answers[0] if callable(answers[0]) else lambda k, request: answers[k]
            server = Scripted(function)
            stack.enter_context(running(server))
            return server

        yield start
