"""Addresses of servers; their secrets are sent but never shown."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from lightning_rlhf.core.errors import ConfigError, require

if TYPE_CHECKING:  # urllib3 loads where there is an address: most commands have none
    from urllib3.util import Url

HIDDEN = "***"
"""Text shown in place of a secret."""
ALLOWED = "http://HOST:PORT/PATH or https://..."


def redacted(url: str) -> str:
    """Return an address, or any text, without user, password and query, which may hold tokens."""
    without_user = re.sub(r"^([\w+.-]*://|//)?.*@", rf"\1{HIDDEN}@", url, flags=re.DOTALL)
    return re.sub(r"[?#].*", f"?{HIDDEN}", without_user, flags=re.DOTALL)


def parsed(url: str, key: str) -> Url:
    """Return the parts of the address. Raises ConfigError, which shows none of its secrets."""
    from urllib3.exceptions import LocationParseError
    from urllib3.util import parse_url

    require(isinstance(url, str), key, url, ALLOWED)
    try:
        parts = parse_url(url)
    except LocationParseError:
        raise ConfigError(f"{key} is {redacted(url)!r}; allowed: {ALLOWED}") from None
    is_whole = parts.scheme in ("http", "https") and bool(parts.host)
    require(is_whole, key, redacted(url), ALLOWED)
    return parts


def token_in(variable: str, key: str) -> str:
    """Return the token in the environment variable that the configuration key `key` names.

    Raises ConfigError, which does not show the token, if there is none.
    """
    token = os.environ[variable].strip() if variable in os.environ else ""
    require(re.fullmatch(r"[!-~]+", token) is not None, key, variable,
            "an environment variable that holds a token, or null")  # fmt: skip
    return token


@dataclass(frozen=True)
class Address:
    """Address of a server, with the headers of a request and the secrets to hide."""

    url: str
    """Address without user and password."""
    headers: dict[str, str]
    """Headers of every request."""
    shown: str
    """Address without its secrets, for errors."""
    secrets: tuple[str, ...]
    """Texts that no error may show."""

    @classmethod
    def read(cls, url: str, token_env: str | None, key: str) -> Address:
        """Return the address `key.url`, with the token in the environment variable `token_env`.

        Raises:
            ConfigError: `url` is not an address, the token is missing, or there are both a token
                and a user.
        """
        from urllib3.util import make_headers

        parts = parsed(url, f"{key}.url")
        secrets, authorization = [parts.auth, parts.query], {}
        if parts.auth:
            authorization = make_headers(basic_auth=unquote(parts.auth))
            password = parts.auth.partition(":")[2]
            secrets += [authorization["authorization"].split()[1], password, unquote(password)]
        if token_env is not None:
            if parts.auth:
                raise ConfigError(
                    f"{key}.url has a user and {key}.token_env is {token_env!r}; give one of them"
                )
            token = token_in(token_env, f"{key}.token_env")
            secrets.append(token)
            authorization = {"authorization": f"Bearer {token}"}
        return cls(
            url=parts._replace(auth=None, fragment=None).url,
            headers={"content-type": "application/json", **authorization},
            shown=redacted(url),
            secrets=tuple(secret for secret in secrets if secret),
        )

    def hide(self, text: str) -> str:
        """Return a message of a server or a library without our secrets."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text
