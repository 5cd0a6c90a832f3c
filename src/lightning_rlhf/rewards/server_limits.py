"""HTTP protocol of a reward server that enforces its limits."""

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
    """Uvicorn's HTTP/1.1 protocol with limits on connections and on the time that a head takes.

    Uvicorn has no settings for these limits. A request that is not HTTP is answered in JSON, like
    all others.
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
        super().on_response_complete()  # may start the next request
        self._expect_head(after=answered)

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            HTTPStatus.BAD_REQUEST,
            "the request is no HTTP/1.1, or its line and headers have more than "
            f"{self.limits.head_bytes} bytes",
        )

    def _expect_head(self, after: object) -> None:
        """Hang up after `head_s` seconds, unless a request other than `after` has begun."""

        def hang_up() -> None:
            if self.cycle is after:
                self.transport.abort()

        self.loop.call_later(self.limits.head_s, hang_up)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Send the reason and hang up; only hang up if an answer has begun."""
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
"""Header that asks a client to send its request again after one second."""


def error_body(reason: str) -> bytes:
    """Return the JSON body of an answer without scores."""
    return json.dumps({"error": reason}).encode()


def protocol(limits: Limits) -> Any:
    """Return the factory from which uvicorn makes a protocol for each connection."""
    return partial(BoundedProtocol, limits=limits)
