"""Reward computed by a server: any program that answers one POST request."""

import contextlib
import hashlib
import json
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from itertools import islice
from math import inf, isfinite
from typing import Any
from urllib.parse import unquote

from urllib3 import Retry
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, InvalidHeader
from urllib3.response import BaseHTTPResponse
from urllib3.util import make_headers

from lightning_rlhf.core.errors import RewardError, quoted, require
from lightning_rlhf.core.records import DecodedResponses
from lightning_rlhf.io.user_code import permitted
from lightning_rlhf.rewards.config import HIDDEN, HTTPConfig, parsed, redacted, token_in

Question = Mapping[str, Any]
"""Prompt (as text and as messages), response and columns of one response."""

LONGEST_PAUSE_S = 120
"""Longest pause before a retry, seconds."""
CHECK_S = 10
"""Longest time that the check of a server takes, seconds."""
ANSWER_BYTES = 2**24
"""Maximum size of an answer, bytes; a score takes about 25."""
PIECE_BYTES = 2**16
"""Size of the pieces in which an answer is read, bytes."""
AGAIN = (408, 429, *(status for status in range(500, 600) if status not in (501, 505)))
"""Statuses after which a request is sent again, since the server may then succeed."""


class Client:
    """Connections to one address, one for each thread. Redirects are not followed."""

    def __init__(
        self, url: str, token_env: str | None, prefix: str, who: str, warn: Callable[[str], None]
    ) -> None:
        """Prepare the connections; nothing is sent yet.

        url: address; a user, a password and a query in it are sent and never shown.
        prefix: start of the keys `url` and `token_env` in the configuration, with a dot.
        who: words for the server in messages, before its address, which `warn` is given.

        Raises ConfigError where the address is none, the token is missing, or there are both a
        token and a user in the address.
        """
        shown = redacted(url)
        permitted(shown, f"{prefix}url")
        self._prefix, self._warn, self._url = prefix, warn, parsed(url, f"{prefix}url")
        user, self._headers = self._url.auth, {"content-type": "application/json"}
        self._secrets = [self._url.query or ""]
        allowed = f"null, as {prefix}url has a user"
        require(not user or token_env is None, f"{prefix}token_env", token_env, allowed)
        if user:
            self._headers |= make_headers(basic_auth=unquote(user))
            password, coded = user.partition(":")[2], self._headers["authorization"].split()[1]
            self._secrets += (user, coded, password, unquote(password))
        if token_env is not None:
            self._secrets.append(token_in(token_env, f"{prefix}token_env"))
            self._headers["authorization"] = f"Bearer {self._secrets[-1]}"
        self._server = f"{who} {shown}"
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        self._make = partial(kind, str(self._url.host).strip("[]"), self._url.port)
        self._own = threading.local()
        self._has_answered = False

    def ask(
        self, body: bytes, *, timeout_s: float, retries: int, backoff_s: float, all_s: float = inf
    ) -> bytes:
        """Return the body of an answer of status 200.

        If the server closes the connection, sends no whole answer within timeout_s, or answers 408,
        429 or 5xx (except 501 and 505), the request is sent again, at most `retries` times and for
        all_s seconds in all, after Retry-After or backoff_s * 2^(k-1) seconds, k the number of
        tries so far (no pause after the first, at most 120 s). The same holds for a server that
        cannot be reached, if it has answered before. Raises RewardError for anything else.
        """
        tries, done, ends = retries + 1, 0, time.monotonic() + all_s
        while True:
            done += 1
            # No pause after the first try; an exponent of 64 is beyond the longest pause.
            pause_s = min(backoff_s * 2.0 ** min(done - 1, 64), LONGEST_PAUSE_S) * (done > 1)
            is_last = done == tries
            try:
                left = max(ends - time.monotonic(), 1e-3)
                answer, data = self.send(body, min(timeout_s, left))
            except NoAnswer as error:
                if is_last or time.monotonic() + pause_s >= ends:
                    raise self.error(f"did not answer in {done} tries: it {error}") from error
                reason = str(error)
            else:
                if answer.status == 200:
                    return data
                reason = f"answered {answer.status}"
                with contextlib.suppress(InvalidHeader, ValueError, OverflowError):
                    after_s = Retry(retry_after_max=LONGEST_PAUSE_S).get_retry_after(answer)
                    pause_s = pause_s if after_s is None else after_s
                is_late = time.monotonic() + pause_s >= ends
                if is_last or is_late or answer.status not in AGAIN:
                    raise self.refused(answer, data)
            self.warn(f"{reason}; try {done + 1} of {tries} in {pause_s:.3g} s")
            time.sleep(pause_s)

    def send(self, body: bytes, timeout_s: float) -> tuple[BaseHTTPResponse, bytes]:
        """Send one request; return the head of the answer and its whole body.

        Raises:
            NoAnswer: no whole answer came within timeout_s seconds; a try more may help.
            RewardError: the answer cannot be used, and would not be better if asked for again.
        """
        if not hasattr(self._own, "connection"):
            self._own.connection = self._make()
        connection, data, is_reached, is_whole = self._own.connection, bytearray(), False, False
        end, timer = time.monotonic() + timeout_s, None
        try:
            connection.timeout = timeout_s
            if not connection.is_connected:  # not opened yet, or closed by the server
                connection.close()
                connection.connect()
            is_reached = True
            connection.timeout = max(end - time.monotonic(), 1e-3)
            timer = threading.Timer(connection.timeout, _cut, [connection.sock])
            timer.start()
            path = self._url.request_uri
            connection.request("POST", path, body, self._headers, preload_content=False)
            answer = connection.getresponse()
            while piece := answer.read(PIECE_BYTES, decode_content=False):
                data += piece
                if len(data) > ANSWER_BYTES:
                    raise self.error(f"cannot be used: its answer has over {ANSWER_BYTES} bytes")
            if time.monotonic() >= end:  # what was cut looks whole where no length was announced
                raise TimeoutError
            is_whole = self._has_answered = True
            return answer, bytes(data)
        except (OSError, HTTPException, HTTPError) as error:
            reason = str(error) or type(error).__name__
            if type(error) in (ssl.SSLError, ssl.SSLCertVerificationError):
                raise self.error(f"cannot be used: no trusted TLS: {reason}") from error
            if time.monotonic() >= end:
                reason = f"no {'whole answer' if is_reached else 'connection'} in {timeout_s:g} s"
            if not is_reached and not self._has_answered:
                advice = f"it has never answered: start it, or fix {self._prefix}url"
                raise self.error(f"is away: {reason}; {advice}") from error
            raise NoAnswer(f"{'gave no answer' if is_reached else 'is away'}: {reason}") from error
        finally:
            if timer is not None:
                timer.cancel()
            if not is_whole:
                connection.close()

    def refused(self, answer: BaseHTTPResponse, data: bytes) -> RewardError:
        """Return the error about an answer that is not asked for again."""
        status, advice = answer.status, ""
        if status in (401, 403):
            advice = f"; {self._prefix}token_env names the variable with the token that it asks for"
        elif 300 <= status < 400:
            where = redacted(answer.headers.get("location", "nowhere"))
            advice = f"; its redirect to {where!r} is not followed"
        return self.error(f"answered {status}: {start_of(data)}{advice}")

    def error(self, what: str) -> RewardError:
        """Return an error about the server, of one line, without our secrets."""
        return RewardError(f"{self._server} {' '.join(self._hide(what).splitlines())}")

    def warn(self, what: str) -> None:
        """Give a message about the server to `warn`, without our secrets."""
        self._warn(f"{self._server} {self._hide(what)}")

    def _hide(self, text: str) -> str:
        """Return a message of the server or a library without our secrets."""
        for secret in filter(None, self._secrets):
            text = text.replace(secret, HIDDEN)
        return text


class HTTPReward:
    """Reward whose scores a server computes.

        POST {"prompts": [[{"role", "content"}, ...], ...], "responses": [...], "columns": {...}}
        200  {"scores": [...]}

    Each list has one entry per response. A column holds null where a row lacks it or where its
    value cannot be written as JSON. Scores are cached, so that a response is not sent twice.
    """

    def __init__(self, config: HTTPConfig, name: str, warn: Callable[[str], None]) -> None:
        """Prepare the connection and the cache; nothing is sent yet.

        Args:
            config: the component's section; each try takes at most `timeout_s`, from connecting to
                the last byte of the answer, and of the scores the most recently used are kept.
            name: key of the reward in the configuration, which errors name.
            warn: function that receives a message for each failed try.

        Raises ConfigError as `Client` does.
        """
        who = f"{name}: the server"
        self._client = Client(config.url, config.token_env, f"{name}.", who, warn)
        self._config = config
        self._cache: OrderedDict[bytes, float] = OrderedDict()

    def check_server(self) -> None:
        """Request the scores of no responses, to detect a missing server early.

        A server that answers 400, 422 or a status after which requests are sent again, or does not
        answer within ten seconds, may work later; `warn` gets a message about the latter.

        Raises RewardError where there is no server, or it is not a reward server.
        """
        try:
            answer, data = self._client.send(_body([]), min(self._config.timeout_s, CHECK_S))
        except NoAnswer as error:
            self._client.warn(f"did not answer the first request: it {error}; the run continues")
            return
        if answer.status == 200:
            self._scores(data, [])
        elif answer.status not in (400, 422, *AGAIN):
            raise self._client.refused(answer, data)

    def __call__(self, decoded: DecodedResponses) -> list[float]:
        questions = [_question(*pair) for pair in zip(decoded.rows, decoded.responses, strict=True)]
        keys = [hashlib.sha256(_json(question)).digest() for question in questions]
        config = self._config
        limits = {"timeout_s": config.timeout_s, "backoff_s": config.backoff_s}
        open_ = {k: q for k, q in zip(keys, questions, strict=True) if k not in self._cache}
        for start in range(0, len(open_), size := config.batch_size):
            chunk = dict(islice(open_.items(), start, start + size))
            data = self._client.ask(_body([*chunk.values()]), retries=config.retries, **limits)
            self._cache |= zip(chunk, self._scores(data, [*chunk.values()]), strict=True)
        for key in keys:
            self._cache.move_to_end(key)
        found = [self._cache[key] for key in keys]
        while len(self._cache) > config.cache_size:
            self._cache.popitem(last=False)
        return found

    def _scores(self, data: bytes, questions: Sequence[Question]) -> list[float]:
        allowed = f'allowed: {{"scores": [{len(questions)} numbers]}}'
        try:
            answer = json.loads(data, parse_int=float)
        except (ValueError, RecursionError):
            raise self._client.error(f"answered no JSON: {start_of(data)}; {allowed}") from None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(questions):
            raise self._client.error(f"answered {quoted(answer)}; {allowed}")
        for score, question in zip(scores, questions, strict=True):
            if not isinstance(score, float) or not isfinite(score):
                shown = f"{quoted(question['response'])} to the prompt {quoted(question['prompt'])}"
                given = f"gave {quoted(score)} for the response {shown}"
                raise self._client.error(f"{given}; allowed: a finite number")
        return scores


class NoAnswer(Exception):
    """Raised if no whole answer arrived in time; the message is a clause without a subject."""


def _cut(connection: socket.socket) -> None:
    """End the reading of an answer, however slowly it comes.

    A timeout of a socket limits each read alone, and a server can make an answer take any number.
    """
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def _question(row: Mapping[str, Any], response: str) -> Question:
    columns = {}
    for name, value in row.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # no JSON: it is not sent
            if name not in ("prompt", "messages") and value is not None and _json(value):
                columns[name] = value
    return {
        "prompt": row["prompt"],
        "messages": [{"role": m["role"], "content": m["content"]} for m in row["messages"]],
        "response": response,
        "columns": columns,
    }


def _body(questions: Sequence[Question]) -> bytes:
    names = dict.fromkeys(name for q in questions for name in q["columns"])
    columns = {name: [q["columns"].get(name) for q in questions] for name in names}
    prompts, responses = ([q[key] for q in questions] for key in ("messages", "response"))
    return _json({"prompts": prompts, "responses": responses, "columns": columns})


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def start_of(data: bytes) -> str:
    """Return the first line of an answer, to be shown."""
    return data.decode(errors="replace").strip().partition("\n")[0][:300] or "nothing"
