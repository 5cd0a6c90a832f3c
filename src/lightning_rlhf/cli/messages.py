"""Error messages for Hydra's errors: one line each, from their typed fields.

An error that Hydra describes in prose alone is shown with its first paragraph.
"""

from __future__ import annotations

import logging
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_rlhf.cli.overrides import COMMANDS, GROUPS, TRIAL, WITHOUT_RUN, parse_overrides
from lightning_rlhf.cli.secrecy import address_at, without_address, without_secrets
from lightning_rlhf.core.errors import ConfigError, unknown_key
from lightning_rlhf.io.visible import visible

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
    typed: list[Override] = []
    with suppress(HydraException, ValueError):  # the error may be that of parsing them
        typed = parse_overrides(words)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_file(error, typed, given)
    if isinstance(error.__cause__, ConfigKeyError | ConfigAttributeError):
        return _unknown_key(error.__cause__, words)
    for override in typed:
        line = without_address(override.input_line or override.key_or_group)
        if override.is_sweep_override() and not given.multirun:
            if address_at(override.input_line or "") is not None:
                return _unquoted(override.input_line or "")
            return (
                f"{line} has a comma, and a single value has none; allowed: KEY=VALUE, "
                "KEY=[A,B] for a list, 'KEY=\"A,B\"' for text, and -m before all of them to "
                "sweep over A and B"
            )
        is_group = override.key_or_group in GROUPS and override.package is None
        if is_group and (override.is_delete() or not isinstance(override.value(), str | dict)):
            group = override.key_or_group
            return f"{line} is no choice; allowed: {group}=NAME, one name of a file in conf/{group}"
    return _shown(error, words)


def _not_parsed(error: OverrideParseException, words: Sequence[str]) -> str:
    """Return why an override does not parse; for an address without Hydra's text."""
    from lightning_rlhf.stages.registry import STAGES

    given, wanted = error.override, "KEY=VALUE"
    if address_at(given) is not None:
        return _unquoted(given)
    after = words[words.index(given) + 1 :][:1] if given in words else []
    if given in STAGES:
        return f"{given} is no override; allowed: stage={given}"
    if re.fullmatch(r"[\w.@/-]+", given) is None:
        return f"{given} is no override: {_shown(error, words)}; allowed: {wanted}"
    if after and "=" not in after[0]:
        if address_at(after[0]) is not None:
            return _unquoted(f"{given}={after[0]}")
        given, wanted = f"{given} {after[0]}", f"{given}={after[0]}"
    if words[:1] == [error.override]:
        wanted += f", or as the first word {', '.join(sorted(COMMANDS | WITHOUT_RUN))}"
    return f"{given} is no override; allowed: {wanted}"


def _missing_file(
    error: MissingConfigException, typed: Sequence[Override], given: Namespace
) -> str:
    file = str(error.missing_cfg_file)
    if not error.options:
        if given.config_name is None:
            return _shown(error, given.overrides)
        return (
            f"--config-name {file}: no folder of configurations has this file; allowed: {OWN_FILE}"
        )
    named = [str(o.input_line) for o in typed if f"{o.key_or_group}/{o.value()}" == file]
    message = without_address([*named, file][0])
    return f"{message} is not known; allowed: {', '.join(error.options)}"


def _unknown_key(cause: OmegaConfBaseException, words: Sequence[str]) -> str:
    """Return a message on an unknown key, with the keys of its section."""
    node: Any = OmegaConf.to_container(cause.parent_node)  # type: ignore[arg-type]
    node.pop("hydra", None)
    key, full = str(cause.key), str(cause.full_key)
    if full == "config":
        given = without_address(next(w for w in words if w.lstrip("+").startswith("config=")))
        file = Path(given.partition("=")[2])
        command = OWN_FILE.replace("FOLDER", str(file.parent)).replace("NAME", file.stem)
        return f"{given} is no override; allowed: {command}"
    prefix = full.removesuffix(key)
    if prefix.startswith("reward."):
        from lightning_rlhf.stages.reward_section import check_components, read_reward

        try:
            if prefix == "reward.":
                read_reward(node | {key: None})
            elif prefix == "reward.components.":
                check_components({"reward": {"components": node | {key: {}}}})
        except ConfigError as refusal:
            return str(refusal)
    if not node:
        hint = f"did you mean {prefix.rstrip('.')}?" if prefix else f"allowed: {OWN_FILE}"
        return f"{full} is not a known key; {hint}"
    return unknown_key(key, node, prefix, node)


def _unquoted(override: str) -> str:
    """Return how to quote an address with a character that has a meaning in Hydra's grammar."""
    key = re.match(r"([\w.@/+~]+)\s*[=:]\s*['\"]?$", override[: address_at(override)])
    quoted = f"""'{key[1] if key else "reward.url"}="http://..."'"""
    return f"{without_address(override)} is no override; quote it, in both kinds: {quoted}"


def _shown(error: Exception, words: Sequence[str]) -> str:
    """Return the first paragraph of a library's message, and the first line of its cause."""
    message = re.split(r"\n\n|\nSee https:", without_secrets(str(error), words))[0]
    if error.__cause__ is not None:
        message += " " + without_secrets(str(error.__cause__), words).split("\n")[0]
    message = message[:LONGEST]
    return message if isinstance(error, HydraException) else f"{message} ({type(error).__name__})"
