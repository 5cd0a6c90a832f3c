"""What Hydra refuses on the command line, in one line that says what is allowed."""

from __future__ import annotations

import dataclasses
import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from lightning_rlhf.cli.main import OPEN
from lightning_rlhf.cli.settings import Settings, refuse_unknown
from lightning_rlhf.core.errors import ConfigError

ONE_CHOICE = "allowed: one name of a file in conf/ for each of stage, model, data, reward, ..."


def in_our_words(error: Exception) -> str:
    """Why the configuration could not be composed, in one line whatever was given."""
    return " ".join(_reason(error).split())


def _reason(error: Exception) -> str:
    match error:
        case OverrideParseException():
            return f"{_given(error.override)} is no override: {_joined(error)}; allowed: KEY=VALUE"
        case MissingConfigException() if error.missing_cfg_file and error.options:
            group, _, choice = error.missing_cfg_file.rpartition("/")
            return f"{group}={choice} is not known; allowed: {', '.join(error.options)}"
    unknown = re.match(r"Could not override '([^']*)'", str(error))
    if unknown is not None:
        keys = {field.name for field in dataclasses.fields(Settings)} | {"recipe"}
        try:
            refuse_unknown({unknown[1]: None}, keys, "")
        except ConfigError as refusal:
            return str(refusal)
    if "group override must" in str(error) or "'${stage}_${model}'" in str(error):
        return f"a choice of the configuration is taken out, a list or no name; {ONE_CHOICE}"
    return _given(_joined(error))


def _joined(error: BaseException) -> str:
    """What it says and what its cause says, in one line; without advice to read a manual."""
    lines = [line.strip() for line in str(error).splitlines()]
    if error.__cause__ is not None:
        lines += str(error.__cause__).splitlines()[:1]
    words = " ".join(line for line in lines if line and not line.startswith("See https"))[:400]
    return words if isinstance(error, HydraException) else f"{words} ({type(error).__name__})"


def _given(text: str) -> str:
    """Overrides as the user gave them."""
    return re.sub(rf"[+]{{2}}(?=({OPEN})[.])", "", text)
