"""What Hydra refuses on the command line, in one line that says what is allowed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from lightning_rlhf.cli.names import as_typed
from lightning_rlhf.cli.secrecy import address_at, without_address, without_secrets
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import refuse_unknown
from lightning_rlhf.stages.settings import STAGES, Settings

ONE_CHOICE = "allowed: one name of a file in conf/ for each of stage, model, data, reward, ..."
GROUP_END = r"/(?=\w*://|[^/]*$)"
"""Before the choice in the name of its file; a choice that is an address has slashes of its own."""
OWN_FILE = (
    "--config-dir FOLDER --config-name NAME, where FOLDER/NAME.yaml begins with "
    "`defaults: [config, _self_]`"
)
"""Advice on how to give a configuration of one's own."""
CONFIG_NAME = r"-cn|--config-n"
"""Beginnings of the option that names the first file of a configuration."""
KEY_GIVEN = r"-|[+~]*[\w.@/]+="
"""How a word begins that is an option or an override of its own."""


def in_our_words(error: Exception, words: Sequence[str]) -> str:
    """Why the overrides `words` could not be composed, in one line without their secrets."""
    return " ".join(_reason(error, words).split())


def _reason(error: Exception, words: Sequence[str]) -> str:
    match error:
        case OverrideParseException():
            return _no_override(error, words)
        case MissingConfigException() if any(re.match(CONFIG_NAME, word) for word in words):
            return (
                f"--config-name {error.missing_cfg_file}: no folder of configurations has this "
                f"file; allowed: {OWN_FILE}"
            )
        case MissingConfigException() if error.missing_cfg_file and error.options:
            group, choice = re.split(GROUP_END, error.missing_cfg_file, maxsplit=1)
            choice = without_address(choice)
            return f"{group}={choice} is not known; allowed: {', '.join(error.options)}"
    ambiguous = re.search(r"Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE)
    if ambiguous is not None:
        if address_at(ambiguous[1]) is not None:
            return _unquoted(ambiguous[1])
        return (
            f"{as_typed(ambiguous[1])} has a comma, and a single value has none; "
            "allowed: KEY=VALUE, KEY=[A,B] for a list, 'KEY=\"A,B\"' for text, and -m before all "
            "of them to sweep over A and B"
        )
    unknown = re.match(r"Could not override '([^']*)'", str(error))
    if unknown is not None:
        if unknown[1] == "config":
            return _own_file(words)
        keys = {field.name for field in dataclasses.fields(Settings)} - {"config", "tree"}
        keys |= {"recipe", *STAGES}
        section = unknown[1].partition(".")[0]
        try:
            refuse_unknown({unknown[1] if section in keys else section: None}, keys, "")
        except ConfigError as refusal:
            return str(refusal)
    if "group override must" in str(error) or "'${stage}_${model}'" in str(error):
        return f"a choice of the configuration is taken out, a list or no name; {ONE_CHOICE}"
    return as_typed(_joined(error, words))


def _no_override(error: OverrideParseException, words: Sequence[str]) -> str:
    """What does not parse; of an address not what Hydra says, which shows pieces of it."""
    if address_at(error.override) is not None:
        return _unquoted(error.override)
    given, wanted = as_typed(error.override), "KEY=VALUE"
    following = words[words.index(error.override) + 1 :] if error.override in words else []
    if following and re.fullmatch(r"[\w.@/]+", given) and not re.match(KEY_GIVEN, following[0]):
        if address_at(following[0]) is not None:
            return _unquoted(f"{given}={following[0]}")
        given, wanted = f"{given} {following[0]}", f"{given}={following[0]}"
    elif given in STAGES:
        wanted = f"stage={given}"
    return f"{given} is no override: {_joined(error, words)}; allowed: {wanted}"


def _own_file(words: Sequence[str]) -> str:
    """Return what to do with a file of one's own that was given as a key."""
    given = without_address(next(w for w in words if w.lstrip("+").startswith("config=")))
    file = Path(given.partition("=")[2])
    command = OWN_FILE.replace("FOLDER", str(file.parent)).replace("NAME", file.stem)
    return f"{given} is no override; allowed: {command}"


def _unquoted(override: str) -> str:
    """An address in which Hydra takes a sign for one of its own."""
    key = re.match(r"([\w.@/+~]+)\s*[=:]\s*['\"]?$", override[: address_at(override)])
    quoted = f"""'{as_typed(key[1]) if key else "reward.url"}="http://..."'"""
    return (
        f"{as_typed(without_address(override))} is no override; quote it, in both kinds: {quoted}"
    )


def _joined(error: BaseException, words: Sequence[str]) -> str:
    """What it says and what its cause says, in one line; without advice to read a manual."""
    lines = [line.strip() for line in without_secrets(str(error), words).splitlines()]
    if error.__cause__ is not None:
        lines += without_secrets(str(error.__cause__), words).splitlines()[:1]
    words = " ".join(line for line in lines if line and not line.startswith("See https"))[:400]
    return words if isinstance(error, HydraException) else f"{words} ({type(error).__name__})"
