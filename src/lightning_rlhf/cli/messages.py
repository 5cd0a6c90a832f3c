"""Error messages for Hydra's errors, in one line each: most are the first paragraph of its own."""

from __future__ import annotations

import logging
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_rlhf.cli.overrides import (
    COMMANDS,
    GROUPS,
    TRIAL,
    WITHOUT_RUN,
    address_at,
    parse_overrides,
    without_address,
    without_secrets,
)
from lightning_rlhf.core.errors import unknown_key
from lightning_rlhf.io.console import visible

OWN_FILE = (
    "--config-dir FOLDER --config-name NAME, where FOLDER/NAME.yaml begins with "
    "`defaults: [config, _self_]`"
)
"""Advice on how to add a user's own configuration."""
LONGEST = 400
"""Maximum number of characters shown of a library's message."""


class VisibleFormatter(logging.Formatter):
    """Formatter that escapes control characters in the overrides that Hydra logs in a sweep.

    Tabs, with which Hydra indents its lines, become spaces. The overrides with which a trial
    reports to its study, the last ones of its job, are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record).expandtabs().partition(f" {TRIAL}.")[0])


def program_name() -> str:
    """Return the name of the command: python train.py or lightning-rlhf."""
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        return "python -m lightning_rlhf"
    return f"python {name}" if name.endswith(".py") else name


def composition_error(error: Exception, given: Namespace) -> str:
    """Return in one line, without secrets, why Hydra could not compose the configuration."""
    return " ".join(_reason(error, given).split())


def _reason(error: Exception, given: Namespace) -> str:
    words: list[str] = given.overrides
    if isinstance(error, OverrideParseException):
        return _not_parsed(error, words)
    if isinstance(error.__cause__, ConfigKeyError | ConfigAttributeError):
        return _unknown_key(error.__cause__)
    typed = []
    with suppress(HydraException, ValueError):  # the error may be that of parsing them
        typed = parse_overrides(words)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        file = str(error.missing_cfg_file)
        if error.options:
            named = [str(o.input_line) for o in typed if f"{o.key_or_group}/{o.value()}" == file]
            message = without_address([*named, file][0])
            return f"{message} is not known; allowed: {', '.join(error.options)}"
        if given.config_name is not None:
            return f"--config-name {file}: no folder of configurations has it; allowed: {OWN_FILE}"
    for override in typed:
        line, group = str(override.input_line), override.key_or_group
        is_group = group in GROUPS and override.package is None
        if is_group and (override.is_delete() or not isinstance(override.value(), str | dict)):
            return (
                f"{without_address(line)} is no choice; allowed: {group}=NAME, one name of a file "
                f"in conf/{group}"
            )
        if override.is_sweep_override() and not given.multirun:
            if address_at(line) is not None:
                return _unquoted(line)
            return (
                f"{line} has a comma, and a single value has none; allowed: KEY=VALUE, "
                "KEY=[A,B] for a list, 'KEY=\"A,B\"' for text, and -m before all of them to "
                "sweep over A and B"
            )
    return _shown(error, words)


def _not_parsed(error: OverrideParseException, words: Sequence[str]) -> str:
    """Return why an override does not parse; for an address without Hydra's text."""
    from lightning_rlhf.stages.stage import STAGES

    given, wanted = error.override, "KEY=VALUE"
    if address_at(given) is not None:
        return _unquoted(given)
    if given in STAGES:
        return f"{given} is no override; allowed: stage={given}"
    if words[:1] == [given]:
        wanted += f", or as the first word {', '.join(sorted(COMMANDS | WITHOUT_RUN))}"
    is_word = re.fullmatch(r"[\w.@/-]+", given) is not None
    why = "" if is_word else f": {_shown(error, words)}"
    return f"{given} is no override{why}; allowed: {wanted}"


def _unknown_key(cause: OmegaConfBaseException) -> str:
    """Return a message on an unknown key, with the keys of its section."""
    node: Any = OmegaConf.to_container(cause.parent_node)  # type: ignore[arg-type]
    node.pop("hydra", None)
    key, full = str(cause.key), str(cause.full_key)
    prefix = full.removesuffix(key)
    if not node:
        hint = f"did you mean {prefix.rstrip('.')}?" if prefix else f"allowed: {OWN_FILE}"
        return f"{full} is not a known key; {hint}"
    return unknown_key(key, node, prefix, node)


def _unquoted(override: str) -> str:
    """Return how to quote an address with a character that has a meaning in Hydra's grammar."""
    shown = without_address(override)
    return f"""{shown} is no override; quote it, in both kinds: 'reward.url="http://..."'"""


def _shown(error: Exception, words: Sequence[str]) -> str:
    """Return the first paragraph of a library's message, and the first line of its cause."""
    message = re.split(r"\n\n|\nSee https:", without_secrets(str(error), words))[0]
    if error.__cause__ is not None:
        message += " " + without_secrets(str(error.__cause__), words).split("\n")[0]
    message = message[:LONGEST]
    return message if isinstance(error, HydraException) else f"{message} ({type(error).__name__})"
