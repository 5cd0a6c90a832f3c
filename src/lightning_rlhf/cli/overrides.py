"""The arguments of a command as Hydra parses them, and redaction of secrets in its output."""

from __future__ import annotations

import difflib
import os
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NoReturn
from urllib.parse import unquote

import yaml
from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.io.console import print_line
from lightning_rlhf.parallel.world import world
from lightning_rlhf.rewards.config import HIDDEN, redacted
from lightning_rlhf.stages.console import CONF

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


# The parser of @hydra.main; Hydra has no public name for it.

GROUPS = ("model", "data", "reward", "trainer", "logger", "callbacks", "advantage")
"""Groups of conf/ from which one file each is chosen."""
CHOICE = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*(?<!\.yaml)(?<!\.yml)")
"""Pattern of the name of a file in a group of conf/, or in a folder below it."""
COMMANDS = {
    "chat": "lightning_rlhf.cli.chat:chat",
    "compare": "lightning_rlhf.cli.commands:compare",
    "dashboard": "lightning_rlhf.cli.commands:dashboard",
    "diminishing": "lightning_rlhf.cli.commands:diminishing",
    "export": "lightning_rlhf.cli.export:export",
    "replay": "lightning_rlhf.cli.replay:replay",
    "report": "lightning_rlhf.cli.commands:report",
    "serve-reward": "lightning_rlhf.cli.serve:serve_reward",
}
"""First word of a command that composes no configuration -> the function that runs the rest."""
WITHOUT_RUN = {"check": "only", "plan": "plan"}
"""First word of a command that checks a stage or plans its memory, without training -> value of
`preflight` that does the same."""
ALIKE = 0.7
"""Likeness, from 0 to 1, from which a word is taken for a mistyped command."""
PLUGINS = {
    "hydra/launcher=joblib": "hydra_plugins.hydra_joblib_launcher",
    "hydra/launcher=submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "hydra/launcher=submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
    "hydra/sweeper=optuna": "optuna",
}
"""Choice of a launcher or a sweeper -> the module that it needs, of an optional package."""
READ_BY = {"advantage": "ppo"}
"""Group whose file becomes part of a stage's section -> the stage."""

TRIAL = "callbacks.trial"
"""Key of the callback with which a trial of a study reports; it is no part of a job's name."""


def check_command(first: Sequence[str], given: Namespace) -> None:
    """Raise ConfigError for a mistyped command, or for a sweep or a recipe that cannot be run.

    That is one whose checks or plan alone are wanted, as its stages start from what earlier ones
    have trained; one that lacks a package or a program; or one in several processes, each of which
    would run all its jobs. Prints a warning where a launcher or a sweeper is chosen for no sweep.

    first: the first word of the command line, if it has any; an override has a "=" in it.
    """
    commands = [*COMMANDS, *WITHOUT_RUN]
    for word in first:
        close = difflib.get_close_matches(word, commands, n=1, cutoff=ALIKE)
        if close and "=" not in word:
            raise ConfigError(f"{word} is no command; did you mean {close[0]}?")
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
        if word == "hydra/launcher=submitit_slurm" and is_sweep and which("srun") is None:
            raise ConfigError(
                f"{word} needs Slurm, and there is no srun on this machine; allowed: a machine of "
                "the cluster, or hydra/launcher=joblib, submitit_local or basic"
            )
    if is_sweep:
        refuse_processes("a sweep")


def refuse_processes(what: str) -> None:
    """Raise ConfigError where several processes would each run all jobs of a sweep or a recipe."""
    if (place := world()).size > 1:
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, but {what} starts the processes "
            "of its jobs itself, by trainer.devices; allowed: one stage a command"
        )


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


def search_path() -> list[str]:
    """Return the overrides that name further configuration folders, as given."""
    given: Any = OmegaConf.to_container(HydraConfig.get().overrides.hydra)
    return [word for word in given if key_of(word) == "hydra.searchpath"]


def refuse_absent_callbacks(words: Sequence[str]) -> None:
    """Raise ConfigError where `callbacks.NAME=null` leaves out a callback that is not there.

    words: overrides of a job; the configuration is composed from the others.
    """
    absent = {
        override.input_line: override.key_or_group.removeprefix("callbacks.")
        for override in parse_overrides(words)
        if re.fullmatch(r"callbacks\.[^.]+", override.key_or_group)
        and not override.is_delete()
        and override.value() is None
    }
    if not absent:
        return
    rest = [word for word in words if word not in absent]
    there = compose(HydraConfig.get().job.config_name, [*search_path(), *rest]).callbacks
    for line, name in absent.items():
        if name not in there:
            names = ", ".join(f"callbacks.{known}=null" for known in there)
            raise ConfigError(
                f"{line} leaves out a callback that is not there; allowed: "
                f"{names or 'a name in the file that callbacks=NAME chooses, and it chooses none'}"
            )


def completed_stages(given: Namespace) -> list[str]:
    """Return the completions of `stage=` if the shell asks for them; Hydra knows no choices."""
    if not given.shell_completion or "COMP_LINE" not in os.environ:
        return []
    if not os.environ["COMP_LINE"].split(" ")[-1].startswith("stage="):
        return []
    return sorted(f"stage={path.stem}" for path in (CONF / "stages").glob("*.yaml"))


def check_stage(stage: Any, tree: Mapping[Any, Any], sources: Iterable[Any]) -> None:
    """Raise ConfigError where the section of the chosen stage lies in a folder and is not added.

    tree: the composed configuration.
    sources: `hydra.runtime.config_sources`, the folders from which it was composed.
    """
    folders = [Path(source.path) / "stages" for source in sources if source.schema == "file"]
    known = {file.stem for folder in folders for file in folder.glob("*.yaml")}
    if stage not in tree and stage in known:
        raise ConfigError(
            f"stage={stage} chooses a section that is not part of the configuration; add "
            f"+stages={stage}, which reads stages/{stage}.yaml"
        )


def check_choices(choices: Mapping[str, Any]) -> None:
    """Raise ConfigError where a choice names its file by a path, as model=../model/tiny does.

    Hydra would find the file, but not the values stored under the name of the choice.
    """
    for group in GROUPS:
        choice = choices.get(group)
        if isinstance(choice, str) and CHOICE.fullmatch(choice) is None:
            allowed = GlobalHydra.instance().config_loader().get_group_options(group)
            raise ConfigError(f"{group}={choice} is not known; allowed: {', '.join(allowed)}")
