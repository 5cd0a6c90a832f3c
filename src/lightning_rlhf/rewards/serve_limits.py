"""Connections to a reward server that keep to its limits."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightning_rlhf.rewards.limits import Limits


class BoundedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1, with a bound of connections and of the time that a head takes.

    What uvicorn has no setting for; it answers what is no HTTP in JSON, as all else is answered.
    """

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"there are {self.limits.connections} connections already; come again",
            )
        else:
            self._expect_head(after=None)

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()  # it may begin with the next request
        self._expect_head(after=answered)

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            HTTPStatus.BAD_REQUEST,
            "the request is no HTTP/1.1, or its line and headers have more than "
            f"{self.limits.head_bytes} bytes",
        )

    def _expect_head(self, after: object) -> None:
        """Hang up after `head_s` seconds, unless another request than `after` has begun."""

        def hang_up() -> None:
            if self.cycle is after:
                self.transport.abort()

        self.loop.call_later(self.limits.head_s, hang_up)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Say why and hang up; without a word where an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body(reason)
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                *RETRY_AFTER.items(),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


RETRY_AFTER = {"retry-after": "1"}


def error_body(reason: str) -> bytes:
    """Return the body of every answer without scores."""
    return json.dumps({"error": reason}).encode()


def protocol(limits: Limits) -> Any:
    """Return what uvicorn makes a protocol for each connection with."""
    return partial(BoundedProtocol, limits=limits)
