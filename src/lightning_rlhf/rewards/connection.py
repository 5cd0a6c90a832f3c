"""POST request to a server, with a deadline and a maximum size of the answer."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from http.client import HTTPException

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import DecodeError, HTTPError
from urllib3.response import BaseHTTPResponse
from urllib3.util import parse_url
from urllib3.util.ssl_match_hostname import CertificateError

from lightning_rlhf.rewards.threads import in_thread

PIECE_BYTES = 2**16
"""Size of the pieces in which an answer is read, bytes."""


class NoAnswer(Exception):
    """Raised if no whole answer arrived by the deadline; the message is a clause without a
    subject."""


class Away(NoAnswer):
    """Raised if no connection to the server could be made."""


class Unusable(Exception):
    """Raised for an answer that cannot be used and would not be better if it were asked for
    again."""


@dataclass(frozen=True)
class Answer:
    """Answer of a server."""

    status: int
    """HTTP status code."""
    headers: Mapping[str, str]
    data: bytes
    """Whole body, decompressed."""
    response: BaseHTTPResponse
    """Response object of urllib3, whose body has been read."""


class Connection:
    """Connection to one address, which is kept open between requests."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Prepare the connection, which opens with the first request.

        Args:
            url: http:// or https:// address without user and password.
            headers: headers of every request.
        """
        self._url, self._headers = parse_url(url), headers
        self._connection = self._new()

    def post(self, body: bytes, *, timeout_s: float, max_bytes: int) -> Answer:
        """Send `body` and return the server's answer.

        Args:
            body: body of the request.
            timeout_s: seconds for the whole request: name look-up, connecting, sending and reading.
            max_bytes: maximum size of the answer's body, decompressed, in bytes.

        Raises:
            NoAnswer: the connection broke or the deadline passed; Away if the server was not
                reached.
            Unusable: the certificate is not trusted, or the answer is too large or damaged.
        """
        talk = _Talk(self._connection, timeout_s)
        # A thread, since libraries limit the time of each step alone, and a server can make a
        # request take any number of steps.
        future = in_thread(lambda: talk.post(self._url.request_uri, self._headers, body, max_bytes))
        answer = None
        try:
            wait([future], timeout_s)
            if not future.done():
                raise talk.overran(timeout_s)
            answer = future.result()
            return answer
        finally:
            if answer is None:
                talk.end()
                self._connection = self._new()

    def _new(self) -> HTTPConnection:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        assert self._url.host is not None
        return kind(self._url.host.strip("[]"), self._url.port)


class _Talk:
    """One request and its answer, which another thread can end."""

    def __init__(self, connection: HTTPConnection, timeout_s: float) -> None:
        self._connection = connection
        self._connection.timeout = timeout_s
        self._socket: socket.socket | None = None
        self._over = threading.Event()

    def post(self, path: str, headers: Mapping[str, str], body: bytes, max_bytes: int) -> Answer:
        """Send the request as Connection.post does, without a deadline."""
        connection = self._connection
        try:
            if not connection.is_connected:  # not opened yet, or closed by the server
                connection.close()
                connection.connect()
            self._socket = connection.sock  # `getresponse` may detach it from the connection
            if self._over.is_set():
                raise TimeoutError
            connection.request("POST", path, body=body, headers=headers, preload_content=False)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, _read(answer, max_bytes), answer)
        except (ssl.SSLCertVerificationError, CertificateError) as error:
            raise Unusable(f"its certificate is not trusted: {error}") from error
        except DecodeError as error:
            raise Unusable(f"its answer cannot be unpacked: {error}") from error
        except (OSError, HTTPException, HTTPError) as error:
            if type(error) is ssl.SSLError:
                raise Unusable(f"no TLS can be spoken with it: {error}") from error
            raise self.failed(str(error) or type(error).__name__) from error

    def failed(self, reason: str) -> NoAnswer:
        """Return the error for a server that was not reached (Away), or that failed afterwards."""
        if self._reached is None:
            return Away(f"is away: {reason}")
        return NoAnswer(f"gave no answer: {reason}")

    def overran(self, timeout_s: float) -> NoAnswer:
        """Return the error for a server that exceeded its time limit, in seconds."""
        awaited = "connection" if self._reached is None else "whole answer"
        return self.failed(f"no {awaited} within {timeout_s:g} s")

    def end(self) -> None:
        """Shut the socket down, which ends the thread that waits for it."""
        self._over.set()
        if self._reached is not None:
            with contextlib.suppress(OSError):
                self._reached.shutdown(socket.SHUT_RDWR)

    @property
    def _reached(self) -> socket.socket | None:
        return self._socket or self._connection.sock


def _read(answer: BaseHTTPResponse, max_bytes: int) -> bytes:
    data = bytearray()
    while piece := answer.read(PIECE_BYTES):
        data += piece
        if len(data) > max_bytes:
            raise Unusable(f"its answer has more than {max_bytes} bytes")
    return bytes(data)
