"""The server: what it takes and refuses, and how it reports its own faults."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from lightning_rlhf import rewards
from lightning_rlhf.cli import commands
from lightning_rlhf.core.errors import DataError
from lightning_rlhf.evaluation import build_rewards
from lightning_rlhf.rewards.server import RewardServer, listening_socket, read_request

from ..matrix import matrix
from .conftest import messages, serving


class Scorer:
    """Gives `scores`, or the lengths of the responses; keeps what it was asked."""

    def __init__(self) -> None:
        self.scores: Any = None
        self.asked: list[Any] = []

    def __call__(self, prompts: Any, responses: list[str], columns: Any) -> Sequence[float]:
        self.asked.append((prompts, responses, columns))
        if isinstance(self.scores, BaseException):
            raise self.scores
        return [len(r) for r in responses] if self.scores is None else self.scores


@pytest.fixture
def scorer() -> Scorer:
    return Scorer()


@pytest.fixture
def server(scorer: Scorer) -> Iterator[RewardServer]:
    with serving(scorer) as server:
        yield server


def test_a_port_is_free_again_at_once() -> None:
    """Although the system still keeps connections that its server has closed."""
    with listening_socket("127.0.0.1", 0) as first:
        first.listen()
        address = first.getsockname()
        with socket.create_connection(address):
            first.accept()[0].close()
    listening_socket(*address).close()


def ask(
    server: RewardServer, body: Any, method: str = "POST", path: str = "/score", **headers: str
) -> tuple[int, Any]:
    """Status and answer; a body of bytes is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    sent = body if isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, sent, headers)
    answer = connection.getresponse()
    assert answer.headers["content-type"] == "application/json"
    data = answer.read()
    assert data.count(b"\n") == 0
    return answer.status, json.loads(data)


def request(*responses: str, **others: Any) -> dict[str, Any]:
    return {"prompts": [messages("p")] * len(responses), "responses": responses, **others}


def test_responses_are_scored(server: RewardServer, scorer: Scorer) -> None:
    columns = {"answer": ["é", None]}
    assert ask(server, request("é", "\U0001f388?", columns=columns)) == (200, {"scores": [1, 2]})
    assert scorer.asked == [([messages("p")] * 2, ["é", "\U0001f388?"], columns)]
    assert ask(server, request()) == (200, {"scores": []})
    assert ask(server, request("abc"), path="/score?key=word") == (200, {"scores": [3]})


def test_a_bad_request_is_told_precisely() -> None:
    for body, message in (
        ({"prompts": [messages("p"), [{"role": "user"}]], "responses": ["r", "s"]}, "prompts.1.0."),
        (request("r", columns={"a": [1, 2]}), "'columns.a' has 2 values for 1 response"),
    ):
        with pytest.raises(HTTPException) as found:
            read_request(json.dumps(body).encode())
        assert found.value.status_code == 400
        assert found.value.detail.startswith(message)


def test_a_request_has_a_largest_size(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(request("r")).encode()
    monkeypatch.setattr("lightning_rlhf.rewards.server.BODY_BYTES", len(body))
    assert ask(server, body)[0] == 200
    found = ask(server, body + b" ")
    assert found == (413, {"error": f"the request has over {len(body)} bytes"})


def test_a_token_is_wanted(scorer: Scorer) -> None:
    with serving(scorer, token="s3cret") as server:
        for given in ({}, {"authorization": "Bearer wrong"}):
            status, answer = ask(server, request("r"), **given)
            assert (status, "s3cret" in str(answer), scorer.asked) == (401, False, [])
        assert ask(server, request("r"), authorization="Bearer s3cret")[0] == 200
        assert ask(server, b"", "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0, float("nan")], "the reward gave [1.0, nan] for 2 responses; allowed: one finite "
         "number each"),
        (SystemExit("\x1b]0;title\x07"), "SystemExit: \x1b]0;title\x07"),
        (DataError("an unknown role"), "an unknown role"),
    ],
)  # fmt: skip
def test_a_fault_of_the_reward_is_reported(
    server: RewardServer, scorer: Scorer, scores: Any, message: str, caplog: Any
) -> None:
    scorer.scores = scores
    with caplog.at_level(logging.ERROR):
        status = 422 if isinstance(scores, DataError) else 500
        assert ask(server, request("r", "s")) == (status, {"error": message})
    assert ("could not be scored" in caplog.text) == ("E" in message)
    assert "\x1b" not in caplog.text
    scorer.scores = [0.5, 1]
    assert ask(server, request("r", "s")) == (200, {"scores": [0.5, 1.0]})


def post(body: Any) -> bytes:
    """A request as it is sent."""
    data = json.dumps(body).encode()
    return b"POST /score HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


def serve(out: int, err: int) -> None:
    """The command, in a process that writes there, with a reward that may not come to its end."""

    def score(prompts: Any, responses: list[str], columns: Any) -> list[float]:
        if responses == ["stay"]:
            time.sleep(1000)
        return [1.0] * len(responses)

    logging.getLogger().handlers.clear()  # pytest's
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    rewards.server.STOP_S = 1
    build_rewards.text_scorer = lambda final, overrides: score
    commands.serve_reward(["final", "--port", "0"])


@pytest.mark.parametrize(
    ("sign", "busy"),
    matrix([(signal.SIGINT, "stay"), (signal.SIGTERM, "slow")], (signal.SIGINT, "stay")),
)
def test_a_signal_ends_it_cleanly(sign: signal.Signals, busy: str) -> None:
    """Also with a reward that does not come to its end, and with a client that sends no more."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    context = multiprocessing.get_context("fork")  # its end is Python's: it waits for threads
    process = context.Process(target=serve, args=(to_out, to_err), daemon=True)
    process.start()
    os.close(to_out)
    os.close(to_err)
    with open(out) as output, open(err) as errors, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        found = re.search(r":(\d+)/score", output.readline())
        assert found is not None, errors.read()
        port = int(found[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/score", json.dumps(request("r")))
        assert json.loads(connection.getresponse().read()) == {"scores": [1.0]}
        other = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        other.sendall({"stay": post(request("stay")), "slow": post("")[:-1]}[busy])
        time.sleep(0.1)
        began = time.monotonic()
        os.kill(process.pid, sign)
        process.join(60)
        assert process.exitcode == 0
        assert (output.read(), errors.read()) == ("stopped\n", "")
    assert time.monotonic() - began < 10
