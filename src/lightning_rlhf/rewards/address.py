"""Addresses of servers; their secrets are sent but never shown."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

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
