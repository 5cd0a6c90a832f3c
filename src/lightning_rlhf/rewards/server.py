"""Reward server on uvicorn and starlette: the counterpart of `rewards.http`."""

import asyncio
import hmac
import ipaddress
import logging
import math
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typing_extensions import TypedDict

from lightning_rlhf.core.errors import ConfigError, RLHFError, counted, quoted
from lightning_rlhf.io import console, user_code

BODY_BYTES = 2**26
"""Maximum size of a request, bytes: 64 responses of a million characters."""
STOP_S = 20
"""Longest time from a signal to the end, in which received requests are answered, seconds."""
_log = logging.getLogger(__name__)


@with_config(ConfigDict(extra="forbid"))
class Turn(TypedDict):
    """One message of a prompt."""

    role: str
    content: str


Messages = list[Turn]
Columns = Mapping[str, list[Any]]
Score = Callable[[list[Messages], list[str], Columns], Sequence[float]]
"""Function from (prompts, responses, columns) to one number for each response."""


class ScoreRequest(BaseModel):
    """Body of POST /score: the prompt, the text and the columns of every response."""

    model_config = ConfigDict(extra="forbid")
    prompts: list[Annotated[Messages, Field(min_length=1)]]
    responses: list[str]
    columns: dict[str, list[Any]] = {}


def read_request(body: bytes) -> ScoreRequest:
    """Return the request that a body of JSON holds.

    Raises HTTPException, with a message of one line, if it holds none.
    """
    try:
        request = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the request"
        raise HTTPException(400, " ".join(f"{place}: {first['msg']}".split())) from None
    lists = {"prompts": request.prompts, **{f"columns.{k}": x for k, x in request.columns.items()}}
    for name, values in lists.items():
        if len(values) != len(request.responses):
            count = counted(len(request.responses), "response")
            raise HTTPException(400, f"{quoted(name)} has {len(values)} values for {count}")
    return request


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address but does not listen yet.

    host: name of this machine, or an IPv4 or IPv6 address; port: 0 for any that is free.
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
    """Server of POST /score and GET /health, which scores one request at a time."""

    def __init__(self, score: Score, bound_to: socket.socket, *, token: str | None = None) -> None:
        """Set up the server and listen; connections are answered once `run` is called.

        score: function that scores one request at a time, in a thread of its own.
        bound_to: socket from `listening_socket`.
        token: what requests for scores must send as "Authorization: Bearer TOKEN"; None: nothing.
        """
        self._score, self._socket = score, bound_to
        bound_to.listen()  # clients that connect now are answered by `run`
        self.host, self.port = bound_to.getsockname()[:2]
        self.is_scoring = False
        """True while a request is being scored."""
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._turn, self._thread = asyncio.Lock(), ThreadPoolExecutor(1)
        routes = [
            Route("/score", self._post, methods=["POST"]),
            Route("/health", lambda _: JSONResponse({"status": "ok"}), methods=["GET"]),
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=routes, exception_handlers={HTTPException: _refused}),
                http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None,
                log_level="critical", access_log=False, proxy_headers=False, server_header=False,
                limit_concurrency=64, timeout_keep_alive=10, timeout_graceful_shutdown=STOP_S,
            )
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Return the URL to which requests for scores are sent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/score"

    @property
    def is_open(self) -> bool:
        """Return whether other machines may be able to reach the server."""
        return not ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    def run(self) -> None:
        """Answer requests until Ctrl-C, SIGTERM or `stop`, and then those received before."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """End `run` from another thread."""
        self._server.should_exit = True

    async def _post(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._authorization and not hmac.compare_digest(given, self._authorization):
            raise HTTPException(401, "no token, or a wrong one", {"www-authenticate": "Bearer"})
        body = bytearray()
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_BYTES:
                    raise HTTPException(413, f"the request has over {BODY_BYTES} bytes")
        except ClientDisconnect:
            return Response()
        async with self._turn:
            if await request.is_disconnected():
                return Response()  # nobody reads it
            loop = asyncio.get_running_loop()
            scores = await loop.run_in_executor(self._thread, self._scores, bytes(body))
        return JSONResponse({"scores": scores})

    def _scores(self, body: bytes) -> list[float]:
        """Return the scores of a request; raise HTTPException whatever the reward's code raises."""
        data = read_request(body)
        self.is_scoring = True
        try:
            scores = [float(x) for x in self._score(data.prompts, data.responses, data.columns)]
        except RLHFError as error:  # e.g. the template rejects a dialogue
            raise HTTPException(422, str(error)) from None
        except user_code.FAULTS as error:  # their texts may quote those of others
            trace = "".join(traceback.format_exception(error)).rstrip()
            _log.error("a request could not be scored\n%s", console.visible(trace))
            raise HTTPException(500, f"{type(error).__name__}: {error}") from None
        finally:
            self.is_scoring = False
        if len(scores) != len(data.responses) or not all(map(math.isfinite, scores)):
            count = counted(len(data.responses), "response")
            given = f"the reward gave {quoted(scores)} for {count}"
            raise HTTPException(500, f"{given}; allowed: one finite number each")
        return scores


async def _refused(request: Request, error: Any) -> Response:
    reason = error.detail
    if error.status_code in (404, 405):
        asked = f"{request.method} {request.url.path}"[:300]
        reason = f"there is no {asked}; allowed: POST /score, GET /health"
    return JSONResponse({"error": reason}, error.status_code, error.headers)
