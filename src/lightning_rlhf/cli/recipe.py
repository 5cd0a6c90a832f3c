"""Recipes: lists of stages, each run as a process, a summary of their results, and promises."""

import importlib
import operator
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from pydantic.dataclasses import dataclass
from rich import get_console
from yaml import YAMLError

from lightning_rlhf.cli import arguments
from lightning_rlhf.cli.launch import IN_RECIPE, override_value, own_configs, run_command
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.core.validation import STRICT, build, described, rule
from lightning_rlhf.data.readers import load
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.report import estimates, tables
from lightning_rlhf.report.run_page import Evaluated, PromiseRow, PromiseVerdict
from lightning_rlhf.runs import console, folders, resume
from lightning_rlhf.runs.settings import read_settings
from lightning_rlhf.runs.stage import STAGES, Settings

Words = Annotated[tuple[str, ...], Field(strict=False), described("a list of texts")]
Stages = Mapping[str, Settings]
"""Settings of each step, in their order."""
OWN = ("recipe", "resume", "overwrite")
"""Keys that the recipe reads itself and does not pass to its stages."""
FOLDER = "{folder}"
"""Text in a step's overrides that stands for the folder of the recipe's run."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Promise:
    """Bound on a metric in the manifest of a stage; exactly one of the three bounds is set."""

    stage: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    gain: float | None = None
    """Smallest increase of the metric over its value before the stage."""

    def __post_init__(self) -> None:
        bounds = [b for b in (self.at_least, self.at_most, self.gain) if b is not None]
        one = "exactly one of at_least, at_most, gain"
        rule(len(bounds) == 1, f"the bound of {self.metric}", bounds, one)

    def row(self, found: Evaluated | None) -> PromiseRow:
        """Return the promise beside its measured number; one that was not measured is broken.

        It is kept where both ends of the 95% interval hold the bound, and within noise where one
        does; a number without an interval is judged itself.
        found: the metric; None where it was not measured.
        """
        bounds = {"at least": self.at_least, "at most": self.at_most, "gain of": self.gain}
        [(words, bound)] = [(words, x) for words, x in bounds.items() if x is not None]
        value, interval = (None, None) if found is None else (found.value, found.interval)
        if found is not None and self.gain is not None:
            value, interval = found.gain, found.gain_interval
        measured = "not measured"
        verdict: PromiseVerdict = "broken"
        if value is not None:
            measured = f"{value:.3f}{estimates.interval_text(interval)}"
            holds = operator.ge if self.at_most is None else operator.le
            results = [holds(x, bound) for x in interval or (value,)]
            verdict = "kept" if all(results) else "within noise" if any(results) else "broken"
        return PromiseRow(self.stage, self.metric, f"{words} {bound:g}", measured, verdict)


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
    steps: Annotated[Mapping[str, Words], described("a mapping of steps to lists of texts")] = (
        field(default_factory=dict)
    )
    """Step -> overrides of its own, in which {folder} is the run's."""
    promises: Annotated[tuple[Promise, ...], Field(strict=False, description="a list of promises")]
    """Bounds that hold for the recipe's own model and data with any seed."""
    next: Words
    """Suggested next commands; {folder} is the run's, {given} the last stage's overrides."""

    def __post_init__(self) -> None:
        one = "at least one stage, or a program in their place"
        rule(bool(self.stages) != bool(self.program), "stages", self.stages, one)
        twice = "each step once; STAGE@JOB repeats a stage"
        rule(len({*self.stages}) == len(self.stages), "stages", list(self.stages), twice)
        for key, steps in (("steps", self.steps), ("promises", [x.stage for x in self.promises])):
            for step in steps:
                rule(step in self.stages, key, step, ", ".join(self.stages))
        first = self.stages[0] if self.stages else ""
        for word in self.steps.get(first, ()):
            rule(FOLDER not in word, f"steps.{first}", word, f"no {FOLDER} in the first step")


def run(name: str, cfg: DictConfig, given: Sequence[str]) -> None:
    """Run a recipe of the package, or a user's own in the folder `name`.

    cfg: configuration of the command; given: its overrides.

    Raises ConfigError where the recipe is not known or not valid, and RLHFError where a stage fails
    or a promise is broken.
    """
    folder = recipe_folder(name)
    recipe = read_recipe(folder)
    try:
        if recipe.program is None:
            run_recipe(recipe, cfg, given)
        else:
            run_program(recipe, folder / recipe.program, cfg, given)
    except (HydraException, OmegaConfBaseException) as error:  # the recipe's own overrides
        reason = arguments.composition_error(error, given)
        raise ConfigError(f"{folder / 'recipe.yaml'}: {reason}") from error


def recipe_folder(name: str) -> Path:
    """Return the folder of a recipe. Raises ConfigError where it holds no recipe.yaml."""
    known = sorted(path.parent.name for path in console.RECIPES.glob("*/recipe.yaml"))
    folder = console.RECIPES / name if name in known else Path(os.path.expanduser(str(name)))
    if not (folder / "recipe.yaml").is_file():
        allowed = f"{', '.join(known)}, or a folder that holds a recipe.yaml"
        raise ConfigError(f"recipe={name} is not known; allowed: {allowed}")
    return folder


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe in a folder. Raises ConfigError where it is not valid."""
    file = folder / "recipe.yaml"
    try:
        return build(Recipe, OmegaConf.to_container(OmegaConf.load(file)), "recipe")
    except (ConfigError, YAMLError, OmegaConfBaseException, OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


def settings_of(
    recipe: Recipe, given: Sequence[str], job: Any, folder: Path | None = None
) -> tuple[Stages, Mapping[str, Sequence[str]], Path]:
    """Return settings and overrides of each step, and the folder that holds their folders.

    They are composed from the same file as the recipe's; a program has those of PPO.

    given: overrides of the user; job: job of a sweep that the run is, None for none.
    folder: folder that overrides of a step may name; None = that of the run they describe.
    """
    stages, words = dict[str, Settings](), dict[str, Sequence[str]]()
    job = None if job is None else str(job)
    sources = [word for word in own_configs() if not word.startswith("--")]
    for step in recipe.stages or ("ppo",):
        words[step] = step_overrides(recipe, step, given, job, folder)
        cfg = compose(HydraConfig.get().job.config_name, [*sources, *words[step]])
        found = stages[step] = read_settings(cfg)
        folder = folder or folders.run_folder(found.outputs, found.run, found.model.name, "", job)
    assert folder is not None
    return stages, words, folder


def as_written(recipe: Recipe, job: Any, folder: Path | None) -> Stages:
    """Return the settings without overrides of the user; none where the recipe needs some."""
    try:
        return settings_of(recipe, (), job, folder)[0]
    except ConfigError:
        return {}


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
    stage, _, inner = step.partition("@")
    stages = {*STAGES, *(name.partition("@")[0] for name in recipe.stages)}
    own = recipe.steps.get(step, ())
    tied = [word.partition("=") for word in own if FOLDER in word]
    named = [f"{key}={override_value(x.replace(FOLDER, str(folder)))}" for key, _, x in tied]
    words: list[str] = []
    for more in (recipe.overrides, [word for word in own if FOLDER not in word], given, named):
        keys = {*OWN, *map(arguments.key_of, more)}
        words = [word for word in words if arguments.key_of(word) not in keys]
        words += [word for word in more if arguments.key_of(word) not in OWN]
    parsed = arguments.parse_overrides(words)
    kept = [str(o.input_line) for o in parsed if arguments.stage_of(o, stages) in (None, stage)]
    name = "/".join(part for part in (job, inner) if part)
    return (f"stage={stage}", *kept, *([f"job={override_value(name)}"] if name else []))


def run_recipe(recipe: Recipe, cfg: DictConfig, given: Sequence[str]) -> None:
    """Run the stages that are not finished, then show the results and check the promises.

    The results are samples before and after, and the compute.
    """
    stages, words, folder = settings_of(recipe, given, cfg.job)
    nodes = max(settings.trainer.num_nodes for settings in stages.values())
    here = "1, as a recipe runs its stages on this machine alone"
    ways = f"{here}; or one stage a command on several machines (docs/scaling.md)"
    require(nodes == 1, "trainer.num_nodes", nodes, ways)
    with Working("looking through the data"):  # so that its errors show before any training
        for settings in stages.values():
            is_due = cfg.overwrite or not (folders.folder_of(settings) / folders.FINAL).is_dir()
            if is_due and data_of_run(settings, folder) is None:
                kind = settings.definition.rows_of(settings.config)
                load(kind, settings.data, settings.seed)
    written = as_written(recipe, cfg.job, folder)
    with resume.locked_run(stages[recipe.stages[0]], folder):
        ran = run_steps(stages, words, folder, start_over=cfg.overwrite)
    # Imported here, with torch and Lightning: checks of names and folders come before.
    from lightning_rlhf.callbacks.compute import PEAK, compute_line
    from lightning_rlhf.evaluation import compare
    from lightning_rlhf.runs import measured

    places = {step: folders.folder_of(settings) for step, settings in stages.items()}
    metrics = {
        step: measured.metrics_of(place / folders.FINAL, stages[step].definition)
        for step, place in places.items()
    }
    if counted := [step for step in stages if PEAK in metrics[step]]:
        print_line(compute_line([metrics[step] for step in counted], f" of {', '.join(counted)}"))
    last = words[recipe.stages[-1]][1:]
    options = "".join(f" {shlex.quote(word)}" for word in [*own_configs(), *last])
    for line in recipe.next if cfg.job is None else ():
        line = line.replace("python train.py", arguments.program_name())
        print_line(line.replace(FOLDER, str(folder)).replace("{given}", options))
    if not ran:
        print_line(f"Nothing was left to do. overwrite=true does recipe={cfg.recipe} again.")
    # They are made for the recipe's own model and data.
    used = [(settings.model.name, settings.data) for settings in stages.values()]
    is_made = used == [(settings.model.name, settings.data) for settings in written.values()]
    results = {step: measured.with_intervals(metrics[step], places[step]) for step in stages}
    rows = [one.row(results[one.stage].get(one.metric)) for one in recipe.promises if is_made]
    compare.keep_recipe(folder, [*places.values()], rows if is_made else None)
    print_line(f"report: {compare.write_report(folder)}")
    if is_made:
        check_promises(recipe.title, rows, stages, written)


def data_of_run(settings: Settings, folder: Path) -> Path | None:
    """Return the file of a stage's training data where an earlier step of the run makes it.

    folder: folder of the run.
    """
    source: str | None = settings.tree["data"][settings.definition.data]["train"]
    is_made = source is not None and Path(source).resolve().is_relative_to(folder.resolve())
    return Path(source) if source is not None and is_made else None


def run_steps(
    stages: Stages, words: Mapping[str, Sequence[str]], folder: Path, *, start_over: bool
) -> list[str]:
    """Run the stages that are not finished, with start_over all. Return those that were run.

    words: overrides of each step.
    folder: folder of the run. A stage whose data an earlier one has written since is run again.
    """
    from lightning_rlhf.stages.fit import complete  # which imports torch and Lightning

    ran = []
    for step, settings in stages.items():
        state: resume.State = "outdated" if start_over else resume.state_of(settings)
        final, source = folders.folder_of(settings) / folders.FINAL, data_of_run(settings, folder)
        if state == "done" and source is not None and source.is_file():
            is_newer = source.stat().st_mtime_ns > final.stat().st_mtime_ns
            state = "outdated" if is_newer else "done"
        if state == "done":
            print_line(f"{step}: done already, {final.parent}", "green")
            complete(settings)
            continue
        ran.append(step)
        print_line(f"{step}: {final.parent}", "bold")
        how = "overwrite=true" if state == "outdated" else "resume=auto"
        command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *words[step], how]
        status = run_command(command, {IN_RECIPE: step})
        if status or not final.is_dir():
            raise RLHFError(
                f"stage={step} failed with exit status {status}; its output stands above. "
                "The same command, without overwrite=true, goes on from there"
            )
    return ran


def check_promises(title: str, rows: Sequence[PromiseRow], stages: Stages, written: Stages) -> None:
    """Print the promises of a recipe.

    title: title of the recipe; stages: settings of its steps; written: the same without the
        overrides of the user.

    Raises RLHFError where a promise is broken and the recipe was run unchanged.
    """
    cells = [[row.stage, row.metric, row.promised, row.measured, row.verdict] for row in rows]
    columns = ["stage", "metric", "promised", "measured [95%]", ""]
    table = tables.Table(title=f"{title}: what it promises", columns=columns, rows=cells)
    get_console().print(table.console())
    changed = dict[str, None]()
    for step, found in stages.items():
        free = "seed", *folders.volatile(found.definition)
        own = written[step].tree if step in written else {}
        changed |= dict.fromkeys(folders.differing_keys(found.tree, own, free))
    broken = [row for row in rows if row.verdict == "broken"]
    if broken and not changed:
        failures = "; ".join(f"{x.metric} is {x.measured}, promised: {x.promised}" for x in broken)
        raise RLHFError(f"{title} did not keep its promises: {failures}")
    if broken:
        changes = f"Not as the recipe is written: {', '.join(changed)}"
        print_line(f"{changes}; so its promises are shown and not enforced.")


def run_program(recipe: Recipe, file: Path, cfg: DictConfig, given: Sequence[str]) -> None:
    """Run a program with the settings of PPO and check its claims as promises."""
    import torch

    require(file.is_file(), "recipe.program", file.name, f"a file in {file.parent}")
    sys.path.insert(0, str(file.parent))
    program: Any = importlib.import_module(file.stem)
    for key in map(arguments.key_of, given):
        if key in arguments.READ_BY or (key.startswith("ppo.") and key[4:] not in program.READS):
            allowed = f"ppo.{', '.join(program.READS)}"
            raise ConfigError(f"recipe={cfg.recipe} does not read {key}; allowed: {allowed}")
    stages, _, _ = settings_of(recipe, given, cfg.job)
    written = as_written(recipe, cfg.job, None)
    settings = stages["ppo"]
    out = folders.run_folder(settings.outputs, settings.run, file.parent.name, "", settings.job)
    folders.check_writable("outputs", settings.outputs, out)
    torch.set_num_threads(1)
    rows, name = [], program.__name__
    for claim in program.main(settings.config, settings.seed, out):
        promised = f"{claim.at_least:g} to {claim.at_most:.3g}"
        verdict: PromiseVerdict = "kept" if claim.holds else "broken"
        rows.append(PromiseRow(name, claim.text, promised, f"{claim.measured:.3f}", verdict))
    for line in (f"picture: {out / name}.png", *recipe.next):
        print_line(line)
    check_promises(recipe.title, rows, stages, written)
