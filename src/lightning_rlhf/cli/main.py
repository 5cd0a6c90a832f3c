"""The command: compose the configuration with Hydra, then run each job that it describes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pkgutil
import re
import signal
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_rlhf
from lightning_rlhf.callbacks.stop import Stopped
from lightning_rlhf.cli.arguments import (
    COMMANDS,
    WITHOUT_RUN,
    check_command,
    completed_stages,
    composition_error,
    options_last,
    parse_arguments,
    program_name,
    secrets_of,
    without_address,
    without_secrets,
)
from lightning_rlhf.cli.execute import execute, given_overrides, resume_hint, run_job
from lightning_rlhf.cli.sweep import BASIC, ignore_presets, is_sweeper, mark_failed
from lightning_rlhf.core.errors import PrintedError, RewardError, RLHFError, StorageError
from lightning_rlhf.data.sources import ENDINGS
from lightning_rlhf.io.console import visible
from lightning_rlhf.io.storage import full_disk_told
from lightning_rlhf.io.user_code import code_of_command
from lightning_rlhf.parallel.world import IN_LAUNCHER, leave_run, world
from lightning_rlhf.runs import console
from lightning_rlhf.runs.console import print_error
from lightning_rlhf.runs.process import IN_RECIPE, end_with, is_job


def main() -> None:
    """Run train.py or the console command."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    leave_run()
    if IN_LAUNCHER in os.environ:
        end_with(int(os.environ[IN_LAUNCHER]))
    elif world().launcher == "torchrun":
        end_with(os.getppid())
    if not world().is_first:  # another process prints the same; tracebacks remain
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        warnings.simplefilter("ignore")
    words = sys.argv[1:]
    if words and words[0] in WITHOUT_RUN:
        words = [*words[1:], f"preflight={WITHOUT_RUN[words[0]]}"]
    if words == ["--version"]:
        print(f"lightning-rlhf {lightning_rlhf.__version__}")
        return
    if words and words[0] in COMMANDS:
        # A shell leaves ~ as it is in --out=~/page.html, and between quotes.
        home = os.path.expanduser("~")  # which stays ~ for a user without one
        rest = [re.sub(r"^((--[\w-]+=)?)~(?=/|$)", lambda x: x[1] + home, w) for w in words[1:]]
        try:
            # What the folders that it reads name is not run.
            with code_of_command(), full_disk_told():
                pkgutil.resolve_name(COMMANDS[words[0]])(rest)
        except RLHFError as error:
            print_error(without_secrets(str(error)))
            sys.exit(1)
        return
    register_resolvers()
    ignore_presets()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # this program prints Hydra's errors itself, in one line
    try:
        given = parse_arguments(words)
        check_command(words, given)
        if stages := completed_stages(given):
            print(*stages, sep="\n")
            return
        sys.argv[1:] = options_last(words, given)
        with printed_safely(given):
            compose()
    except Exception as error:
        is_ours = isinstance(error, RLHFError)
        if "debug=true" in words and not is_ours:
            print(visible(without_secrets(traceback.format_exc(), words)), file=sys.stderr)
        message = str(error) if is_ours else composition_error(error, given)
        print_error(message)
        sys.exit(1)


@contextlib.contextmanager
def printed_safely(given: Namespace) -> Iterator[None]:
    """Remove secrets from the configuration that Hydra prints where it runs no job."""
    if not (given.cfg or given.info or given.help or given.hydra_help):
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(visible(without_secrets(printed.getvalue(), given.overrides)), end="")


def register_resolvers() -> None:
    """Register the resolvers and the configuration that conf/ refers to.

    `${recipes:path}` is a path inside recipes/, `${program:}` the command's name, `${hub_val:name}`
    a data set to validate on (null beside a local file to train on), and the configuration `open` a
    mapping that takes any key on the command line.
    """

    def hub_val(name: str, *, _parent_: DictConfig) -> str | None:
        return None if str(_parent_.train).endswith(ENDINGS) else name

    OmegaConf.register_new_resolver("hub_val", hub_val, replace=True)
    OmegaConf.register_new_resolver("program", program_name, replace=True)
    OmegaConf.register_new_resolver("recipes", lambda p: str(console.RECIPES / p), replace=True)
    ConfigStore.instance().store("open", OmegaConf.create({}, flags={"struct": False}))


@hydra.main(version_base="1.3", config_path=str(console.CONF), config_name="config")
def compose(cfg: DictConfig) -> str | None:
    """Run one job that Hydra composed. Return why a sweep's job failed, else None."""
    sys.argv[1:] = map(without_address, sys.argv[1:])  # W&B records it
    register_resolvers()  # a launcher may have started this process
    hydra_config = HydraConfig.get()
    from_sweep = hydra_config.mode == RunMode.MULTIRUN
    in_sweep = from_sweep or is_job()
    # The command prints how such a job ended; Ctrl-C is for the command, which passes it on.
    is_apart = from_sweep and hydra_config.launcher._target_ != BASIC
    if is_apart and not is_sweeper():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    secrets = secrets_of(OmegaConf.to_container(cfg))
    with contextlib.suppress(OmegaConfBaseException):  # which the job itself reports
        secrets |= secrets_of(OmegaConf.to_container(cfg, resolve=True))

    def shown(text: str) -> str:
        return visible(without_secrets(text, secrets=secrets))

    try:
        if is_apart:
            return run_job(cfg, given_overrides())
        with full_disk_told():
            execute(cfg, in_sweep)
    except (KeyboardInterrupt, Stopped) as stop:
        signum = stop.signum if isinstance(stop, Stopped) else signal.SIGINT
        if IN_RECIPE not in os.environ:
            print("; ".join(["stopped", *resume_hint(cfg, in_sweep)]))
        sys.exit(128 + signum)
    except Exception as error:
        is_ours = isinstance(error, RLHFError)
        if not is_ours or ("debug" in cfg and cfg.debug is True):
            # Printed here, since Hydra would also print the overrides, with passwords in them.
            print(shown(traceback.format_exc()), file=sys.stderr, end="")
        message = shown(str(error) if is_ours else f"{type(error).__name__}: {error}")
        if is_ours and not is_apart and not isinstance(error, PrintedError):
            is_cut_off = isinstance(error, RewardError | StorageError)
            hint = resume_hint(cfg, in_sweep) if is_cut_off else []
            print_error("; ".join([message, *hint]))
        if in_sweep:
            message = mark_failed(cfg, message)
        if not from_sweep:
            sys.exit(1)
        return message
    return None
