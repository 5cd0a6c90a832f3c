"""A reward that a server gives: any program that answers one POST."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from urllib3 import BaseHTTPResponse, PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError, MaxRetryError, ProtocolError, ReadTimeoutError

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.core.types import Replies
from lightning_rlhf.rewards.address import Address
from lightning_rlhf.rewards.quote import quoted

Question = Mapping[str, Any]
"""The prompt, as text and as messages, the response and the columns of one response."""

LONGEST_PAUSE_S = 120
AGAIN = (429, *range(500, 600))
"""Statuses of a server that may do better when it is asked again."""
WRONG = (401, 403, 404, 405)
"""Statuses of a server that will not do better, whatever it is asked."""


class HTTPReward:
    """Scores that a server gives.

        POST {"prompts": [[{"role", "content"}, ...], ...], "responses": [...], "columns": {...}}
        200  {"scores": [...]}

    Each list has a member for each response. A column holds null where a row lacks it or where its
    value cannot be written as JSON. What was asked before is not asked again.

    A server that does not answer, or answers 429 or 5xx, is asked again after Retry-After or
    backoff_s * 2^(k-1) seconds, k the tries so far (none after the first, 120 s at most).
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
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            url: http:// or https://, with user and password where the server wants them.
            batch_size: responses a request.
            timeout_s: to connect, and between two pieces of an answer.
            retries: tries after the first.
            backoff_s: as above.
            cache_size: scores kept; those that were wanted longest ago are forgotten first.
            token_env: environment variable with a token, sent as "Authorization: Bearer TOKEN".
            name: its key in the configuration, which errors name.
            tell: is told of each try that failed, and how long the next one waits.
        """
        self._address = Address.read(url, token_env, name)
        self._batch_size, self._tries, self._cache_size = batch_size, retries + 1, cache_size
        self._name, self._token_env, self._tell = name, token_env, tell
        self._server = f"{name}: the server {self._address.shown}"
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._pool = PoolManager(
            headers=self._address.headers,
            timeout=Timeout(connect=timeout_s, read=timeout_s),
            retries=False,
        )
        self._retries = _Tries(
            total=retries,
            backoff_factor=backoff_s,
            status_forcelist=AGAIN,
            allowed_methods=("POST",),
            raise_on_status=False,
            retry_after_max=LONGEST_PAUSE_S,
        )
        self._retries.tell = self._failed

    def greet(self) -> None:
        """Ask for the scores of no responses, to learn early that nobody is there.

        A server that cannot do that, answering 400 or 5xx or hanging up, may do better later.

        Raises:
            RewardError: there is no server, or another one than the one that is meant.
        """
        once = self._retries.new(read=0, status_forcelist=())
        try:
            status, data = self._post([], once)
        except MaxRetryError as error:
            if isinstance(error.reason, ReadTimeoutError | ProtocolError):
                return
            raise self._gone(str(error.reason)) from error.reason
        if status in WRONG:
            raise self._refused(status, data)
        if status == 200:
            self._scores(data, [])

    def __call__(self, replies: Replies) -> list[float]:
        questions = [_question(*pair) for pair in zip(replies.rows, replies.responses, strict=True)]
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
        try:
            status, data = self._post(questions, self._retries)
        except MaxRetryError as error:  # its own text has the query of the address
            raise self._gone(str(error.reason)) from error.reason
        if status != 200:
            raise self._refused(status, data)
        return self._scores(data, questions)

    def _post(self, questions: Sequence[Question], retries: Retry) -> tuple[int, bytes]:
        """Status and body of the answer."""
        absent = dict.fromkeys(name for q in questions for name in q["columns"])
        columns = [{**absent, **q["columns"]} for q in questions]
        body = {
            "prompts": [q["messages"] for q in questions],
            "responses": [q["response"] for q in questions],
            "columns": {name: [row[name] for row in columns] for name in absent},
        }
        try:
            answer = self._pool.request(
                "POST", self._address.url, body=_json(body), redirect=False, retries=retries
            )
        except MaxRetryError:
            raise
        except HTTPError as error:
            raise self._error(f"cannot be understood: {type(error).__name__}: {error}") from None
        return answer.status, answer.data

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
            raise self._error(f"gave {len(scores)} scores for {len(questions)} responses")
        for score, question in zip(scores, questions, strict=True):
            if not isinstance(score, float) or not math.isfinite(score):
                raise self._error(
                    f"gave {quoted(score)} for the response {quoted(question['response'])} to "
                    f"the prompt {quoted(question['prompt'])}; allowed: a finite number"
                )
        return scores

    def _failed(self, retries: Retry, wait_s: float) -> None:
        """Say which try failed, why, and how long the next one waits."""
        last = retries.history[-1]
        reason = f"answered {last.status}" if last.error is None else f"is away: {last.error}"
        done, wait = len(retries.history), f"{wait_s:.3g} s"
        words = f"{self._server} {reason}; try {done + 1} of {self._tries} in {wait}"
        self._tell(self._address.hide(words))

    def _gone(self, reason: str) -> RewardError:
        return self._error(
            f"did not answer for {self._tries} {'try' if self._tries == 1 else 'tries'} ({reason})"
        )

    def _refused(self, status: int, data: bytes) -> RewardError:
        is_last = status in AGAIN and self._tries > 1
        often = f" to the last of {self._tries} tries" if is_last else ""
        advice = ""
        if status in (401, 403):
            sent = "a wrong" if "authorization" in self._address.headers else "no"
            advice = (
                f"; {sent} token was sent: {self._name}.token_env names the environment variable "
                "that holds it"
            )
        return self._error(f"answered {status}{often}: {_first_line(data)}{advice}")

    def _error(self, what: str) -> RewardError:
        return RewardError(f"{self._server} {self._address.hide(what)}")


class _Tries(Retry):
    """Urllib3's tries, which tell of each that failed."""

    tell: Callable[[Retry, float], None]

    def new(self, **changes: Any) -> _Tries:
        found = super().new(**changes)
        found.tell = self.tell
        return found

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        wanted = None if response is None else self.get_retry_after(response)
        self.tell(self, wanted or self.get_backoff_time())
        super().sleep(response)


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
