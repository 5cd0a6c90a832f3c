"""The steps of a recipe: a stage, or a stage as a job of the run, with overrides of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lightning_rlhf.cli.overrides import key_of, parse_overrides, stage_of
from lightning_rlhf.stages.registry import STAGES
from lightning_rlhf.stages.stage import Settings

OWN = ("recipe", "resume", "overwrite")
"""Keys that the recipe reads itself and does not pass to its stages."""
FOLDER = "{folder}"
"""Text in a step's overrides that stands for the folder of the recipe's run."""


def split_step(step: str) -> tuple[str, str | None]:
    """Return the stage of a step, and its job: "dpo@round1" is ("dpo", "round1")."""
    stage, _, job = step.partition("@")
    return stage, job or None


def step_overrides(
    step: str,
    given: Sequence[str],
    *,
    steps: Collection[str],
    common: Sequence[str],
    own: Sequence[str],
    job: str | None,
    folder: Path | None,
) -> tuple[str, ...]:
    """Return the overrides of one step.

    Of equal keys the last counts: the recipe's for every stage, those of the step, the user's, and
    those of the step that name `{folder}`, which tie it to an earlier step.

    steps: names of all steps, whose stages may be the user's own.
    common, own: overrides of the recipe for every stage, and for this step.
    given: overrides of the user.
    job: job of the whole recipe, of a sweep; the step's own is inside of it.
    folder: folder of the run.
    """
    stage, inner = split_step(step)
    stages = {*STAGES, *(split_step(name)[0] for name in steps)}
    free = [word for word in own if FOLDER not in word]
    tied = [_placed(word, folder) for word in own if FOLDER in word]
    words: list[str] = []
    for more in (common, free, given, tied):
        more = [word for word in more if key_of(word) not in OWN]
        keys = {key_of(word) for word in more}
        words = [*(word for word in words if key_of(word) not in keys), *more]
    parsed = parse_overrides(words)
    kept = [str(o.input_line) for o in parsed if stage_of(o, stages) in (None, stage)]
    name = "/".join(str(part) for part in (job, inner) if part)
    return (f"stage={stage}", *kept, *([f"job={quoted(name)}"] if name else []))


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


def _placed(word: str, folder: Path | None) -> str:
    """Return an override with the folder of the run in its value, which is quoted for Hydra."""
    key, _, value = word.partition("=")
    return f"{key}={quoted(value.replace(FOLDER, str(folder)))}"


def quoted(text: str) -> str:
    """Return a text as a value in an override."""
    return "'{}'".format(text.replace("'", r"\'"))
