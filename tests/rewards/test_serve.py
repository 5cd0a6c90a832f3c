"""The server: what it takes, refuses and says of its own faults."""

from __future__ import annotations

import http.client
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.rewards.serve import Columns, Messages, RewardServer

from .conftest import messages, running


class Scorer:
    """Gives `scores`, or the lengths of the responses; keeps what it was asked."""

    def __init__(self) -> None:
        self.scores: Any = None
        self.asked: list[Any] = []

    def __call__(
        self, prompts: list[Messages], responses: list[str], columns: Columns
    ) -> Sequence[float]:
        self.asked.append((prompts, responses, columns))
        if isinstance(self.scores, Exception):
            raise self.scores
        return [len(r) for r in responses] if self.scores is None else self.scores


@pytest.fixture
def scorer() -> Scorer:
    return Scorer()


@pytest.fixture
def server(scorer: Scorer) -> Iterator[RewardServer]:
    server = RewardServer(scorer, "127.0.0.1", 0, max_body_bytes=1000)
    with running(server):
        yield server


def ask(
    server: RewardServer, body: Any, method: str = "POST", path: str = "/score"
) -> tuple[int, Any]:
    """Status and answer; a body of bytes is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
    answer = connection.getresponse()
    assert answer.headers["content-type"] == "application/json"
    return answer.status, json.loads(answer.read())


def request(*responses: str, **others: Any) -> dict[str, Any]:
    return {"prompts": [messages("p")] * len(responses), "responses": responses, **others}


def test_responses_are_scored(server: RewardServer, scorer: Scorer) -> None:
    columns = {"answer": ["é", None]}
    assert ask(server, request("é", "\U0001f388?", columns=columns)) == (200, {"scores": [1, 2]})
    assert scorer.asked == [([messages("p")] * 2, ["é", "\U0001f388?"], columns)]
    assert ask(server, request()) == (200, {"scores": []})
    assert ask(server, request("abc"), path="/score?key=word") == (200, {"scores": [3]})


def test_health(server: RewardServer, scorer: Scorer) -> None:
    assert ask(server, b"", "GET", "/health") == (200, {"status": "ok"})
    assert scorer.asked == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request is no JSON: Expecting property name"),
        (b"\xff", "the request is no JSON: "),
        (b"[" * 999, "the request is no JSON: "),
        ([1], "the request is [1], no JSON object"),
        ({"prompt": []}, "'prompt' is no known key; allowed: prompts, responses, columns"),
        ({"responses": []}, "the request has no 'prompts'"),
        ({"prompts": []}, "the request has no 'responses'"),
        ({"prompts": "p", "responses": []}, "'prompts' is 'p', no list"),
        ({"prompts": [], "responses": {}}, "'responses' is {}, no list"),
        ({"prompts": [], "responses": ["r"]}, "there are 0 prompts for 1 responses"),
        ({"prompts": ["p"], "responses": ["r"]},
         'prompts[0] is \'p\'; allowed: a list of {"role": text, "content": text}'),
        ({"prompts": [[]], "responses": ["r"]}, "prompts[0] is []; allowed"),
        ({"prompts": [messages("p"), [{"role": "user"}]], "responses": ["r", "s"]},
         "prompts[1] is [{'role': 'user'}]; allowed"),
        ({"prompts": [[{"role": "user", "content": 1}]], "responses": ["r"]}, "prompts[0] is ["),
        ({"prompts": [messages("p")], "responses": [1]}, "responses[0] is 1, no text"),
        (request("r", columns=[]), "'columns' is [], no JSON object"),
        (request("r", columns={"a": [1, 2]}),
         "columns['a'] is [1, 2]; allowed: a list of 1 values"),
        (request("r", columns={"a": 1}), "columns['a'] is 1; allowed: a list of 1 values"),
    ],
)  # fmt: skip
def test_a_bad_request_is_told_precisely(
    server: RewardServer, scorer: Scorer, body: Any, message: str
) -> None:
    status, answer = ask(server, body)
    assert status == 400
    assert answer["error"].startswith(message)
    assert scorer.asked == []


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/", 404, "there is no POST /; allowed: POST /score, GET /health"),
        ("POST", "/scores?key=word", 404, "there is no POST /scores; allowed"),
        ("GET", "/score?key=word", 404, "there is no GET /score; allowed"),
        ("PUT", "/score", 501, "Unsupported method ('PUT')"),
    ],
)
def test_another_address_is_told(
    server: RewardServer, method: str, path: str, status: int, message: str
) -> None:
    found, answer = ask(server, request("r"), method, path)
    assert found == status
    assert answer["error"].startswith(message)


def test_a_body_may_be_so_large_and_no_larger(server: RewardServer) -> None:
    body = json.dumps(request("r")).encode()
    assert ask(server, body.ljust(1000))[0] == 200
    message = "the request has 1001 bytes; allowed: 1000; ask for fewer responses at once"
    assert ask(server, body.ljust(1001)) == (413, {"error": message})
    assert ask(server, b" " * 10_000_000)[0] == 413


@pytest.mark.parametrize(
    ("head", "status", "message"),
    [
        ("POST /score HTTP/1.1", "411", "there is no Content-Length"),
        ("POST /score HTTP/1.1\r\nContent-Length: -1", "400", "Content-Length is '-1', no number"),
        ("POST /score HTTP/1.1\r\nContent-Length: " + "9" * 5000, "400", "9', no number"),
        ("POST /score HTTP/9.9", "505", "Invalid HTTP version"),
        ("nonsense", "400", "Bad request syntax"),
    ],
)
def test_what_is_no_request_is_told(
    server: RewardServer, head: str, status: str, message: str
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        answer = connection.makefile().read()
    assert message in answer
    assert status in answer.splitlines()[0] or not answer.startswith("HTTP")


def test_a_client_that_hangs_up_is_no_fault(
    server: RewardServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for sent in (b"", b"POST /score HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)  # cut, not closed
            connection.sendall(sent)
        ask(server, b"", "GET", "/health")  # so that the one before it has been let in
    server.server_close()  # waits for all
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0, float("nan")], "the reward gave nan for responses[1], 's'"),
        ([float("inf"), 1.0], "the reward gave inf for responses[0], 'r'"),
        ([1.0], "the reward gave 1 scores for 2 responses"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (["good", 1.0], "ValueError: could not convert string to float: 'good'"),
    ],
)
def test_a_fault_of_the_reward_is_told(
    server: RewardServer,
    scorer: Scorer,
    scores: Any,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scorer.scores = scores
    with caplog.at_level(logging.ERROR):
        assert ask(server, request("r", "s")) == (500, {"error": message})
    assert ("could not be scored" in caplog.text) == ("Error" in message)
    scorer.scores = [0.5, 1]
    assert ask(server, request("r", "s")) == (200, {"scores": [0.5, 1.0]})


def test_closing_waits_for_what_has_come_in() -> None:
    entered, leave, answers = threading.Event(), threading.Event(), []

    def score(prompts: Any, responses: Any, columns: Any) -> list[float]:
        entered.set()
        leave.wait()
        return [1.0]

    server = RewardServer(score, "127.0.0.1", 0)
    client = threading.Thread(target=lambda: answers.append(ask(server, request("r"))))
    with running(server):
        client.start()
        entered.wait()
        server.shutdown()
        closing = threading.Thread(target=server.server_close)
        closing.start()
        closing.join(timeout=0.05)
        assert closing.is_alive()
        leave.set()
        closing.join()
    client.join()
    assert answers == [(200, {"scores": [1.0]})]


def test_a_port_that_is_taken_is_named(server: RewardServer, scorer: Scorer) -> None:
    taken = server.server_port
    with pytest.raises(ConfigError, match=f"no server at 127.0.0.1:{taken}: .*in use"):
        RewardServer(scorer, "127.0.0.1", taken)
    with pytest.raises(ConfigError, match=r"no server at .*:99999: "):
        RewardServer(scorer, "127.0.0.1", 99999)


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from lightning_rlhf.rewards.serve import serve
serve(lambda p, r, c: [1.0] * len(r), "127.0.0.1", 0, ready=lambda url: print(url, flush=True))
print("closed")
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(sign: signal.Signals) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        host, _, port = url.removeprefix("http://").removesuffix("/score").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("POST", "/score", json.dumps(request("r")))
        assert json.loads(connection.getresponse().read()) == {"scores": [1.0]}
        process.send_signal(sign)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "closed\n", "")
