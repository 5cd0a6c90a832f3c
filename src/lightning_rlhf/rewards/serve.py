"""The server half of `rewards.http`: a reward behind one POST, on uvicorn and starlette."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.rewards.protocol import Score, read_request
from lightning_rlhf.rewards.quote import quoted
from lightning_rlhf.rewards.serve_limits import RETRY_AFTER, Limits, error_body, protocol
from lightning_rlhf.rewards.threads import in_thread

ADDRESSES = "POST /score, GET /health"

_log = logging.getLogger(__name__)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address, at which nobody is listened to yet.

    Args:
        host: name of this machine, IPv4 or IPv6 address.
        port: 0 for any that is free.

    Raises ConfigError where there can be no server.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not host.strip():
            raise OSError("an empty host is every address of this machine: 0.0.0.0 or :: says so")
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, OverflowError, ValueError, TypeError) as error:
        raise ConfigError(f"there can be no server at {host!r}, port {port}: {error}") from error
    return made


class RewardServer:
    """POST /score and GET /health. One request is read and scored at a time."""

    def __init__(
        self,
        score: Score,
        bound_to: socket.socket,
        *,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        """
        Args:
            score: asked for the scores of one request at a time, in a thread of its own.
            bound_to: from `bound`.
            token: what a request for scores must bring as "Authorization: Bearer TOKEN".
            limits: of what clients may use.
        """
        self.limits = limits or Limits()
        self._score, self._socket = score, bound_to
        bound_to.listen()  # who connects now is answered once `run` is called
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._held_bytes = 0
        self._turn = asyncio.Lock()
        routes = [
            Route("/score", self._post, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
        self.app.router.redirect_slashes = False
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app, http=protocol(self.limits), ws="none", loop="asyncio", lifespan="off",
                log_config=None, log_level="critical", access_log=False, proxy_headers=False,
                server_header=False, h11_max_incomplete_event_size=self.limits.head_bytes,
                timeout_graceful_shutdown=self.limits.stop_s,
            )
        )  # fmt: skip

    @property
    def host(self) -> str:
        """The address that it listens at."""
        return str(self._socket.getsockname()[0])

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where scores are asked for."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/score"

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach it."""
        return not ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Call `ready`, then answer until Ctrl-C, SIGTERM or `stop`.

        Requests that have come in are answered first, if that takes no more than `limits.stop_s`.
        """
        with _sigterm_as_interrupt(), suppress(KeyboardInterrupt):
            ready()
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`, which another thread is in."""
        self._server.should_exit = True

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _post(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._authorization and not hmac.compare_digest(given, self._authorization):
            raise HTTPException(
                HTTPStatus.UNAUTHORIZED, "no token, or a wrong one", {"www-authenticate": "Bearer"}
            )
        body = bytearray()
        try:
            await self._read(request, body)
            async with self._turn:
                if await request.is_disconnected():
                    return Response()  # which nobody reads
                scores = await asyncio.wrap_future(in_thread(lambda: self._scores(bytes(body))))
        except ClientDisconnect:
            return Response()
        finally:
            self._held_bytes -= len(body)
        return JSONResponse({"scores": scores})

    async def _read(self, request: Request, body: bytearray) -> None:
        """Append the body of a request; as it grows, it counts as held."""
        limits = self.limits
        try:
            async with asyncio.timeout(limits.body_s):
                async for piece in request.stream():
                    body += piece
                    self._held_bytes += len(piece)
                    if len(body) > limits.body_bytes:
                        raise HTTPException(
                            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                            f"the request has more than {limits.body_bytes} bytes; ask for fewer "
                            "responses at once",
                        )
                    if self._held_bytes > limits.held_bytes:
                        raise HTTPException(
                            HTTPStatus.SERVICE_UNAVAILABLE,
                            f"{limits.held_bytes} bytes of requests wait already; come again",
                            RETRY_AFTER,
                        )
        except TimeoutError:
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {limits.body_s:g} s"
            ) from None

    def _scores(self, body: bytes) -> list[float]:
        """Return the answer to a request, which other code computes in whatever way."""
        try:
            asked = read_request(body)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        responses = asked.responses
        try:
            scores = [float(x) for x in self._score(asked.prompts, responses, asked.columns)]
        except RLHFError as error:  # of a dialogue that the model has no template for, say
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
        except (Exception, SystemExit) as error:
            _log.exception("%d responses could not be scored", len(responses))
            raise _failed(f"{type(error).__name__}: {error}") from None
        if len(scores) != len(responses):
            raise _failed(f"the reward gave {len(scores)} scores for {len(responses)} responses")
        for i, score in enumerate(scores):
            if not math.isfinite(score):
                raise _failed(f"the reward gave {score} for responses[{i}], {quoted(responses[i])}")
        return scores


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = error.detail
    if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        asked = f"{request.method} {request.url.path}"[:300]
        reason = f"there is no {asked}; allowed: {ADDRESSES}"
    return Response(
        error_body(reason), error.status_code, error.headers, media_type="application/json"
    )


def _failed(reason: str) -> HTTPException:
    return HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, reason)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, which uvicorn does with it where it has ended."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # signals belong to the main thread, and this is another
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
