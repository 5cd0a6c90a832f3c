"""The launchers and sweepers of a sweep: what they need, and that a sweep is run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from shutil import which

from lightning_rlhf.cli.overrides import key_of
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.stages.console import print_line

PLUGINS = {
    "hydra/launcher=joblib": "hydra_plugins.hydra_joblib_launcher",
    "hydra/launcher=submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "hydra/launcher=submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
    "hydra/sweeper=optuna": "optuna",
}
"""Choice of a launcher or a sweeper -> the module that it needs, of an optional package."""


def is_sweep(given: Namespace) -> bool:
    """Return whether a command runs several jobs: with -m, or by Hydra's own key for it."""
    return given.multirun or "hydra.mode=MULTIRUN" in given.overrides


def check_plugins(given: Namespace) -> None:
    """Raise ConfigError where a sweep needs a package or a program that is not there.

    Prints a warning where a launcher or a sweeper is chosen and no sweep is run.
    """
    refuse_absent_plugins(given.overrides)
    is_printed = given.cfg or given.info or given.help or given.hydra_help
    for word in given.overrides:
        if key_of(word) not in ("hydra/launcher", "hydra/sweeper") or is_printed:
            continue
        if not is_sweep(given):
            print_line(f"warning: {word} is for sweeps and is not used without -m", "yellow")
        elif word == "hydra/launcher=submitit_slurm" and which("srun") is None:
            raise ConfigError(
                f"{word} needs Slurm, and there is no srun on this machine; allowed: a machine of "
                "the cluster, or hydra/launcher=joblib, submitit_local or basic"
            )


def refuse_absent_plugins(words: Sequence[str]) -> None:
    """Raise ConfigError where a sweep needs a package that is not installed."""
    for word in words:
        if word in PLUGINS and find_spec(PLUGINS[word]) is None:
            raise ConfigError(
                f"{word} needs {PLUGINS[word]}, which is not installed; "
                "pip install 'lightning-rlhf[sweeps]'"
            )
