"""Recipes: lists of stages, each run as a process, and a summary of their results."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

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
    search_path,
    stage_of,
)
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RLHFError, require
from lightning_rlhf.core.validation import STRICT, build, described, rule, section
from lightning_rlhf.data.readers import load
from lightning_rlhf.evaluation.promises import ANY, Promise, are_made, check_promises, promise_rows
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.checkpoint import MANIFEST
from lightning_rlhf.report.tables import side_by_side
from lightning_rlhf.runs.changes import differing_keys
from lightning_rlhf.runs.folders import (
    FINAL,
    State,
    check_writable,
    folder_of,
    is_finished,
    run_folder,
    state_of,
)
from lightning_rlhf.runs.process import IN_RECIPE, run_command
from lightning_rlhf.runs.resume import held
from lightning_rlhf.runs.settings import read_settings
from lightning_rlhf.runs.stage import STAGES, Settings

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
        tuple[Annotated[Promise, section(Promise)], ...],
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


def recipe_folder(name: str, recipes: Path) -> Path:
    """Return the folder of a recipe: one in `recipes`, or a user's own by its path.

    Raises ConfigError where it holds no recipe.yaml.
    """
    known = sorted(path.parent.name for path in recipes.glob("*/recipe.yaml"))
    if name in known:
        return recipes / name
    own = Path(os.path.expanduser(str(name)))
    if not (own / "recipe.yaml").is_file():
        raise ConfigError(
            f"recipe={name} is not known; allowed: {', '.join(known)}, or a folder that holds a "
            "recipe.yaml"
        )
    return own


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe in a folder. Raises ConfigError where it is not valid."""
    file = folder / "recipe.yaml"
    try:
        return build(Recipe, OmegaConf.to_container(OmegaConf.load(file)), "recipe")
    except (ConfigError, YAMLError, OmegaConfBaseException, OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


def run_recipe(recipe: Recipe, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Run the stages that are not finished, then show the results and check the promises.

    Raises RLHFError where a stage fails or a promise is broken.
    """
    commands = commands_of(recipe, overrides, cfg.job)
    stages = {stage: read_settings(composed(o)) for stage, o in commands.items()}
    first = stages[recipe.stages[0]]
    nodes = max(settings.trainer.num_nodes for settings in stages.values())
    if nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes is {nodes}, but a recipe runs its stages on this machine alone; "
            "allowed: 1, or one stage a command on several machines (docs/scaling.md)"
        )
    folder = folder_of(first).parent
    with Working("looking through the data"):  # so that its errors show before any training
        for settings in stages.values():
            is_due = cfg.overwrite or not is_finished(settings)
            if is_due and step_source(settings, folder) is None:
                load(settings.definition.data, settings.data, settings.seed)
    with held(first, folder):
        ran = run_stages(stages, commands, folder, start_over=cfg.overwrite)
    # Imported here, with torch and Lightning: what names and folders tell comes before.
    from lightning_rlhf.evaluation.compare import write_promises, write_report, write_steps
    from lightning_rlhf.runs.measured import StageResult

    metrics = summarise(stages, ran)
    if cfg.job is None:
        _, *own = commands[recipe.stages[-1]]
        given = "".join(f" {shlex.quote(word)}" for word in [*own_configs(), *own])
        for line in recipe.next:
            shown_line = line.replace("python train.py", program_name())
            print_line(shown_line.replace("{folder}", str(folder)).replace("{given}", given))
    if not ran:
        print_line(f"Nothing was left to do. overwrite=true does recipe={cfg.recipe} again.")
    written = {
        stage: read_settings(composed(o))
        for stage, o in commands_of(recipe, (), None, folder).items()
    }
    results = {
        stage: StageResult.read(metrics[stage], folder_of(settings))
        for stage, settings in stages.items()
    }
    write_steps(folder, [folder_of(settings) for settings in stages.values()])
    if are_made(stages, written):
        write_promises(folder, promise_rows(recipe.promises, results))
    print_line(f"report: {write_report(folder)}")
    check_promises(recipe.title, recipe.promises, results, stages, written)


def run_stages(
    stages: Mapping[str, Settings],
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    start_over: bool,
) -> list[str]:
    """Run the stages that are not finished, with start_over all. Return those that were run.

    folder: folder of the run. A stage whose data an earlier one has written since is run again.
    """
    ran = []
    for stage, settings in stages.items():
        state = "outdated" if start_over else state_of(settings)
        source = step_source(settings, folder)
        own, final = folder_of(settings), folder_of(settings) / FINAL
        if state == "done" and source is not None and is_newer(source, final):
            state = "outdated"
        if state == "done":
            print_line(f"{stage}: done already, {own}", "green")
            continue
        ran.append(stage)
        print_line(f"{stage}: {own}", "bold")
        command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *commands[stage]]
        status = run_command([*command, *HOW[state]], {IN_RECIPE: stage})
        if status or not final.is_dir():
            raise RLHFError(
                f"stage={stage} failed with exit status {status}; its output stands above. "
                "The same command, without overwrite=true, goes on from there"
            )
    return ran


def commands_of(
    recipe: Recipe, overrides: Sequence[str], job: str | None, folder: Path | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each step.

    folder: folder that overrides of a step may name; None = that of the run they describe.
    """
    found: dict[str, tuple[str, ...]] = {}
    for step in recipe.stages:
        found[step] = step_overrides(recipe, step, overrides, job, folder)
        if folder is None and recipe.steps:
            folder = folder_of(read_settings(composed(found[step]))).parent
    return found


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

    def placed(word: str) -> str:
        key, _, value = word.partition("=")
        return f"{key}={quoted(value.replace(FOLDER, str(folder)))}"

    stage, inner = split_step(step)
    stages = {*STAGES, *(split_step(name)[0] for name in recipe.stages)}
    own = recipe.steps.get(step, ())
    free = [word for word in own if FOLDER not in word]
    tied = [placed(word) for word in own if FOLDER in word]
    words: list[str] = []
    for more in (recipe.overrides, free, given, tied):
        more = [word for word in more if key_of(word) not in OWN]
        keys = {key_of(word) for word in more}
        words = [*(word for word in words if key_of(word) not in keys), *more]
    parsed = parse_overrides(words)
    kept = [str(o.input_line) for o in parsed if stage_of(o, stages) in (None, stage)]
    name = "/".join(str(part) for part in (job, inner) if part)
    return (f"stage={stage}", *kept, *([f"job={quoted(name)}"] if name else []))


def split_step(step: str) -> tuple[str, str | None]:
    """Return the stage of a step, and its job: "dpo@round1" is ("dpo", "round1")."""
    stage, _, job = step.partition("@")
    return stage, job or None


def quoted(text: str) -> str:
    """Return a text as a value in an override."""
    return "'{}'".format(text.replace("'", r"\'"))


def step_source(settings: Settings, folder: Path) -> Path | None:
    """Return the file of training data that an earlier step of the run in `folder` makes."""
    sources: Mapping[str, Mapping[str, str | None]] = settings.tree["data"]
    source = sources[settings.definition.data]["train"]
    if source is None or not Path(source).resolve().is_relative_to(folder.resolve()):
        return None
    return Path(source)


def is_newer(source: Path, final: Path) -> bool:
    """Return whether the data were written after the folder `final/` that is made of them."""
    return source.is_file() and source.stat().st_mtime_ns > final.stat().st_mtime_ns


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


def summarise(stages: Mapping[str, Settings], ran: Sequence[str]) -> dict[str, Mapping[str, float]]:
    """Show samples before and after, pictures, and what PPO's compute bought.

    Return each stage's metrics.

    ran: stages that were run in this call, whose results are already printed.
    """
    from lightning_rlhf.callbacks.compute import PEAK, compute_line, sum_of
    from lightning_rlhf.evaluation.diminishing import repeat_conclusion
    from lightning_rlhf.runs.measured import evaluation_files, metrics_of
    from lightning_rlhf.stages.fit import complete

    folders = {stage: folder_of(settings) for stage, settings in stages.items()}
    metrics = {
        stage: metrics_of(folder / FINAL, stages[stage].definition)
        for stage, folder in folders.items()
    }
    console = get_console()
    if "ppo" in stages:
        folder = folders["ppo"]
        samples = evaluation_files(folder)
        if samples is None:
            raise CheckpointError(
                f"{folder / 'samples'} holds no eval_*.jsonl of the step in final/, which a "
                "finished stage=ppo leaves. overwrite=true does the recipe again"
            )
        if stages["ppo"].samples:
            console.print(side_by_side(*samples, n=5))
    trained = [stage for stage, settings in stages.items() if settings.definition.trains]
    for stage, folder in folders.items():
        if stage not in ran:
            complete(stages[stage])
        picture, tables = f"picture: {folder / 'curves.png'}", f"tables: {folder / FINAL}"
        print_line(picture if stage in trained else tables)
    for stage in trained:
        if "time/stage_s" not in metrics[stage]:
            file = folders[stage] / FINAL / MANIFEST
            raise CheckpointError(f"{file} is damaged: it lacks time/stage_s")
    minutes = sum(metrics[stage]["time/stage_s"] for stage in trained) / 60
    print_line(f"time: {minutes:.1f} minutes in all stages that train")
    if "ppo" in stages:
        repeat_conclusion(folders["ppo"])
    if counted := [stage for stage in stages if PEAK in metrics[stage]]:
        total = sum_of([metrics[stage] for stage in counted])
        print_line(compute_line(total, f" of {', '.join(counted)}"))
    return metrics


def run_program(recipe: Recipe, folder: Path, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Run the program in `folder` with the settings of PPO and print its claims.

    Raises RLHFError where a claim of the unchanged recipe fails.
    """
    import torch

    assert recipe.program is not None
    require((folder / recipe.program).is_file(), "recipe.program", recipe.program, "a file there")
    sys.path.insert(0, str(folder))
    program: Any = importlib.import_module(Path(recipe.program).stem)
    for key in map(key_of, overrides):
        if key == "advantage" or (key.startswith("ppo.") and key[4:] not in program.READS):
            raise ConfigError(
                f"recipe={cfg.recipe} does not read {key}; allowed: ppo.{', '.join(program.READS)}"
            )
    settings, as_written = (
        read_settings(composed(step_overrides(recipe, "ppo", given, cfg.job)))
        for given in (overrides, ())
    )
    out = run_folder(settings.outputs, settings.run, folder.name, "", settings.job)
    check_writable("outputs", settings.outputs, out)
    torch.set_num_threads(1)
    claims = program.main(settings.config, settings.seed, out)
    table = Table(title=recipe.title, title_justify="left")
    for column in ("claim", "allowed", "measured", ""):
        table.add_column(column)
    for claim in claims:
        verdict = "[green]holds[/green]" if claim.holds else "[red]fails[/red]"
        allowed = f"{claim.at_least:g} to {claim.at_most:.3g}"
        table.add_row(claim.text, allowed, f"{claim.measured:.3f}", verdict)
    get_console().print(table)
    print_line(f"picture: {out / program.__name__}.png")
    for line in recipe.next:
        print_line(line)
    failed = [claim.text for claim in claims if not claim.holds]
    if failed and not differing_keys(settings.tree, as_written.tree, ANY):
        raise RLHFError(f"{recipe.title}: this fails: {'; '.join(failed)}")
