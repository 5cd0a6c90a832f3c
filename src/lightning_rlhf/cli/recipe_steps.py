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
    """Return the overrides of one step: common ones, its own and the user's, for equal keys last.

    steps: names of all steps, whose stages may be the user's own.
    common, own: overrides of the recipe for every stage, and for this step.
    given: overrides of the user.
    job: job of the whole recipe, of a sweep; the step's own is inside of it.
    folder: folder of the run, of which `{folder}` in `own`, within quotation marks, is the path.
    """
    stage, inner = split_step(step)
    stages = {*STAGES, *(split_step(name)[0] for name in steps)}
    place = str(folder).replace("'", r"\'")
    words: list[str] = []
    for more in (common, [word.replace(FOLDER, place) for word in own], given):
        more = [word for word in more if key_of(word) not in OWN]
        keys = {key_of(word) for word in more}
        words = [*(word for word in words if key_of(word) not in keys), *more]
    parsed = parse_overrides(words)
    kept = [str(o.input_line) for o in parsed if stage_of(o, stages) in (None, stage)]
    quoted = "/".join(name for name in (job, inner) if name).replace("'", r"\'")
    return (f"stage={stage}", *kept, *([f"job='{quoted}'"] if quoted else []))


def reads_a_step(settings: Settings, folder: Path) -> bool:
    """Return whether the data of a step are made by an earlier step of the run in `folder`."""
    sources: Mapping[str, Mapping[str, str | None]] = settings.tree["data"]
    source = sources[settings.definition.data]["train"]
    return source is not None and Path(source).resolve().is_relative_to(folder.resolve())
