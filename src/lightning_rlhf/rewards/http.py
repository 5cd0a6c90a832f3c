"""Reward computed by a server: any program that answers one POST request."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from urllib3 import Retry
from urllib3.exceptions import InvalidHeader

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.core.types import DecodedResponses
from lightning_rlhf.core.wording import counted
from lightning_rlhf.io.user_code import permitted
from lightning_rlhf.rewards.address import Address, redacted
from lightning_rlhf.rewards.connection import Answer, Away, Connection, NoAnswer, Unusable
from lightning_rlhf.rewards.quote import quoted

Question = Mapping[str, Any]
"""Prompt (as text and as messages), response and columns of one response."""

LONGEST_PAUSE_S = 120
"""Longest pause before a retry, seconds."""
GREETING_S = 10
"""Longest time that a greeting takes, seconds."""
ANSWER_BYTES, SCORE_BYTES = 2**20, 2**12
"""Maximum size of an answer, decompressed, bytes: a constant part, and a part per response. A score
takes about 25; the rest is room for anything else that a server sends."""
AGAIN = (408, 429, *(status for status in range(500, 600) if status not in (501, 505)))
"""Statuses after which a request is sent again, since the server may then succeed."""
NOT_OF_NOTHING = (200, 400, 422, *AGAIN)
"""Statuses with which a working server may answer a request for no scores."""


class HTTPReward:
    """Reward whose scores a server computes.

        POST {"prompts": [[{"role", "content"}, ...], ...], "responses": [...], "columns": {...}}
        200  {"scores": [...]}

    Each list has one entry per response. A column holds null where a row lacks it or where its
    value cannot be written as JSON. Scores are cached, so that a response is not sent twice.

    If a server closes the connection, sends no whole answer within timeout_s, or answers 408, 429
    or 5xx (except 501 and 505), the request is sent again after Retry-After or backoff_s * 2^(k-1)
    seconds, k the number of tries so far (no pause after the first, at most 120 s). The same holds
    for a server that cannot be reached, if it has answered before; otherwise that is an error at
    once. Redirects are not followed.
    """

    def __init__(
        self,
        url: str,
        *,
        batch_size: int,
        timeout_s: float,
        retries: int,
        backoff_s: float,
        cache_size: int,
        token_env: str | None,
        name: str,
        warn: Callable[[str], None],
    ) -> None:
        """Prepare the connection and the cache; nothing is sent yet.

        Args:
            url: http:// or https:// address, with user and password if the server requires them.
            batch_size: number of responses per request.
            timeout_s: seconds for each try, from name look-up to the last byte of the answer.
            retries: number of tries after the first.
            backoff_s: pause in the formula above, seconds.
            cache_size: number of scores kept; the least recently used are dropped first.
            token_env: environment variable with a token, sent as "Authorization: Bearer TOKEN".
            name: key of the reward in the configuration, which errors name.
            warn: function that receives a message for each failed try, with the pause before the
                next.
        """
        self._address = Address.read(url, token_env, name)
        permitted(self._address.shown, name)
        self._batch_size, self._tries, self._cache_size = batch_size, retries + 1, cache_size
        self._name, self._token_env, self._warn = name, token_env, warn
        self._server = f"{name}: the server {self._address.shown}"
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._timeout_s, self._backoff_s = timeout_s, backoff_s
        self._connection = Connection(self._address.url, self._address.headers)
        self._has_answered = False

    def greet(self) -> None:
        """Request the scores of no responses, to detect a missing server early.

        A server that answers 400, 422 or a status after which requests are sent again, or does not
        answer within ten seconds, may work later. That no answer came is reported through `warn`.

        Raises:
            RewardError: there is no server, or it is not a reward server.
        """
        timeout_s = min(self._timeout_s, GREETING_S)
        try:
            answer = self._post([], timeout_s)
        except Away as error:
            raise self._not_there(error) from error
        except NoAnswer:
            words = f"did not answer the greeting within {timeout_s:g} s; the run goes on"
            self._warn(self._address.hide(f"{self._server} {words}"))
            return
        if answer.status not in NOT_OF_NOTHING:
            raise self._refused(answer)
        if answer.status == 200:
            self._scores(answer.data, [])

    def __call__(self, decoded: DecodedResponses) -> list[float]:
        questions = [_question(*pair) for pair in zip(decoded.rows, decoded.responses, strict=True)]
        keys = [hashlib.sha256(_json(question)).digest() for question in questions]
        known = {key: self._cache[key] for key in keys if key in self._cache}
        open_ = {k: q for k, q in zip(keys, questions, strict=True) if k not in known}
        for start in range(0, len(open_), self._batch_size):
            asked = dict(itertools.islice(open_.items(), start, start + self._batch_size))
            answers = dict(zip(asked, self._ask(list(asked.values())), strict=True))
            self._remember(answers)
            known |= answers
        self._remember(known)
        return [known[key] for key in keys]

    def _remember(self, scores: Mapping[bytes, float]) -> None:
        for key, score in scores.items():
            self._cache[key] = score
            self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def _ask(self, questions: Sequence[Question]) -> list[float]:
        for done in itertools.count(1):
            answer = None
            try:
                answer = self._post(questions, self._timeout_s)
            except NoAnswer as error:
                if isinstance(error, Away) and not self._has_answered:
                    raise self._not_there(error) from error
                if done == self._tries:
                    often = "1 try" if done == 1 else f"{done} tries"
                    raise self._error(f"did not answer for {often}: it {error}") from error
                reason = str(error)
            else:
                if answer.status == 200:
                    return self._scores(answer.data, questions)
                if done == self._tries or answer.status not in AGAIN:
                    raise self._refused(answer)
                reason = f"answered {answer.status}"
            pause_s = _asked_pause_s(answer)
            if pause_s is None:
                pause_s = self._pause_s(done)
            words = f"{self._server} {reason}; try {done + 1} of {self._tries} in {pause_s:.3g} s"
            self._warn(self._address.hide(words))
            time.sleep(pause_s)
        raise AssertionError("the last try ends with an answer or an error")

    def _pause_s(self, done: int) -> float:
        """Return the pause in seconds after `done` tries if the server asks for none."""
        doubled = self._backoff_s * 2.0 ** min(done - 1, 64)
        return 0.0 if done == 1 else min(doubled, LONGEST_PAUSE_S)

    def _post(self, questions: Sequence[Question], timeout_s: float) -> Answer:
        absent = dict.fromkeys(name for q in questions for name in q["columns"])
        columns = [{**absent, **q["columns"]} for q in questions]
        body = {
            "prompts": [q["messages"] for q in questions],
            "responses": [q["response"] for q in questions],
            "columns": {name: [row[name] for row in columns] for name in absent},
        }
        max_bytes = ANSWER_BYTES + SCORE_BYTES * len(questions)
        try:
            answer = self._connection.post(_json(body), timeout_s=timeout_s, max_bytes=max_bytes)
        except Unusable as error:
            raise self._error(f"cannot be used: {error}") from error
        self._has_answered = True
        return answer

    def _scores(self, data: bytes, questions: Sequence[Question]) -> list[float]:
        allowed = f'allowed: {{"scores": [{len(questions)} numbers]}}'
        try:
            answer = json.loads(data, parse_int=float)
        except (ValueError, RecursionError):
            raise self._error(f"answered no JSON: {_first_line(data)}; {allowed}") from None
        if not isinstance(answer, dict) or "scores" not in answer:
            raise self._error(f'answered {quoted(answer)}, which has no "scores"; {allowed}')
        scores = answer["scores"]
        if not isinstance(scores, list):
            raise self._error(f'answered "scores": {quoted(scores)}; {allowed}')
        if len(scores) != len(questions):
            raise self._error(
                f"gave {counted(len(scores), 'score')} for {counted(len(questions), 'response')}"
            )
        for score, question in zip(scores, questions, strict=True):
            if not isinstance(score, float) or not math.isfinite(score):
                raise self._error(
                    f"gave {quoted(score)} for the response {quoted(question['response'])} to "
                    f"the prompt {quoted(question['prompt'])}; allowed: a finite number"
                )
        return scores

    def _not_there(self, error: Away) -> RewardError:
        return self._error(f"{error}; it has never answered: start it, or mend {self._name}.url")

    def _refused(self, answer: Answer) -> RewardError:
        status = answer.status
        is_last = status in AGAIN and self._tries > 1
        often = f" to the last of {self._tries} tries" if is_last else ""
        advice = ""
        if status in (401, 403):
            sent = "a wrong" if "authorization" in self._address.headers else "no"
            advice = (
                f"; {sent} token was sent: {self._name}.token_env names the environment variable "
                "that holds it"
            )
        elif 300 <= status < 400:
            where = redacted(answer.headers.get("location", "nowhere"))
            advice = f"; a redirect to {where!r} is not followed: {self._name}.url is to be it"
        return self._error(f"answered {status}{often}: {_first_line(answer.data)}{advice}")

    def _error(self, what: str) -> RewardError:
        return RewardError(f"{self._server} {' '.join(self._address.hide(what).splitlines())}")


def _asked_pause_s(answer: Answer | None) -> float | None:
    """Return the seconds of Retry-After; None if there are none, or none that can be read."""
    if answer is None:
        return None
    try:
        return Retry(retry_after_max=LONGEST_PAUSE_S).get_retry_after(answer.response)
    except (InvalidHeader, ValueError, OverflowError):
        return None


def _question(row: Mapping[str, Any], response: str) -> Question:
    columns = {name: x for name, x in row.items() if name not in ("prompt", "messages")}
    return {
        "prompt": row["prompt"],
        "messages": [{"role": m["role"], "content": m["content"]} for m in row["messages"]],
        "response": response,
        "columns": {name: x for name, x in columns.items() if x is not None and _is_json(x)},
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _is_json(value: Any) -> bool:
    try:
        _json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _first_line(data: bytes) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[0][:300] if lines else "nothing"
