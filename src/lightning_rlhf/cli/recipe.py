"""Recipes: lists of stages, each run as a process, and a summary of their results."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from pydantic.dataclasses import dataclass
from rich import get_console
from rich.table import Table
from yaml import YAMLError

from lightning_rlhf.cli.arguments import (
    key_of,
    parse_overrides,
    program_name,
    stage_of,
)
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RLHFError, require
from lightning_rlhf.core.validation import STRICT, build, described, rule
from lightning_rlhf.data.readers import load
from lightning_rlhf.evaluation.promises import ANY, Promise, are_made, check_promises
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.checkpoint import MANIFEST
from lightning_rlhf.report.tables import side_by_side
from lightning_rlhf.runs import console
from lightning_rlhf.runs.folders import (
    FINAL,
    check_writable,
    differing_keys,
    folder_of,
    run_folder,
)
from lightning_rlhf.runs.process import IN_RECIPE, run_command
from lightning_rlhf.runs.resume import State, held, state_of
from lightning_rlhf.runs.settings import read_settings
from lightning_rlhf.runs.stage import STAGES, Settings

if TYPE_CHECKING:  # with torch and Lightning, which reading a recipe does not need
    from lightning_rlhf.report.run_page import Evaluated

Words = Annotated[tuple[str, ...], Field(strict=False), described("a list of texts")]
HOW: Mapping[State, tuple[str, ...]] = {
    "new": (),
    "cut off": ("resume=auto",),
    "outdated": ("overwrite=true",),
}
"""State of a stage -> overrides with which it is run."""
OWN = ("recipe", "resume", "overwrite")
"""Keys that the recipe reads itself and does not pass to its stages."""
FOLDER = "{folder}"
"""Text in a step's overrides that stands for the folder of the recipe's run."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """Content of a recipe.yaml."""

    title: str
    stages: Words
    """Steps in their order: the name of a stage, or STAGE@JOB for a stage as a job of the run."""
    program: str | None
    """File whose `main(PPOConfig, seed, folder)` returns claims; it replaces the stages."""
    overrides: Words
    """Overrides for every stage; those of the user take precedence."""
    steps: Annotated[Mapping[str, Words], described("a mapping from steps to lists of texts")] = (
        field(default_factory=dict)
    )
    """Step -> overrides of its own, in which {folder} is the run's."""
    promises: Annotated[
        tuple[Promise, ...],
        Field(strict=False),
        described("a list of promises"),
    ]
    """Bounds that hold for the recipe's own model and data with any seed."""
    next: Words
    """Suggested next commands; {folder} is the run's, {given} the last stage's overrides."""

    def __post_init__(self) -> None:
        rule(bool(self.stages) != bool(self.program), "stages", self.stages,
             "at least one stage, or a program in their place")  # fmt: skip
        rule(len(set(self.stages)) == len(self.stages), "stages", list(self.stages),
             "each step once; STAGE@JOB repeats a stage")  # fmt: skip
        rule(not self.stages or split_step(self.stages[0])[1] is None, "stages",
             list(self.stages), "a first step without a job")  # fmt: skip
        for step in self.steps:
            rule(step in self.stages, "steps", step, ", ".join(self.stages))
        for promise in self.promises:
            rule(promise.stage in self.stages, f"promises on {promise.metric}", promise.stage,
                 ", ".join(self.stages))  # fmt: skip


def recipe_folder(name: str) -> Path:
    """Return the folder of a recipe: one of the package, or a user's own by its path.

    Raises ConfigError where it holds no recipe.yaml.
    """
    known = sorted(path.parent.name for path in console.RECIPES.glob("*/recipe.yaml"))
    own = Path(os.path.expanduser(str(name)))
    if name not in known and not (own / "recipe.yaml").is_file():
        raise ConfigError(
            f"recipe={name} is not known; allowed: {', '.join(known)}, or a folder that holds a "
            "recipe.yaml"
        )
    return console.RECIPES / name if name in known else own


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe in a folder. Raises ConfigError where it is not valid."""
    file = folder / "recipe.yaml"
    try:
        return build(Recipe, OmegaConf.to_container(OmegaConf.load(file)), "recipe")
    except (ConfigError, YAMLError, OmegaConfBaseException, OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


@dataclass(frozen=True)
class RecipeStep:
    """A step of a recipe as it is run."""

    overrides: tuple[str, ...]
    settings: Any

    @property
    def folder(self) -> Path:
        return folder_of(self.settings)

    def source(self, folder: Path) -> Path | None:
        """Return the file of training data that an earlier step of the run in `folder` makes."""
        kind = self.settings.definition.data
        source: str | None = self.settings.tree["data"][kind]["train"]
        if source is None or not Path(source).resolve().is_relative_to(folder.resolve()):
            return None
        return Path(source)


def steps_of(
    recipe: Recipe, given: Sequence[str], job: str | None, folder: Path | None = None
) -> dict[str, RecipeStep]:
    """Return the steps in their order.

    folder: folder that overrides of a step may name; None = that of the run they describe.
    """
    steps: dict[str, RecipeStep] = {}
    for name in recipe.stages:
        words = step_overrides(recipe, name, given, job, folder)
        steps[name] = RecipeStep(words, read_settings(composed(words)))
        folder = folder or steps[name].folder.parent
    return steps


def step_overrides(
    recipe: Recipe, step: str, given: Sequence[str], job: str | None, folder: Path | None = None
) -> tuple[str, ...]:
    """Return the overrides of one step.

    Of equal keys the last counts: the recipe's for every stage, those of the step, the user's, and
    those of the step that name `{folder}`, which tie it to an earlier step.

    given: overrides of the user.
    job: job of the whole recipe, of a sweep; the step's own is inside of it.
    folder: folder of the run.
    """
    stage, inner = split_step(step)
    stages = {*STAGES, *(split_step(name)[0] for name in recipe.stages)}
    own = recipe.steps.get(step, ())
    tied = []
    for word in own:
        if FOLDER in word:
            key, _, value = word.partition("=")
            tied.append(f"{key}={override_value(value.replace(FOLDER, str(folder)))}")
    words: list[str] = []
    for more in (recipe.overrides, [w for w in own if FOLDER not in w], given, tied):
        more = [word for word in more if key_of(word) not in OWN]
        keys = {key_of(word) for word in more}
        words = [*(word for word in words if key_of(word) not in keys), *more]
    parsed = parse_overrides(words)
    kept = [str(o.input_line) for o in parsed if stage_of(o, stages) in (None, stage)]
    name = "/".join(str(part) for part in (job, inner) if part)
    return (f"stage={stage}", *kept, *([f"job={override_value(name)}"] if name else []))


def split_step(step: str) -> tuple[str, str | None]:
    """Return the stage of a step, and its job: "dpo@round1" is ("dpo", "round1")."""
    stage, _, job = step.partition("@")
    return stage, job or None


def override_value(text: str) -> str:
    """Return a text as a value in an override."""
    return "'{}'".format(text.replace("'", r"\'"))


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of one stage, composed from the same file as the recipe's."""
    return compose(HydraConfig.get().job.config_name, [*search_path(), *overrides])


def own_configs() -> list[str]:
    """Return the options that name the user's own configurations, as given."""
    hydra = HydraConfig.get()
    sources = hydra.runtime.config_sources
    folders = [f"--config-dir={s.path}" for s in sources if s.provider == "command-line"]
    name = hydra.job.config_name
    return [*folders, *([f"--config-name={name}"] if name != "config" else []), *search_path()]


def search_path() -> list[str]:
    """Return the overrides that name further configuration folders, as given."""
    given: Any = OmegaConf.to_container(HydraConfig.get().overrides.hydra)
    return [word for word in given if key_of(word) == "hydra.searchpath"]


def run_recipe(recipe: Recipe, cfg: DictConfig, given: Sequence[str]) -> None:
    """Run the stages that are not finished, then show the results and check the promises.

    Raises RLHFError where a stage fails or a promise is broken.
    """
    steps = steps_of(recipe, given, cfg.job)
    stages: dict[str, Settings] = {name: step.settings for name, step in steps.items()}
    first = stages[recipe.stages[0]]
    nodes = max(settings.trainer.num_nodes for settings in stages.values())
    if nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes is {nodes}, but a recipe runs its stages on this machine alone; "
            "allowed: 1, or one stage a command on several machines (docs/scaling.md)"
        )
    folder = folder_of(first).parent
    with Working("looking through the data"):  # so that its errors show before any training
        for step in steps.values():
            is_due = cfg.overwrite or not (step.folder / FINAL).is_dir()
            if is_due and step.source(folder) is None:
                settings: Settings = step.settings
                load(settings.definition.data, settings.data, settings.seed)
    with held(first, folder):
        ran = run_steps(steps, folder, start_over=cfg.overwrite)
    # Imported here, with torch and Lightning: what names and folders tell comes before.
    from lightning_rlhf.evaluation.compare import write_promises, write_report, write_steps

    results = summarise(steps, ran)
    if cfg.job is None:
        _, *own = steps[recipe.stages[-1]].overrides
        options = "".join(f" {shlex.quote(word)}" for word in [*own_configs(), *own])
        for line in recipe.next:
            line = line.replace("python train.py", program_name())
            print_line(line.replace(FOLDER, str(folder)).replace("{given}", options))
    if not ran:
        print_line(f"Nothing was left to do. overwrite=true does recipe={cfg.recipe} again.")
    written = {name: x.settings for name, x in steps_of(recipe, (), None, folder).items()}
    write_steps(folder, [step.folder for step in steps.values()])
    rows = None
    if are_made(stages, written):
        rows = [one.row(results[one.stage].get(one.metric)) for one in recipe.promises]
        write_promises(folder, rows)
    print_line(f"report: {write_report(folder)}")
    if rows is not None:
        check_promises(recipe.title, rows, stages, written)


def run_steps(steps: Mapping[str, RecipeStep], folder: Path, *, start_over: bool) -> list[str]:
    """Run the stages that are not finished, with start_over all. Return those that were run.

    folder: folder of the run. A stage whose data an earlier one has written since is run again.
    """
    ran = []
    for name, step in steps.items():
        state = "outdated" if start_over else state_of(step.settings)
        source, final = step.source(folder), step.folder / FINAL
        if state == "done" and source is not None and is_newer(source, final):
            state = "outdated"
        if state == "done":
            print_line(f"{name}: done already, {step.folder}", "green")
            continue
        ran.append(name)
        print_line(f"{name}: {step.folder}", "bold")
        command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *step.overrides]
        status = run_command([*command, *HOW[state]], {IN_RECIPE: name})
        if status or not final.is_dir():
            raise RLHFError(
                f"stage={name} failed with exit status {status}; its output stands above. "
                "The same command, without overwrite=true, goes on from there"
            )
    return ran


def is_newer(source: Path, final: Path) -> bool:
    """Return whether the data were written after the folder `final/` that is made of them."""
    return source.is_file() and source.stat().st_mtime_ns > final.stat().st_mtime_ns


def summarise(
    steps: Mapping[str, RecipeStep], ran: Sequence[str]
) -> dict[str, dict[str, Evaluated]]:
    """Show samples before and after, pictures, and what PPO's compute bought.

    Return each stage's metrics by name.

    ran: stages that were run in this call, whose results are already printed.
    """
    from lightning_rlhf.callbacks.compute import PEAK, compute_line, sum_of
    from lightning_rlhf.evaluation.diminishing import repeat_conclusion
    from lightning_rlhf.runs.measured import evaluation_files, metrics_of, with_intervals
    from lightning_rlhf.stages.fit import complete

    metrics = {
        name: metrics_of(step.folder / FINAL, step.settings.definition)
        for name, step in steps.items()
    }
    if "ppo" in steps and steps["ppo"].settings.samples:
        folder = steps["ppo"].folder
        samples = evaluation_files(folder)
        if samples is None:
            raise CheckpointError(
                f"{folder / 'samples'} holds no eval_*.jsonl of the step in final/, which a "
                "finished stage=ppo leaves. overwrite=true does the recipe again"
            )
        get_console().print(side_by_side(*samples, n=5))
    trained = [name for name, step in steps.items() if step.settings.definition.trains]
    for name, step in steps.items():
        if name not in ran:
            complete(step.settings)
        picture, tables = f"picture: {step.folder / 'curves.png'}", f"tables: {step.folder / FINAL}"
        print_line(picture if name in trained else tables)
    for name in trained:
        if "time/stage_s" not in metrics[name]:
            raise CheckpointError(
                f"{steps[name].folder / FINAL / MANIFEST} is damaged: it lacks time/stage_s"
            )
    minutes = sum(metrics[name]["time/stage_s"] for name in trained) / 60
    print_line(f"time: {minutes:.1f} minutes in all stages that train")
    if "ppo" in steps:
        repeat_conclusion(steps["ppo"].folder)
    if counted := [name for name in steps if PEAK in metrics[name]]:
        total = sum_of([metrics[name] for name in counted])
        print_line(compute_line(total, f" of {', '.join(counted)}"))
    return {name: with_intervals(metrics[name], step.folder) for name, step in steps.items()}


def run_program(recipe: Recipe, folder: Path, cfg: DictConfig, given: Sequence[str]) -> None:
    """Run the program in `folder` with the settings of PPO and print its claims.

    Raises RLHFError where a claim of the unchanged recipe fails.
    """
    import torch

    assert recipe.program is not None
    require((folder / recipe.program).is_file(), "recipe.program", recipe.program, "a file there")
    sys.path.insert(0, str(folder))
    program: Any = importlib.import_module(Path(recipe.program).stem)
    for key in map(key_of, given):
        if key == "advantage" or (key.startswith("ppo.") and key[4:] not in program.READS):
            raise ConfigError(
                f"recipe={cfg.recipe} does not read {key}; allowed: ppo.{', '.join(program.READS)}"
            )
    settings, as_written = (
        read_settings(composed(step_overrides(recipe, "ppo", words, cfg.job)))
        for words in (given, ())
    )
    out = run_folder(settings.outputs, settings.run, folder.name, "", settings.job)
    check_writable("outputs", settings.outputs, out)
    torch.set_num_threads(1)
    claims = program.main(settings.config, settings.seed, out)
    table = Table("claim", "allowed", "measured", "", title=recipe.title, title_justify="left")
    for claim in claims:
        verdict = "[green]holds[/green]" if claim.holds else "[red]fails[/red]"
        allowed = f"{claim.at_least:g} to {claim.at_most:.3g}"
        table.add_row(claim.text, allowed, f"{claim.measured:.3f}", verdict)
    get_console().print(table)
    for line in (f"picture: {out / program.__name__}.png", *recipe.next):
        print_line(line)
    failed = [claim.text for claim in claims if not claim.holds]
    if failed and not differing_keys(settings.tree, as_written.tree, ANY):
        raise RLHFError(f"{recipe.title}: this fails: {'; '.join(failed)}")
