"""What a command was given that is in no line of its output: passwords, queries and tokens."""

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
"""Environment variables that libraries read a token from; reward.token_env names another."""
SHORTEST = 4
"""Characters of a secret that is hidden wherever it stands; a shorter one is so in addresses."""


def refuse_secrets(given: Namespace) -> None:
    """Raise ConfigError where a secret would be written before a run can hide it.

    In the names of a sweep, and in the overrides that Hydra keeps in a file.

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
    """An override as it may be written down: of an address no user, password and query."""
    start = address_at(word)
    return word if start is None else word[:start] + redacted(word[start:])


def address_at(word: str) -> int | None:
    """Where an address begins in an override, if there is one."""
    found = re.search(r"url['\"]?\s*[=:]\s*['\"]?|(?=\b[\w+.-]*://)", word)
    return None if found is None else found.end()


def without_secrets(text: str, words: Sequence[str] = (), secrets: Sequence[str] = ()) -> str:
    """What is said, without the user, the password and the query of an address in it.

    words: overrides whose addresses are found in the text whatever signs are in them.
    secrets: what is hidden wherever it stands.
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
    """Return what Hydra prints of a configuration that was composed of `words`, without secrets.

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
    """What configurations hold of secrets, or name, each SHORTEST characters or longer.

    The tokens in the environment, and of every address its password and its query; the user and a
    single value of the query only if they are no word that is used elsewhere, as in a path.
    """
    found: set[str] = set()
    words: set[str] = set()
    for tree in trees:
        found |= {os.environ[name] for name in (*TOKENS, *tokens_named(tree)) if name in os.environ}
        for address in addresses(tree):
            user, _, password = address.rpartition("@")[0].rpartition("//")[2].partition(":")
            query = re.split(r"[?#]", address, maxsplit=1)[1:]
            values = [value.partition("=")[2] for part in query for value in re.split("[&#]", part)]
            found |= {password, unquote(password), *query}
            words |= {user, unquote(user), *values, *map(unquote, values)}
    known = {word for tree in trees for word in words_of(tree)}
    return {s.strip() for s in found | (words - known) if len(s.strip()) >= SHORTEST}


def words_of(tree: Any) -> Iterator[str]:
    """What messages may be made of: all that is no address, the folder, true and false."""
    text = str(tree)
    for address in addresses(tree):
        text = text.replace(address, "")
    yield from re.findall(r"\w+", f"{text} {os.getcwd()} true false null none")


def addresses(tree: Any) -> Iterator[str]:
    """Every text of a configuration that is an address."""
    for key, value in leaves(tree):
        if isinstance(value, str) and (key == "url" or "://" in value):
            yield value


def tokens_named(tree: Any) -> Iterator[str]:
    """The variables of the environment in which a configuration says that a token is."""
    for key, value in leaves(tree):
        if key == "token_env" and isinstance(value, str):
            yield value


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of everything in nested dictionaries and lists; what is in a list has its."""
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from leaves(part, str(name))
    elif isinstance(tree, list):
        for part in tree:
            yield from leaves(part, key)
    else:
        yield key, tree
