"""A recipe: a list of stages, a process for each, and the numbers it promises."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich import get_console
from rich.table import Table
from yaml import YAMLError

from lightning_rlhf.cli.console import say
from lightning_rlhf.cli.folders import (
    FINAL,
    VOLATILE,
    State,
    differing_key,
    folder_of,
    is_finished,
    state_of,
)
from lightning_rlhf.cli.main import IN_RECIPE, OPEN
from lightning_rlhf.cli.process import run_command
from lightning_rlhf.cli.resume import held
from lightning_rlhf.cli.sections import build
from lightning_rlhf.cli.settings import STAGES, Settings, read_settings
from lightning_rlhf.core.config import require, require_one_of
from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.splits import load_demonstrations, load_preferences, load_prompts
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.report.tables import before_after_table, side_by_side

LISTS = ("stages", "overrides", "promises", "next")
ANY = ("seed", *VOLATILE)
"""Keys that may be anything: the recipe is still run as it is written."""
HOW: Mapping[State, tuple[str, ...]] = {
    "new": (),
    "cut off": ("resume=true",),
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


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A bound on a metric in the manifest of a stage. Exactly one of the three is set."""

    stage: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    gain: float | None = None
    """The metric is at least so much higher than before the stage."""

    def __post_init__(self) -> None:
        bounds = [b for b in (self.at_least, self.at_most, self.gain) if b is not None]
        require(len(bounds) == 1, f"the promise on {self.metric}", bounds,
                "exactly one of at_least, at_most, gain")  # fmt: skip

    def measure(self, metrics: Mapping[str, float]) -> float | None:
        """The number that the bound is about; None where it was not measured."""
        start = f"start/{self.metric}"
        if self.metric not in metrics or (self.gain is not None and start not in metrics):
            return None
        return metrics[self.metric] - (metrics[start] if self.gain is not None else 0.0)

    def is_kept(self, measured: float) -> bool:
        """Whether the bound holds."""
        if self.at_most is not None:
            return measured <= self.at_most
        bound = self.at_least if self.gain is None else self.gain
        assert bound is not None
        return measured >= bound

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"gain of {self.gain:g}" if self.gain is not None else f"at least {self.at_least:g}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What recipes/<name>/recipe.yaml says."""

    title: str
    stages: tuple[str, ...]
    program: str | None
    """In place of stages: a file whose `main(PPOConfig, seed, folder)` returns claims."""
    overrides: tuple[str, ...]
    """For every stage; what the user gives wins."""
    promises: tuple[Promise, ...]
    """Of the recipe's own model and data, for any seed."""
    next: tuple[str, ...]
    """What to try afterwards; {folder} is the run's, {given} the last stage's own overrides."""

    def __post_init__(self) -> None:
        require(bool(self.stages) != bool(self.program), "stages", self.stages,
                "at least one stage, or a program in their place")  # fmt: skip
        for stage in self.stages:
            require_one_of("stages", stage, STAGES)
        for promise in self.promises:
            require_one_of(f"the stage of the promise on {promise.metric}", promise.stage,
                           self.stages)  # fmt: skip


def read_recipe(name: str, recipes: Path) -> Recipe:
    """Raises ConfigError where there is no recipe of this name."""
    known = sorted(path.parent.name for path in recipes.glob("*/recipe.yaml"))
    if name not in known:
        raise ConfigError(f"recipe={name} is not known; allowed: {', '.join(known)}")
    file = recipes / name / "recipe.yaml"
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(file))
        for key in LISTS:
            require(isinstance(tree[key], list), key, tree[key], "a list")
        promises = [build(Promise, promise, "promises") for promise in tree["promises"]]
        lists = {key: tuple(tree[key]) for key in LISTS} | {"promises": tuple(promises)}
        return build(Recipe, tree | lists, "recipe")
    except (ConfigError, KeyError, TypeError, YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from error


def run_recipe(recipe: Recipe, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Run what is not done yet, then show what came out and check the promises.

    Raises RLHFError where a stage fails or a promise is not kept.
    """
    commands = {
        stage: stage_overrides(recipe, stage, overrides, cfg.job) for stage in recipe.stages
    }
    stages = {stage: read_settings(compose("config", list(o))) for stage, o in commands.items()}
    for stage, settings in stages.items():  # a fault in the last stage's data must cost no training
        if cfg.overwrite or not is_finished(settings):
            LOAD[stage](settings.data, settings.seed)
    first = stages[recipe.stages[0]]
    with held(first, folder_of(first).parent):
        ran = run_stages(stages, commands, anew=cfg.overwrite)
    metrics = summarise(stages)
    if cfg.job is None:
        folder = folder_of(stages[recipe.stages[0]]).parent
        _, *own = commands[recipe.stages[-1]]
        told = [
            *config_dirs(),
            *(re.sub(rf"^[+]{{2}}(?=({OPEN})[.])", "", o) for o in own),
        ]
        given = "".join(f" {shlex.quote(word)}" for word in told)
        for line in recipe.next:
            say(line.replace("{folder}", str(folder)).replace("{given}", given))
    if not ran:
        say(f"Nothing was left to do. overwrite=true does recipe={cfg.recipe} again.")
    check_promises(recipe, stages, metrics)


def run_stages(
    stages: Mapping[str, Settings], commands: Mapping[str, Sequence[str]], *, anew: bool
) -> bool:
    """Run what is not done yet, or all of them anew; whether there was anything to do."""
    ran = False
    for stage, settings in stages.items():
        state = "outdated" if anew else state_of(settings)
        if state == "done":
            say(f"{stage}: done already, {folder_of(settings)}", "green")
            continue
        ran = True
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
    return (f"stage={stage}", *told, *([f"job='{job}'"] if job else []))


def run_process(stage: str, overrides: Sequence[str], folder: Path) -> None:
    """Run one stage as a process of its own, on this terminal, until its `final/` is there."""
    command = [sys.executable, "-m", "lightning_rlhf", *config_dirs(), *overrides]
    status = run_command(command, {IN_RECIPE: stage})
    if status or not (folder / FINAL).is_dir():
        raise RLHFError(
            f"stage={stage} failed with exit status {status}; what it said stands above. "
            "The same command, without overwrite=true, goes on from there"
        )


def config_dirs() -> list[str]:
    """The user's own --config-dir, as it was given."""
    sources = HydraConfig.get().runtime.config_sources
    return [f"--config-dir={s.path}" for s in sources if s.provider == "command-line"]


def summarise(stages: Mapping[str, Settings]) -> dict[str, Mapping[str, float]]:
    """Show before and after, samples side by side and pictures; returns each stage's metrics."""
    finals = {stage: find(str(folder_of(s) / FINAL), stage) for stage, s in stages.items()}
    metrics: dict[str, Mapping[str, float]] = {
        stage: final.require_manifest(stage).metrics for stage, final in finals.items()
    }
    console = get_console()
    if "ppo" in stages:
        after = metrics["ppo"]
        before = {k.removeprefix("start/"): v for k, v in after.items() if k.startswith("start/")}
        folder = folder_of(stages["ppo"])
        console.print(before_after_table(before, after))
        evaluations = sorted((folder / "samples").glob("eval_*.jsonl"))
        console.print(side_by_side(evaluations[0], evaluations[-1], n=5))
    for settings in stages.values():
        say(f"picture: {folder_of(settings) / 'curves.png'}")
    minutes = sum(m["time/stage_s"] for m in metrics.values()) / 60
    say(f"time: {minutes:.1f} minutes in all stages")
    return metrics


def check_promises(
    recipe: Recipe, stages: Mapping[str, Settings], metrics: Mapping[str, Mapping[str, float]]
) -> None:
    """Print the promises, if the recipe's own model was trained on its own data.

    Raises RLHFError where one is not kept, and the recipe was run as it is written.
    """
    own = {s: read_settings(compose("config", list(stage_overrides(recipe, s, (), None))))
           for s in recipe.stages}  # fmt: skip
    for stage, settings in stages.items():
        if (settings.model.name, settings.data) != (own[stage].model.name, own[stage].data):
            return
    changed: list[str] = []
    for stage, settings in stages.items():
        while key := differing_key(settings.tree, own[stage].tree, (*ANY, *changed)):
            changed.append(key)
    table = Table(title=f"{recipe.title}: what it promises", title_justify="left")
    for column in ("stage", "metric", "promised", "measured", ""):
        table.add_column(column)
    broken = []
    for promise in recipe.promises:
        measured = promise.measure(metrics[promise.stage])
        if measured is None:
            table.add_row(promise.stage, promise.metric, str(promise), "not measured", "")
            broken.append(f"{promise.metric} was not measured")
            continue
        kept = promise.is_kept(measured)
        verdict = "[green]kept[/green]" if kept else "[red]not kept[/red]"
        table.add_row(promise.stage, promise.metric, str(promise), f"{measured:.3f}", verdict)
        if not kept:
            broken.append(f"{promise.metric} is {measured:.3f}, promised: {promise}")
    get_console().print(table)
    if broken and changed:
        say(
            f"Not as the recipe is written: {', '.join(changed)}; so its promises are shown and "
            "not enforced."
        )
    elif broken:
        raise RLHFError(f"{recipe.title} did not keep its promises: {'; '.join(broken)}")


def key_of(override: str) -> str:
    """++ppo.lr=1 -> ppo.lr"""
    return override.lstrip("+~").split("=")[0]
