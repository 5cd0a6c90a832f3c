"""A recipe: a list of stages, run as a process each, and what came out of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass
from rich import get_console
from yaml import YAMLError

from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.cli.names import as_typed, key_of, program_name
from lightning_rlhf.cli.process import IN_RECIPE, run_command
from lightning_rlhf.cli.promises import Promise, check_promises
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RLHFError
from lightning_rlhf.core.validation import STRICT, build, described, rule, section
from lightning_rlhf.core.verdict import Verdict
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.splits import load_demonstrations, load_preferences, load_prompts
from lightning_rlhf.models.checkpoint import MANIFEST, find
from lightning_rlhf.report.tables import before_after_table, side_by_side
from lightning_rlhf.stages.console import say
from lightning_rlhf.stages.folders import (
    FINAL,
    State,
    folder_of,
    is_finished,
    state_of,
)
from lightning_rlhf.stages.resume import held
from lightning_rlhf.stages.settings import STAGES, Settings, read_settings

Words = Annotated[tuple[str, ...], Field(strict=False), described("a list of texts")]
HOW: Mapping[State, tuple[str, ...]] = {
    "new": (),
    "cut off": ("resume=auto",),
    "outdated": ("overwrite=true",),
}
"""State of a stage -> the overrides with which it is run."""
LOAD: Mapping[str, Callable[[DataConfig, int], object]] = {
    "sft": load_demonstrations,
    "rm": load_preferences,
    "ppo": load_prompts,
}
OWN = ("recipe", "resume", "overwrite")
"""Overrides that are for the recipe and not handed to its stages."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """Content of recipes/<name>/recipe.yaml."""

    title: str
    stages: Words
    program: str | None
    """In place of stages: a file whose `main(PPOConfig, seed, folder)` returns claims."""
    overrides: Words
    """Overrides of every stage; what the user gives wins."""
    promises: Annotated[
        tuple[Annotated[Promise, section(Promise)], ...],
        Field(strict=False),
        described("a list of promises"),
    ]
    """Promises about the recipe's own model and data, for any seed."""
    next: Words
    """Commands to try afterwards; {folder} is the run's, {given} the last stage's own overrides."""

    def __post_init__(self) -> None:
        rule(bool(self.stages) != bool(self.program), "stages", self.stages,
             "at least one stage, or a program in their place")  # fmt: skip
        for stage in self.stages:
            rule(stage in STAGES, "stages", stage, ", ".join(STAGES))
        for promise in self.promises:
            rule(promise.stage in self.stages, f"promises on {promise.metric}", promise.stage,
                 ", ".join(self.stages))  # fmt: skip


def read_recipe(name: str, recipes: Path) -> Recipe:
    """Return the recipe of this name. Raises ConfigError where there is none."""
    known = sorted(path.parent.name for path in recipes.glob("*/recipe.yaml"))
    if name not in known:
        raise ConfigError(f"recipe={name} is not known; allowed: {', '.join(known)}")
    file = recipes / name / "recipe.yaml"
    try:
        return build(Recipe, OmegaConf.to_container(OmegaConf.load(file)), "recipe")
    except (ConfigError, YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from error


def run_recipe(recipe: Recipe, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Run what is not done yet, then show what came out and check the promises.

    Raises RLHFError where a stage fails or a promise is not kept.
    """
    commands = {
        stage: stage_overrides(recipe, stage, overrides, cfg.job) for stage in recipe.stages
    }
    stages = {stage: read_settings(composed(o)) for stage, o in commands.items()}
    with Working("looking through the data"):  # a fault in the last stage's costs no training
        for stage, settings in stages.items():
            if cfg.overwrite or not is_finished(settings):
                LOAD[stage](settings.data, settings.seed)
    first = stages[recipe.stages[0]]
    with held(first, folder_of(first).parent):
        ran = run_stages(stages, commands, anew=cfg.overwrite)
    metrics = summarise(stages, ran)
    if cfg.job is None:
        folder = folder_of(stages[recipe.stages[0]]).parent
        _, *own = commands[recipe.stages[-1]]
        told = [
            *own_configs(),
            *map(as_typed, own),
        ]
        given = "".join(f" {shlex.quote(word)}" for word in told)
        for line in recipe.next:
            told_line = line.replace("python train.py", program_name())
            say(told_line.replace("{folder}", str(folder)).replace("{given}", given))
    if not ran:
        say(f"Nothing was left to do. overwrite=true does recipe={cfg.recipe} again.")
    written = {
        stage: read_settings(composed(stage_overrides(recipe, stage, (), None)))
        for stage in recipe.stages
    }
    check_promises(recipe.title, recipe.promises, metrics, stages, written)


def run_stages(
    stages: Mapping[str, Settings], commands: Mapping[str, Sequence[str]], *, anew: bool
) -> list[str]:
    """Run what is not done yet, or all of them anew; the stages that were run."""
    ran = []
    for stage, settings in stages.items():
        state = "outdated" if anew else state_of(settings)
        if state == "done":
            say(f"{stage}: done already, {folder_of(settings)}", "green")
            continue
        ran.append(stage)
        say(f"{stage}: {folder_of(settings)}", "bold")
        run_process(stage, [*commands[stage], *HOW[state]], folder_of(settings))
    return ran


def stage_overrides(
    recipe: Recipe, stage: str, overrides: Sequence[str], job: str | None
) -> tuple[str, ...]:
    """The command line of one stage: the recipe's overrides, then the user's in their place."""
    others = tuple(f"{other}." for other in STAGES if other != stage)
    if stage != "ppo":
        others = (*others, "advantage")
    given = [o for o in overrides if key_of(o) not in OWN]
    keys = {key_of(o) for o in given}
    told = [*(o for o in recipe.overrides if key_of(o) not in keys), *given]
    told = [o for o in told if not key_of(o).startswith(others)]
    quoted = str(job).replace("'", r"\'")
    return (f"stage={stage}", *told, *([f"job='{quoted}'"] if job else []))


def run_process(stage: str, overrides: Sequence[str], folder: Path) -> None:
    """Run one stage as a process of its own, on this terminal, until its `final/` is there."""
    command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *overrides]
    status = run_command(command, {IN_RECIPE: stage})
    if status or not (folder / FINAL).is_dir():
        raise RLHFError(
            f"stage={stage} failed with exit status {status}; what it said stands above. "
            "The same command, without overwrite=true, goes on from there"
        )


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of one stage, from the same file as the recipe's own."""
    return compose(HydraConfig.get().job.config_name, list(overrides))


def own_configs() -> list[str]:
    """Return the options that name configurations of the user's own, as they were given."""
    hydra = HydraConfig.get()
    sources = hydra.runtime.config_sources
    folders = [f"--config-dir={s.path}" for s in sources if s.provider == "command-line"]
    name = hydra.job.config_name
    return folders + ([f"--config-name={name}"] if name != "config" else [])


def summarise(stages: Mapping[str, Settings], ran: Sequence[str]) -> dict[str, Mapping[str, float]]:
    """Show before and after, samples side by side and pictures; returns each stage's metrics.

    ran: stages that were run just now, whose results stand above.
    """
    finals = {stage: find(str(folder_of(s) / FINAL), stage) for stage, s in stages.items()}
    metrics: dict[str, Mapping[str, float]] = {
        stage: final.require_manifest(stage).metrics for stage, final in finals.items()
    }
    console = get_console()
    if "ppo" in stages:
        after = metrics["ppo"]
        before = {k.removeprefix("start/"): v for k, v in after.items() if k.startswith("start/")}
        folder = folder_of(stages["ppo"])
        if "ppo" not in ran:
            said = finals["ppo"].require_manifest("ppo").verdicts
            verdicts = {name: Verdict(**verdict) for name, verdict in said.items()}
            console.print(before_after_table(before, after, verdicts))
        evaluations = sorted((folder / "samples").glob("eval_*.jsonl"))
        if not evaluations:
            raise CheckpointError(
                f"{folder / 'samples'} holds no eval_*.jsonl, which a finished stage=ppo leaves. "
                "overwrite=true does the recipe again"
            )
        console.print(side_by_side(evaluations[0], evaluations[-1], n=5))
    for settings in stages.values():
        say(f"picture: {folder_of(settings) / 'curves.png'}")
    for stage, final in finals.items():
        if "time/stage_s" not in metrics[stage]:
            raise CheckpointError(f"{final.path / MANIFEST} is damaged: it lacks time/stage_s")
    minutes = sum(m["time/stage_s"] for m in metrics.values()) / 60
    say(f"time: {minutes:.1f} minutes in all stages")
    return metrics
