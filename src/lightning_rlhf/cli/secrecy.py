"""Redaction of passwords, queries and tokens in everything that a command prints or writes."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import yaml

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.rewards.address import HIDDEN, redacted

TOKENS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables from which libraries read a token; reward.token_env names another."""
OBJECTS = ("callbacks", "logger", "trainer")
"""Sections with objects of the user's own, whose errors may show what they are given."""
VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)")
"""Pattern of an interpolation that names an environment variable."""
SHORTEST = 4
"""Minimum length, in characters, of a secret that is hidden everywhere; a shorter one is hidden in
addresses alone."""


def refuse_secrets(given: Namespace) -> None:
    """Raise ConfigError where a secret would be written before a run can hide it.

    This concerns the names of a sweep, and the overrides that Hydra stores in a file.
    given: the parsed command line.
    """
    secret = [shown for word in given.overrides if (shown := without_address(word)) != word]
    is_written = any(w.lstrip("+").startswith("hydra.output_subdir=") for w in given.overrides)
    if secret and (given.multirun or is_written):
        raise ConfigError(
            f"{'a sweep' if given.multirun else 'hydra.output_subdir'} writes down what it is "
            f"given, and {secret[0]} has a user, a password or a query; allowed: an address "
            "without, and the name of an environment variable with the token in reward.token_env"
        )


def without_address(word: str) -> str:
    """Return an override without the user, the password and the query of an address in it."""
    start = address_at(word)
    return word if start is None else word[:start] + redacted(word[start:])


def address_at(word: str) -> int | None:
    """Return the position at which an address begins in an override, None where there is none."""
    found = re.search(r"url['\"]?\s*[=:]\s*['\"]?|(?=\b[\w+.-]*://)", word)
    return None if found is None else found.end()


def without_secrets(text: str, words: Sequence[str] = (), secrets: Sequence[str] = ()) -> str:
    """Return a text without the user, the password and the query of any address in it.

    words: overrides whose addresses are found in the text whatever characters they contain.
    secrets: texts that are hidden wherever they occur.
    """
    for address in (word[at:] for word in words if (at := address_at(word)) is not None):
        if address:
            text = text.replace(address, redacted(address))
    text = re.sub(r"//[^/\s'\"]*@", f"//{HIDDEN}@", text)
    text = re.sub(r"(//[^\s?'\"]*)[?][^\s'\"]*", rf"\1?{HIDDEN}", text)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def without_printed(text: str, words: Sequence[str]) -> str:
    """Return Hydra's output about a configuration composed from `words`, without secrets.

    text: YAML after --cfg, YAML between other lines after --info.
    """
    text = re.sub(r"(\burl: *['\"]?)([^\s'\"]+)", lambda m: m[1] + redacted(m[2]), text)
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        tree = None
    for address in addresses(tree):
        text = text.replace(address, redacted(address))
    return without_secrets(text, words, list(secrets_of(tree)))


def secrets_of(*trees: Any) -> set[str]:
    """Return the secrets that configurations hold or name, each at least SHORTEST characters long.

    These are the tokens in the environment, the environment variables that callbacks, loggers and
    the Trainer are given, and the password and the query of every address; the user and a single
    value of the query only if they are not used elsewhere, as in a path.
    """
    found: set[str] = set()
    words: set[str] = set()
    known = {"true", "false", "none", "null", *re.findall(r"\w+", os.getcwd())}
    for tree in trees:
        text, names = str(tree), [*TOKENS]
        for section, key, value in leaves(tree):
            names += [value] if key == "token_env" else []
            names += VARIABLE.findall(value) if section in OBJECTS else []
        given = [os.environ[name] for name in names if name in os.environ]
        # An error may show one line of a text, as of a key in PEM.
        found |= {*given, *(line for text in given for line in text.splitlines())}
        for address in addresses(tree):
            text = text.replace(address, "")
            user, _, password = address.rpartition("@")[0].rpartition("//")[2].partition(":")
            query = re.split(r"[?#]", address, maxsplit=1)[1:]
            values = [value.partition("=")[2] for part in query for value in re.split("[&#]", part)]
            found |= {password, unquote(password), *query}
            words |= {user, unquote(user), *values, *map(unquote, values)}
        known |= {*re.findall(r"\w+", text)}
    return {s.strip() for s in found | (words - known) if len(s.strip()) >= SHORTEST}


def addresses(tree: Any) -> list[str]:
    """Return every text of a configuration that is an address."""
    return [text for _, key, text in leaves(tree) if key == "url" or "://" in text]


def leaves(tree: Any, section: str = "", key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield every text of nested mappings and lists, after its first and its last key."""
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from leaves(part, section or str(name), str(name))
    elif isinstance(tree, list):
        for part in tree:
            yield from leaves(part, section, key)
    elif isinstance(tree, str):
        yield section, key, tree
