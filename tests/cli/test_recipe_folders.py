"""A finished recipe called again whose results were edited or damaged: one error that names the
file, and nothing is removed or changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from .bad_input.damages import BYTES, JSON, Edit, adds, dangling, folder, remove, says, sets
from .conftest import tree
from .test_recipe import Kitchen, done, first_call, kitchen, recipes

__all__ = ("done", "first_call", "kitchen", "recipes")  # fixtures


def metrics(**values: Any) -> Edit:
    """The metrics in a manifest have other values; one that is ... is not there."""

    def edit(file: Path) -> None:
        found = json.loads(file.read_text())
        found["metrics"] |= {name.replace("__", "/"): x for name, x in values.items()}
        found["metrics"] = {name: x for name, x in found["metrics"].items() if x is not ...}
        file.write_text(json.dumps(found))

    return edit


def sample(**values: Any) -> Edit:
    """The first sample of an evaluation has other values."""

    def edit(file: Path) -> None:
        first, *others = file.read_text().splitlines()
        file.write_text("\n".join([json.dumps(json.loads(first) | values), *others]) + "\n")

    return edit


def shorter(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


def each(edit: Edit, pattern: str) -> Edit:
    """Do it with every file of the folder that has such a name."""
    return lambda path: [edit(file) for file in path.glob(pattern)]


MANIFEST: Mapping[str, Edit] = {
    **BYTES, **JSON,
    "metrics are a list": sets(metrics=[1]), "metrics are null": sets(metrics=None),
    "text as a metric": metrics(eval__reward_mean="x"), "null": metrics(eval__reward_mean=None),
    "list as a metric": metrics(eval__kl=[1]), "huge number": metrics(eval__kl=10**400),
    "true as a metric": metrics(eval__kl=True), "no time": metrics(time__stage_s=...),
    "text as the time": metrics(time__stage_s="x"), "another stage": sets(stage="sft"),
}  # fmt: skip
EVALUATION: Mapping[str, Edit] = {
    "random": BYTES["random"], "no UTF-8": BYTES["no UTF-8"], "NUL": BYTES["NUL"],
    "folder": folder, "dangling": dangling, "missing sample": shorter, "text": adds("x"),
    "list": adds("[]"), "empty object": adds("{}"), "null": adds("null"), "empty": says(""),
    "text as a score": sample(score="x"), "null as a score": sample(score=None),
    "huge score": sample(score=10**400), "number as a prompt": sample(prompt=5),
    "null as a response": sample(response=None), "list as a judge": sample(judge=[]),
    "text as gold": sample(judge={"gold": "x"}),
}  # fmt: skip
CASES = [
    *(("ppo", "final/manifest.json", name, edit) for name, edit in MANIFEST.items()),
    *(("rm", "final/manifest.json", name, MANIFEST[name])
      for name in ("halved", "list", "text as the time")),
    *(("ppo", "samples/eval_000000.jsonl", name, edit) for name, edit in EVALUATION.items()),
    ("ppo", "samples", "missing", remove), ("ppo", "samples", "empty", each(remove, "*")),
    *(("ppo", "config.json", name, BYTES[name]) for name in ("halved", "folder", "no UTF-8")),
    *(("sft", "parents.json", name, JSON[name]) for name in ("list", "deep")),
]  # fmt: skip
Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("stage", "file", "edit"), [pytest.param(s, f, e, id=f"{s}-{f}-{n}") for s, f, n, e in CASES]
)
def test_a_damaged_result_is_named(done: Kitchen, stage: str, file: str, edit: Edit) -> None:
    edit(done.folder(stage) / file)
    before = tree(done.place.folder)
    error = done.cook().error
    assert file.split("/")[-1] in error or "final was written by stage=sft" in error, error
    assert tree(done.place.folder) == before
    assert done.ran == []
