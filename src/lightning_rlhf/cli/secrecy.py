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
SHORTEST = 4
"""Minimum length, in characters, of a secret that is hidden everywhere; a shorter one is hidden in
addresses alone."""


def refuse_secrets(given: Namespace) -> None:
    """Raise ConfigError where a secret would be written before a run can hide it.

    This concerns the names of a sweep, and the overrides that Hydra stores in a file.
    given: the parsed command line.
    """
    secret = [shown for word in given.overrides if (shown := without_address(word)) != word]
    if not secret:
        return
    does = None
    if given.multirun:
        does = "a sweep names its folders after what it is given"
    elif any(word.lstrip("+").startswith("hydra.output_subdir=") for word in given.overrides):
        does = "hydra.output_subdir writes down what it is given"
    if does is not None:
        raise ConfigError(
            f"{does}, and {secret[0]} has a user, a password or a query; allowed: an address "
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
    for tree in trees:
        named = (*TOKENS, *tokens_named(tree), *variables_of_objects(tree))
        given = [os.environ[name] for name in named if name in os.environ]
        # An error may show one line of a text, as of a key in PEM.
        found |= {*given, *(line for text in given for line in text.splitlines())}
        for address in addresses(tree):
            user, _, password = address.rpartition("@")[0].rpartition("//")[2].partition(":")
            query = re.split(r"[?#]", address, maxsplit=1)[1:]
            values = [value.partition("=")[2] for part in query for value in re.split("[&#]", part)]
            found |= {password, unquote(password), *query}
            words |= {user, unquote(user), *values, *map(unquote, values)}
    known = {word for tree in trees for word in words_of(tree)}
    return {s.strip() for s in found | (words - known) if len(s.strip()) >= SHORTEST}


def words_of(tree: Any) -> Iterator[str]:
    """Yield the words that messages may contain: those outside addresses, and the folder's."""
    text = str(tree)
    for address in addresses(tree):
        text = text.replace(address, "")
    yield from re.findall(r"\w+", f"{text} {os.getcwd()} true false null none")


def addresses(tree: Any) -> Iterator[str]:
    """Yield every text of a configuration that is an address."""
    for key, value in leaves(tree):
        if isinstance(value, str) and (key == "url" or "://" in value):
            yield value


def tokens_named(tree: Any) -> Iterator[str]:
    """Yield the environment variables that a configuration names as holding a token."""
    for key, value in leaves(tree):
        if key == "token_env" and isinstance(value, str):
            yield value


def variables_of_objects(tree: Any) -> Iterator[str]:
    """Yield the environment variables that interpolations of the sections OBJECTS name."""
    sections = [tree[name] for name in OBJECTS if isinstance(tree, dict) and name in tree]
    for section in sections:
        for _, value in leaves(section):
            if isinstance(value, str):
                yield from re.findall(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)", value)


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every leaf of nested mappings and lists; items have the list's key."""
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from leaves(part, str(name))
    elif isinstance(tree, list):
        for part in tree:
            yield from leaves(part, key)
    else:
        yield key, tree
