"""The arguments of a command: options and overrides as Hydra parses them, errors, secrets."""

import difflib
import logging
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

from hydra._internal.utils import get_args_parser  # of @hydra.main; there is no public one
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from lightning_rlhf.core.errors import ConfigError, unknown_key
from lightning_rlhf.io.console import print_line, visible
from lightning_rlhf.io.user_code import optional
from lightning_rlhf.parallel.world import world
from lightning_rlhf.rewards.config import HIDDEN, redacted
from lightning_rlhf.runs.console import CONF
from lightning_rlhf.runs.stage import STAGES

COMMANDS = {"chat": "chat", "replay": "replay"} | dict.fromkeys(
    ("compare", "dashboard", "diminishing", "export", "report", "serve-reward"), "commands"
)
"""First word of a command that composes no configuration -> the module of its function."""
WITHOUT_RUN = {"check": "only", "plan": "plan"}
"""First word of a command that checks a stage or plans its memory, without training -> value of
`preflight` that does the same."""
Options = Mapping[str, Mapping[str, Any]]
"""Argument or option of a command -> keywords of argparse's `add_argument`."""
FLAG = {"action": "store_true"}
"""Keywords of an option that is given without a value."""
PLUGINS = {
    "hydra/launcher=joblib": "hydra_plugins.hydra_joblib_launcher",
    "hydra/launcher=submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "hydra/launcher=submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
    "hydra/sweeper=optuna": "optuna",
}
"""Choice of a launcher or a sweeper -> the module that it needs, of an optional package."""
READ_BY = {"advantage": "ppo", "policy_loss": "ppo"}
"""Group whose file becomes part of a stage's section -> the stage."""
GROUPS = ("reward", "model", "data", *READ_BY)
"""Groups in whose place a user may name a file, a function or a model."""
OVERRIDE = (
    "KEY=VALUE, quoted in both kinds as 'KEY=\"VALUE\"' where the value has other signs than "
    f"letters, digits and ._/-, or as the first word {', '.join(sorted(COMMANDS | WITHOUT_RUN))}"
)
"""Description of the words that a command line takes."""
TOKENS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables from which libraries read a token; reward.token_env names another."""
OBJECTS = ("callbacks", "logger", "trainer")
"""Sections with objects of the user's own, whose errors may show what they are given."""
ADDRESS = re.compile(r"(url['\"]?\s*[=:]\s*['\"]?|(?=\b[\w+.-]*://))(.*)", flags=re.DOTALL)
"""Regular expression of the text before an address in an override, and of the address."""
SHORTEST = 4
"""Minimum length, in characters, of a secret that is hidden everywhere; a shorter one is hidden in
addresses alone."""


def program_name() -> str:
    """Return the name of the command: python train.py or lightning-rlhf."""
    name = Path(sys.argv[0]).name.replace("__main__.py", "-m lightning_rlhf")
    return name if name == "lightning-rlhf" else f"python {name}"


def parse_command(
    run: Callable[[Sequence[str]], None], words: Sequence[str], options: Options, epilog: str = ""
) -> Namespace:
    """Return the arguments of a command that composes no configuration.

    run: its function, whose name and docstring, up to what it raises, its help shows.
    """
    name, text = run.__name__.replace("_", "-"), str(run.__doc__).partition("Raises")[0]
    parser = ArgumentParser(f"lightning-rlhf {name}", None, text, epilog)
    for option, keywords in options.items():
        parser.add_argument(option, **keywords)
    return parser.parse_intermixed_args(words)


def parse_arguments(words: Sequence[str]) -> Namespace:
    """Return Hydra's options and, in `overrides`, all other arguments in their order.

    Hydra's own call of the parser accepts overrides only on one side of the options.

    Raises ConfigError where an option is unknown or its value is wrong.
    """

    def refuse(message: str) -> NoReturn:
        reason = without_secrets(message, words)
        raise ConfigError(f"{reason}; allowed: KEY=VALUE without -, or an option of --hydra-help")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    pairs = zip(words, [*words[1:], ""], strict=False)
    # --info has an optional value, and the parser would take an override for it.
    read = ["--info=all" if x in ("-i", "--info") and "=" in after else x for x, after in pairs]
    given, unknown = parser.parse_known_intermixed_args(read)
    if unknown:
        refuse(f"{unknown[0]} is no option")
    return given


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


def check_command(words: Sequence[str], given: Namespace) -> None:
    """Raise ConfigError for a mistyped command, or for a sweep or a recipe that cannot be run.

    That is one whose checks or plan alone are wanted, one that lacks a package, one whose names,
    which are written down, would have a secret, or one in several processes, each of which would
    run all its jobs. words: the command line; given: what it holds.
    """
    close = difflib.get_close_matches((*words, "")[0], [*COMMANDS, *WITHOUT_RUN], n=1, cutoff=0.7)
    if close and "=" not in words[0]:
        raise ConfigError(f"{words[0]} is no command; did you mean {close[0]}?")
    keys = {key_of(word) for word in given.overrides}
    secret = [shown for word in given.overrides if (shown := without_address(word)) != word]
    if secret and (given.multirun or "hydra.output_subdir" in keys):
        raise ConfigError(
            f"a sweep, and hydra.output_subdir, writes down what it is given, and {secret[0]} has "
            "a user, a password or a query; allowed: an address without, and the name of an "
            "environment variable with the token in reward.token_env"
        )
    modes = [word for word, mode in WITHOUT_RUN.items() if f"preflight={mode}" in given.overrides]
    is_sweep = given.multirun or "hydra.mode=MULTIRUN" in given.overrides
    if modes and (is_sweep or "recipe" in keys):
        many, way = ("sweep", ", without -m and one value a key") if is_sweep else ("recipe", "")
        way = f"{program_name()} {modes[0]} stage=NAME{way}"
        raise ConfigError(f"a {modes[0]} is of one stage, not of a {many}; allowed: {way}")
    for word in given.overrides:
        if word in PLUGINS:
            optional(PLUGINS[word], "sweeps", word)
        if key_of(word) in ("hydra/launcher", "hydra/sweeper") and not (is_sweep or given.cfg):
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
        owner, key = stage_of(override, stages), override.key_or_group
        if owner not in (None, stage):
            own = f" (a stage of your own on it takes {key}@{stage}=NAME)" * (key in READ_BY)
            raise ConfigError(
                f"stage={stage} does not read {without_address(key)}; leave out "
                f"{without_address(override.input_line or key)}, or give it to stage={owner}{own}"
            )


def composition_error(error: Exception, words: Sequence[str]) -> str:
    """Return in one line, without secrets, why Hydra could not compose the configuration.

    Where nothing is known that helps, it is the first paragraph of the library's message, and that
    of its cause. words: overrides of the command.
    """
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        word = error.override
        allowed = f"stage={word}" if word in STAGES else OVERRIDE
        reason = f"{without_address(word)} is no override; allowed: {allowed}"
    elif isinstance(cause, ConfigKeyError | ConfigAttributeError):
        node: Any = OmegaConf.to_container(cause.parent_node)  # type: ignore[arg-type]
        node.pop("hydra", None)
        key, full = str(cause.key), str(cause.full_key)
        prefix = full.removesuffix(key)
        reason = f"{full} is not a known key; did you mean {prefix.rstrip('.')}?"
        if node:
            reason = unknown_key(key, node, prefix, node)
    elif isinstance(error, MissingConfigException) and error.options:
        choice = re.sub(r"^(hydra/\w+|\w+)/", r"\1=", str(error.missing_cfg_file))
        is_whole = any(word.startswith(choice.partition("=")[0] + "=") for word in words)
        meant = choice_meant(choice, error.options) if is_whole else ""
        reason = f"{without_address(choice)} is not known; "
        reason += f"did you mean {meant}? " * bool(meant)
        reason += f"allowed: {', '.join(error.options)}"
    else:
        texts = (without_secrets(str(found), words) for found in (error, cause or ""))
        reason = " ".join(re.split(r"\n\n|\nSee https:", text)[0] for text in texts)[:400]
    return " ".join(reason.split())


def choice_meant(choice: str, options: Sequence[str]) -> str:
    """Return what was probably meant by a choice of a group that is not there; "" if unknown."""
    group, _, name = choice.partition("=")
    starts = [option for option in options if name and option.startswith(name)]
    close = starts or difflib.get_close_matches(name, options)
    others = GROUPS if re.fullmatch(r"[\w+]{1,40}", name) else ()
    meant = [f"{other}={name}" for other in others if (CONF / other / f"{name}.yaml").is_file()]
    is_folder = group == "model" and (Path(name) / "config.json").is_file()
    if is_folder or (not (meant or close) and group in GROUPS and re.search(r"[/:.]", name)):
        key = f"{READ_BY.get(group)}.{group}="  # a function, a file or a model of the user's
        key = {"reward": "reward=function reward.path=", "model": "model=hub model.name_or_path=",
               "data": "data=files with data.demonstrations.train, data.preferences.train or "
                       "data.prompts.train="}.get(group, key)  # fmt: skip
        is_server = group == "reward" and "://" in name
        size = " (model=small where it has about a million weights)" * is_folder
        own = f" model.name={Path(name).absolute().name}{size}" * (group == "model")
        return without_address(f"{'reward=http reward.url=' if is_server else key}{name}{own}")
    return " or ".join(meant or [f"{group}={x}" for x in close])


class VisibleFormatter(logging.Formatter):
    """Formatter that escapes control characters in the overrides that Hydra logs in a sweep.

    Tabs, with which Hydra indents its lines, become spaces. The name of a job's folder, and the
    overrides with which a trial reports to its study, come last and are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = re.split(r" job='| callbacks\.trial\.", super().format(record))[0]
        return visible(text.expandtabs())


def without_address(word: str) -> str:
    """Return an override without the user, the password and the query of an address in it."""
    return ADDRESS.sub(lambda found: found[1] + redacted(found[2]), word, count=1)


def without_secrets(text: str, words: Sequence[str] = (), secrets: Collection[str] = ()) -> str:
    """Return a text without tokens, and without user, password and query of any address in it.

    words: overrides whose addresses are found in the text whatever characters they contain.
    secrets: texts that are hidden wherever they occur, besides the tokens in the environment.
    """
    for found in filter(None, map(ADDRESS.search, words)):
        text = text.replace(found[2], redacted(found[2])) if found[2] else text
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
    names, secrets, parts = [*TOKENS], list[str](), list[str]()
    rest = f"{os.getcwd()} true none {trees}"
    for section, key, value in (leaf for tree in trees for leaf in leaves(tree)):
        if key == "token_env":
            names.append(value)
        if section in OBJECTS:
            names += re.findall(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)", value)
        if key == "url" or "://" in value:
            user, _, password = value.rpartition("@")[0].rpartition("//")[2].partition(":")
            query = re.split(r"[?#]", value, maxsplit=1)[1:]
            secrets += [password, *query]
            parts += [user, *re.findall(r"=([^&#]*)", "".join(query))]
            rest = rest.replace(value, "")
    for text in (os.environ.get(name, "") for name in names):
        secrets += [text, *text.splitlines()]  # an error may show one line of a key in PEM
    words = {*re.findall(r"\w+", rest.lower())}
    secrets += list(map(unquote, secrets))
    secrets += [form for x in parts for form in (x, unquote(x)) if form.lower() not in words]
    return {x.strip() for x in secrets if len(x.strip()) >= SHORTEST}


def leaves(tree: Any, section: str = "", key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield every text of nested mappings and lists, after its first and its last key."""
    if isinstance(tree, str):
        yield section, key, tree
    elif isinstance(tree, dict):
        for name, part in tree.items():
            yield from leaves(part, section or str(name), str(name))
    for part in tree if isinstance(tree, list) else ():
        yield from leaves(part, section, key)
