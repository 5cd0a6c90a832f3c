"""Reward server on uvicorn and starlette: the counterpart of `rewards.http`."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http import HTTPStatus
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.core.wording import counted
from lightning_rlhf.io.user_code import FAULTS
from lightning_rlhf.io.visible import visible
from lightning_rlhf.rewards.limits import Limits
from lightning_rlhf.rewards.protocol import Score, read_request
from lightning_rlhf.rewards.quote import quoted
from lightning_rlhf.rewards.server_limits import RETRY_AFTER, error_body, protocol
from lightning_rlhf.rewards.threads import Handed, in_thread

ADDRESSES = "POST /score, GET /health"
"""Requests that the server answers, for errors."""

_log = logging.getLogger(__name__)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address but does not listen yet.

    Args:
        host: name of this machine, or an IPv4 or IPv6 address.
        port: port number; 0 for any that is free.

    Raises ConfigError if no server can be started at this address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not host.strip():
            raise OSError("an empty host is every address of this machine: 0.0.0.0 or :: says so")
        # asyncio disables Nagle's algorithm only on a socket that names TCP.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, OverflowError, ValueError, TypeError) as error:
        raise ConfigError(f"there can be no server at {host!r}, port {port}: {error}") from error
    return made


class RewardServer:
    """Server of POST /score and GET /health, which reads and scores one request at a time."""

    def __init__(
        self,
        score: Score,
        bound_to: socket.socket,
        *,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Set up the server and listen; connections are answered once `run` is called.

        Args:
            score: function that scores one request at a time; called in the main thread if `run`
                is, else in a thread of its own.
            bound_to: socket from `listening_socket`.
            token: token that a request for scores must send as "Authorization: Bearer TOKEN"; None
                requires none.
            limits: limits on what clients may use; None for the default ones.
        """
        self.limits = limits or Limits()
        self._score, self._socket = score, bound_to
        bound_to.listen()  # clients that connect now are answered by `run`
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._held_bytes = 0
        self._turn = asyncio.Lock()
        self._do: Callable[[Callable[[], list[float]]], Future[list[float]]] = in_thread
        routes = [
            Route("/score", self._post, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        self.app = Starlette(
            routes=routes, exception_handlers={HTTPException: _refused, Exception: _faulty}
        )
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
        """Return the address that the server listens at."""
        return str(self._socket.getsockname()[0])

    @property
    def port(self) -> int:
        """Return the port that the server listens at."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Return the URL to which requests for scores are sent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/score"

    @property
    def is_open(self) -> bool:
        """Return whether other machines may be able to reach the server."""
        return not ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Call `ready`, then answer requests until Ctrl-C, SIGTERM or `stop`.

        Requests that were received before are still answered, for at most `limits.stop_s` seconds.
        """
        if threading.current_thread() is threading.main_thread():
            self._run_beside(ready)
        else:
            ready()
            self._server.run(sockets=[self._socket])

    def _run_beside(self, ready: Callable[[], None]) -> None:
        """Run the server in another thread, and score in this one, the main thread."""
        work, is_over = Handed(), threading.Event()
        self._do = work.hand

        def handle(sign: int, frame: FrameType | None) -> None:
            if is_over.is_set():
                raise KeyboardInterrupt
            self._server.handle_exit(sign, frame)

        def serve() -> None:
            try:
                self._server.run(sockets=[self._socket])
            finally:
                work.end()
                is_over.set()
                # Interrupt a score that does not return.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        with _handling(handle):
            ready()
            served = in_thread(serve)
            with suppress(KeyboardInterrupt):
                try:
                    work.do_all()
                finally:
                    served.exception()  # wait until the signal above has arrived
        served.result()

    def stop(self) -> None:
        """End `run` from another thread."""
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
                    return Response()  # nobody reads it
                scores = await asyncio.wrap_future(self._do(lambda: self._scores(body)))
        except ClientDisconnect:
            return Response()
        finally:
            self._held_bytes -= len(body)
        return JSONResponse({"scores": scores})

    async def _read(self, request: Request, body: bytearray) -> None:
        """Append the body of a request to `body`; its bytes count as held while it grows."""
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

    def _scores(self, body: bytearray) -> list[float]:
        """Return the scores of a request; raise HTTPException whatever the reward's code raises."""
        try:
            asked = read_request(body)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        responses = asked.responses
        try:
            scores = [float(x) for x in self._score(asked.prompts, responses, asked.columns)]
        except RLHFError as error:  # e.g. the template rejects a dialogue
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
        except FAULTS as error:
            _log_fault(f"{counted(len(responses), 'response')} could not be scored", error)
            raise _failed(f"{type(error).__name__}: {error}") from None
        if len(scores) != len(responses):
            raise _failed(
                f"the reward gave {counted(len(scores), 'score')} for "
                f"{counted(len(responses), 'response')}"
            )
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


async def _faulty(request: Request, error: Exception) -> Response:
    """Return an internal server error; Starlette raises the exception again, which is not shown."""
    _log_fault("a request could not be answered", error)
    return await _refused(request, _failed(f"{type(error).__name__}: {error}"))


def _log_fault(what: str, error: BaseException) -> None:
    """Log an error with its traceback, in which texts of others may be quoted."""
    _log.error("%s", visible("".join([what, "\n", *traceback.format_exception(error)]).rstrip()))


def _failed(reason: str) -> HTTPException:
    return HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, reason)


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM with `handle` inside the context."""
    before = {sign: signal.signal(sign, handle) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
