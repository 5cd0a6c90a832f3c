"""The arguments of a command: options and overrides as Hydra parses them, errors, secrets."""

import difflib
import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

from hydra._internal.utils import get_args_parser  # of @hydra.main; there is no public one
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from lightning_rlhf.core.errors import ConfigError, unknown_key
from lightning_rlhf.io.console import print_line, visible
from lightning_rlhf.parallel.world import world
from lightning_rlhf.rewards.config import HIDDEN, redacted
from lightning_rlhf.runs.console import CONF
from lightning_rlhf.runs.stage import STAGES

COMMANDS = {
    "chat": "lightning_rlhf.cli.chat:chat",
    "compare": "lightning_rlhf.cli.commands:compare",
    "dashboard": "lightning_rlhf.cli.commands:dashboard",
    "diminishing": "lightning_rlhf.cli.commands:diminishing",
    "export": "lightning_rlhf.cli.export:export_model",
    "replay": "lightning_rlhf.cli.replay:replay",
    "report": "lightning_rlhf.cli.commands:report",
    "serve-reward": "lightning_rlhf.cli.export:serve_reward",
}
"""First word of a command that composes no configuration -> the function that runs the rest."""
WITHOUT_RUN = {"check": "only", "plan": "plan"}
"""First word of a command that checks a stage or plans its memory, without training -> value of
`preflight` that does the same."""
PLUGINS = {
    "hydra/launcher=joblib": "hydra_plugins.hydra_joblib_launcher",
    "hydra/launcher=submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "hydra/launcher=submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
    "hydra/sweeper=optuna": "optuna",
}
"""Choice of a launcher or a sweeper -> the module that it needs, of an optional package."""
GROUPS = ("model", "data", "reward", "trainer", "logger", "callbacks", "advantage")
"""Groups of conf/ from which one file each is chosen."""
READ_BY = {"advantage": "ppo"}
"""Group whose file becomes part of a stage's section -> the stage."""
OWN_FILE = (
    "--config-dir FOLDER --config-name NAME, where FOLDER/NAME.yaml begins with "
    "`defaults: [config, _self_]`"
)
"""Advice on how to add a user's own configuration."""
TOKENS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables from which libraries read a token; reward.token_env names another."""
OBJECTS = ("callbacks", "logger", "trainer")
"""Sections with objects of the user's own, whose errors may show what they are given."""
VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)")
"""Pattern of an interpolation that names an environment variable."""
SHORTEST = 4
"""Minimum length, in characters, of a secret that is hidden everywhere; a shorter one is hidden in
addresses alone."""


def program_name() -> str:
    """Return the name of the command: python train.py or lightning-rlhf."""
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        return "python -m lightning_rlhf"
    return f"python {name}" if name.endswith(".py") else name


def parse_arguments(words: Sequence[str]) -> Namespace:
    """Return Hydra's options and, in `overrides`, all other arguments in their order.

    Hydra's own call of the parser accepts overrides only on one side of the options.

    Raises ConfigError where an option is unknown or its value is wrong.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; allowed: KEY=VALUE without -, or an option of --hydra-help")

    parser = get_args_parser()
    parser.error = lambda message: refuse(without_secrets(message, words))  # type: ignore
    # --info has an optional value, and the parser would take an override for it.
    arguments = [
        "--info=all" if word in ("--info", "-i") and "=" in after else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]
    given, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        refuse(f"{without_address(unknown[0])} is no option")
    return given


def options_last(words: Sequence[str], given: Namespace) -> list[str]:
    """Return the arguments of a command with its overrides first, as Hydra's parser needs them."""
    return [*given.overrides, *(word for word in words if word not in given.overrides)]


def parse_overrides(words: Iterable[str]) -> list[Override]:
    """Return the overrides as Hydra parses them."""
    return OverridesParser.create().parse_overrides(list(words))


def key_of(override: str) -> str:
    """Return the key of an override: ppo.lr for ++ppo.lr=1."""
    return override.lstrip("+~").split("=")[0]


def stage_of(override: Override, stages: Collection[str]) -> str | None:
    """Return which of `stages` has the section that the override changes, None where none has."""
    key = override.package or READ_BY.get(override.key_or_group, override.key_or_group)
    section = key.partition(".")[0]
    return section if section in stages else None


def completed_stages(given: Namespace) -> list[str]:
    """Return the completions of `stage=` if the shell asks for them; Hydra knows no choices."""
    asked = os.environ.get("COMP_LINE", "").split(" ")[-1]
    if not given.shell_completion or not asked.startswith("stage="):
        return []
    return sorted(f"stage={name}" for name in STAGES)


def check_command(words: Sequence[str], given: Namespace) -> None:
    """Raise ConfigError for a mistyped command, or for a sweep or a recipe that cannot be run.

    That is one whose checks or plan alone are wanted, as its stages start from what earlier ones
    have trained; one that lacks a package or a program; one whose names, which are written down,
    would have a secret; or one in several processes, each of which would run all its jobs. Prints a
    warning where a launcher or a sweeper is chosen for no sweep.

    words: the command line; given: what it holds.
    """
    for word in words[:1]:
        close = difflib.get_close_matches(word, [*COMMANDS, *WITHOUT_RUN], n=1, cutoff=0.7)
        if close and "=" not in word:
            raise ConfigError(f"{word} is no command; did you mean {close[0]}?")
    secret = [shown for word in given.overrides if (shown := without_address(word)) != word]
    is_written = any(key_of(word) == "hydra.output_subdir" for word in given.overrides)
    if secret and (given.multirun or is_written):
        raise ConfigError(
            f"{'a sweep' if given.multirun else 'hydra.output_subdir'} writes down what it is "
            f"given, and {secret[0]} has a user, a password or a query; allowed: an address "
            "without, and the name of an environment variable with the token in reward.token_env"
        )
    is_recipe = any(key_of(word) == "recipe" for word in given.overrides)
    for command, mode in WITHOUT_RUN.items():
        if f"preflight={mode}" in given.overrides and (given.multirun or is_recipe):
            raise ConfigError(
                f"{'recipe=NAME' if is_recipe else '-m'} runs several stages or jobs, and a "
                f"{command} is of one; allowed: {command} stage=NAME"
            )
    is_sweep = given.multirun or "hydra.mode=MULTIRUN" in given.overrides
    is_printed = given.cfg or given.info or given.help or given.hydra_help
    for word in given.overrides:
        if word in PLUGINS and find_spec(PLUGINS[word]) is None:
            raise ConfigError(
                f"{word} needs {PLUGINS[word]}, which is not installed; "
                "pip install 'lightning-rlhf[sweeps]'"
            )
        if key_of(word) in ("hydra/launcher", "hydra/sweeper") and not is_sweep and not is_printed:
            print_line(f"warning: {word} is for sweeps and is not used without -m", "yellow")
    if is_sweep:
        refuse_processes("a sweep")


def refuse_processes(what: str) -> None:
    """Raise ConfigError where several processes would each run all jobs of a sweep or a recipe."""
    if (place := world()).size > 1:
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, but {what} starts the processes "
            "of its jobs itself, by trainer.devices; allowed: one stage a command"
        )


def refuse_other_stages(stage: str, words: Sequence[str], stages: Collection[str]) -> None:
    """Raise ConfigError where an override sets a key that only another of `stages` reads."""
    for override in parse_overrides(words):
        owner = stage_of(override, stages)
        if owner not in (None, stage):
            key = override.key_or_group
            message = (
                f"stage={stage} does not read {f'{owner}.{key}' if key in READ_BY else key}; "
                f"leave out {without_address(override.input_line or key)}, or give it to "
                f"stage={owner}"
            )
            if key in READ_BY and not (CONF / "stages" / f"{stage}.yaml").is_file():
                message += f"; a stage of your own built on {owner} takes {key}@{stage}=NAME"
            raise ConfigError(message)


def composition_error(error: Exception, given: Namespace) -> str:
    """Return in one line, without secrets, why Hydra could not compose the configuration.

    Where nothing is known that helps, it is the first paragraph of the library's message, and the
    first line of its cause.
    """
    words: list[str] = given.overrides
    cause = error.__cause__
    reason = None
    if isinstance(error, OverrideParseException):
        reason = _not_parsed(error.override, words)
    elif isinstance(cause, ConfigKeyError | ConfigAttributeError):
        node: Any = OmegaConf.to_container(cause.parent_node)  # type: ignore[arg-type]
        node.pop("hydra", None)
        key, full = str(cause.key), str(cause.full_key)
        prefix = full.removesuffix(key)
        hint = f"did you mean {prefix.rstrip('.')}?" if prefix else f"allowed: {OWN_FILE}"
        reason = f"{full} is not a known key; {hint}"
        if node:
            reason = unknown_key(key, node, prefix, node)
    else:
        reason = _not_chosen(error, given)
    if reason is None:
        reason = re.split(r"\n\n|\nSee https:", without_secrets(str(error), words))[0]
        reason += "" if cause is None else f" {without_secrets(str(cause), words)}".split("\n")[0]
        reason = reason[:400]
        reason += "" if isinstance(error, HydraException) else f" ({type(error).__name__})"
    return " ".join(reason.split())


def _not_parsed(override: str, words: Sequence[str]) -> str:
    """Return why a word is no override, without the secrets of an address in it."""
    if override in STAGES:
        return f"{override} is no override; allowed: stage={override}"
    if address_at(override) is not None:
        shown = without_address(override)
        return f"""{shown} is no override; quote it, in both kinds: 'reward.url="http://..."'"""
    allowed = "KEY=VALUE"
    if words[:1] == [override]:
        allowed += f", or as the first word {', '.join(sorted(COMMANDS | WITHOUT_RUN))}"
    elif "=" in override:
        key = override.partition("=")[0]
        allowed += f", and a value with more than letters, digits and ._/- as '{key}=\"VALUE\"'"
    return f"{override} is no override; allowed: {allowed}"


def _not_chosen(error: Exception, given: Namespace) -> str | None:
    """Return which override chooses no file of conf/, or sweeps without -m; None where none does.

    error: that of Hydra, about a file which is not there, or about an override.
    """
    try:
        typed = parse_overrides(given.overrides)
    except HydraException:
        return None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        file = str(error.missing_cfg_file)
        if error.options:
            named = [str(o.input_line) for o in typed if f"{o.key_or_group}/{o.value()}" == file]
            shown = without_address([*named, file][0])
            return f"{shown} is not known; allowed: {', '.join(error.options)}"
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
                return _not_parsed(line, ())
            return (
                f"{line} has a comma, and a single value has none; allowed: KEY=VALUE, "
                "KEY=[A,B] for a list, 'KEY=\"A,B\"' for text, and -m before all of them to "
                "sweep over A and B"
            )
    return None


class VisibleFormatter(logging.Formatter):
    """Formatter that escapes control characters in the overrides that Hydra logs in a sweep.

    Tabs, with which Hydra indents its lines, become spaces. The name of a job's folder, and the
    overrides with which a trial reports to its study, come last and are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        return visible(
            re.split(r" job='| callbacks\.trial\.", super().format(record))[0].expandtabs()
        )


def address_at(word: str) -> int | None:
    """Return the position at which an address begins in an override, None where there is none."""
    found = re.search(r"url['\"]?\s*[=:]\s*['\"]?|(?=\b[\w+.-]*://)", word)
    return None if found is None else found.end()


def without_address(word: str) -> str:
    """Return an override without the user, the password and the query of an address in it."""
    start = address_at(word)
    return word if start is None else word[:start] + redacted(word[start:])


def without_secrets(text: str, words: Sequence[str] = (), secrets: Collection[str] = ()) -> str:
    """Return a text without tokens, and without user, password and query of any address in it.

    words: overrides whose addresses are found in the text whatever characters they contain.
    secrets: texts that are hidden wherever they occur, besides the tokens in the environment.
    """
    for address in (word[at:] for word in words if (at := address_at(word)) is not None):
        if address:
            text = text.replace(address, redacted(address))
    text = re.sub(r"(\burl: *['\"]?)([^\s'\"]+)", lambda m: m[1] + redacted(m[2]), text)
    text = re.sub(r"//[^\s'\"]*@", f"//{HIDDEN}@", text)
    text = re.sub(r"(//[^\s?'\"]*)[?][^\s'\"]*", rf"\1?{HIDDEN}", text)
    for secret in sorted({*secrets, *secrets_of()}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def secrets_of(*trees: Any) -> set[str]:
    """Return the secrets that configurations hold or name, each at least SHORTEST characters long.

    These are the tokens in the environment, the environment variables that callbacks, loggers and
    the Trainer are given, and the password and the query of every address; the user and a single
    value of the query only if they are not used elsewhere, as in a path.
    """
    names, found, weak, rest = [*TOKENS], set[str](), set[str](), f"{os.getcwd().lower()} true none"
    for tree in trees:
        text = str(tree)
        for section, key, value in leaves(tree):
            names += [value] if key == "token_env" else []
            names += VARIABLE.findall(value) if section in OBJECTS else []
            if key == "url" or "://" in value:
                user, _, password = value.rpartition("@")[0].rpartition("//")[2].partition(":")
                query = re.split(r"[?#]", value, maxsplit=1)[1:]
                found |= {password, unquote(password), *query}
                of_query = {part.partition("=")[2] for part in re.split("[&#]", "".join(query))}
                weak |= {user, unquote(user), *of_query, *map(unquote, of_query)}
                text = text.replace(value, "")
        rest += text.lower()
    for value in (os.environ[name] for name in names if name in os.environ):
        # An error may show one line of a text, as of a key in PEM.
        found |= {value, *value.splitlines()}
    words = {*re.findall(r"\w+", rest)}
    found |= {text for text in weak if text.lower() not in words}
    return {s.strip() for s in found if len(s.strip()) >= SHORTEST}


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
