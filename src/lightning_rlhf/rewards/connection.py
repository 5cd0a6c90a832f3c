"""One POST to a server: answered by a deadline and within a number of bytes, or an error."""

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


class NoAnswer(Exception):
    """No whole answer came by the deadline; says so as a clause without its subject."""


class Away(NoAnswer):
    """No connection to the server could be made."""


class Unusable(Exception):
    """What the server sent cannot be used, and would not be better the next time."""


@dataclass(frozen=True)
class Answer:
    """What a server sent."""

    status: int
    headers: Mapping[str, str]
    data: bytes
    """The whole body, decompressed."""
    response: BaseHTTPResponse
    """The same as urllib3 has it; its body has been read."""


class Connection:
    """A connection to one address, which is kept from one question to the next."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """
        Args:
            url: http:// or https://, without user and password.
            headers: sent with every question.
        """
        self._url, self._headers = parse_url(url), headers
        self._connection = self._new()

    def post(self, body: bytes, *, timeout_s: float, max_bytes: int) -> Answer:
        """Return what the server answers to `body`.

        Args:
            timeout_s: for all of it: the name's look-up, connecting, sending and reading.
            max_bytes: the largest body of an answer, decompressed.

        Raises:
            NoAnswer: it broke off, or its time was over; Away where it was not even reached.
            Unusable: the certificate is not trusted, or the answer is too large or damaged.
        """
        talk = _Talk(self._connection, timeout_s)
        # A thread, since libraries bound the time of each step of this, and a server can make
        # any number of steps.
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
    """One question and its answer, which another thread can end."""

    def __init__(self, connection: HTTPConnection, timeout_s: float) -> None:
        self._connection = connection
        self._connection.timeout = timeout_s
        self._socket: socket.socket | None = None
        self._over = threading.Event()

    def post(self, path: str, headers: Mapping[str, str], body: bytes, max_bytes: int) -> Answer:
        """As Connection.post, but for the deadline."""
        connection = self._connection
        try:
            if not connection.is_connected:  # not yet, or the server hung up in the meantime
                connection.close()
                connection.connect()
            self._socket = connection.sock  # which `getresponse` may take from the connection
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
        """Return the error for a server that was not reached, or for one that was."""
        if self._reached is None:
            return Away(f"is away: {reason}")
        return NoAnswer(f"gave no answer: {reason}")

    def overran(self, timeout_s: float) -> NoAnswer:
        """Return the error for a server whose time, in seconds, is over."""
        awaited = "connection" if self._reached is None else "whole answer"
        return self.failed(f"no {awaited} within {timeout_s:g} s")

    def end(self) -> None:
        """Shut the socket, which ends the thread that waits for it."""
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
