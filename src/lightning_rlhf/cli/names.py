"""Names on the command line: the program's own, those of keys as they were typed, and choices."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.visible import visible

OPEN = "sft|rm|ppo|eval|reward|data|trainer|logger|policy|model(?![.]from_config)"
"""Sections of the configuration whose keys may be given before they are there."""
GROUPS = ("stage", "model", "data", "reward", "trainer", "logger", "advantage")
CHOICE = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*(?<!\.yaml)(?<!\.yml)")
"""The name of a file in a group of conf/, or of one in a folder below it."""

TAKING = (
    "--cfg", "--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun",
    "-c", "-p", "-cp", "-cn", "-cd",
)  # fmt: skip
"""Hydra's options that are followed by a value."""


def parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides and the options with their values, each in their order.

    Hydra takes overrides on one side of its options alone: `stage=ppo --cfg job seed=1` is refused.
    """
    overrides: list[str] = []
    options: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        options.append(word)
        is_long = len(word) > 2 and word.startswith("--")
        takes = word in TAKING or (is_long and any(o.startswith(word) for o in TAKING))
        if left and (takes or (word in ("--info", "-i") and "=" not in left[0])):
            options.append(left.pop(0))
    return overrides, options


def program_name() -> str:
    """Return how the command was called: python train.py, lightning-rlhf."""
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        return "python -m lightning_rlhf"
    return f"python {name}" if name.endswith(".py") else name


def opened(word: str) -> str:
    """Return the override with Hydra's ++ where its key need not be there before."""
    return re.sub(rf"^({OPEN})\.", r"++\1.", word)


def as_typed(text: str) -> str:
    """Return a text that quotes overrides without the ++ that `opened` gave them."""
    return re.sub(rf"[+]{{2}}(?=({OPEN})[.])", "", text)


class AsTyped(logging.Formatter):
    """Formats what Hydra says of a sweep's jobs, in which it quotes their overrides."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(as_typed(super().format(record)))


def key_of(override: str) -> str:
    """Return the key of an override: ++ppo.lr=1 -> ppo.lr"""
    return override.lstrip("+~").split("=")[0]


def check_choices(choices: Mapping[str, Any]) -> None:
    """Raise ConfigError where a choice names its file by a path, as stage=../stage/sft does.

    Hydra would find the file, but not the numbers that are filed under the choice's name.
    """
    for group in GROUPS:
        choice = choices.get(group)
        if isinstance(choice, str) and CHOICE.fullmatch(choice) is None:
            allowed = GlobalHydra.instance().config_loader().get_group_options(group)
            raise ConfigError(f"{group}={choice} is not known; allowed: {', '.join(allowed)}")
