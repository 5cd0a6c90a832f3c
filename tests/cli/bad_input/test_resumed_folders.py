"""Resuming in a run folder that is damaged: one error that names the file, and nothing is removed
or changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ..conftest import Workplace, tree
from .conftest import run
from .damages import BYTES, JSON, Edit, adds, dangling, folder, remove, saved, says, sets


def cells(line: int, *, step: str | None = None, repeat: bool = False) -> Edit:
    """A line of metrics.csv, from 0, with another step, or twice."""

    def edit(file: Path) -> None:
        lines = file.read_text().splitlines()
        if repeat:
            lines.insert(line, lines[line])
        if step is not None:
            lines[line] = ",".join([step, *lines[line].split(",")[1:]])
        file.write_text("\n".join(lines) + "\n")

    return edit


def of_weight(to: object) -> Edit:
    """A trained matrix in the checkpoint is another one."""

    def edit(file: Path) -> None:
        state = torch.load(file, weights_only=True)["state_dict"]
        name = next(n for n, x in state.items() if x.ndim == 2 and x.shape[0] != x.shape[1])
        saved("state_dict", name, to=to)(file)

    return edit


JSONL = {
    "list": adds("[1]"), "empty object": adds("{}"), "deep": adds("[" * 100_000),
    "text as iteration": adds('{"iteration": "1"}'), "negative": adds('{"iteration": -1}'),
    "true": adds('{"iteration": true}'), "bytes": adds(b'{"iteration": 1, "prompt": "\xff"}'),
}  # fmt: skip
CHECKPOINT: Mapping[str, Edit] = {
    "without state_dict": saved("state_dict", to=...),
    "callbacks is None": saved("callbacks", to=None),
    "no optimizer": saved("optimizer_states", to=[]),
    "negative progress": saved(
        "loops", "fit_loop", "epoch_loop.batch_progress", "total", "processed", to=-2
    ),
    "Adam of another shape": saved(
        "optimizer_states", 0, "state", 0, "exp_avg", to=lambda x: torch.zeros(*x.shape, 2)
    ),
    "text as the best step": saved("callbacks", "Checkpoints", "best_step", to="x"),
    "number as digests": saved("StageData", "digests", to=5),
    "microbatch_size 0": saved("learner", "microbatch_size", to=0),
    "another step": saved("lightning_rlhf", "step", to=9),
    "list as the run": saved("lightning_rlhf", "run", to=[1]),
    "a weight less": of_weight(...),
    "a weight that is swapped": of_weight(lambda x: x.T.contiguous()),
    "a weight of another type": of_weight(lambda x: x.long()),
    "a weight that is NaN": of_weight(lambda x: x * torch.nan),
    "no moments": saved("moments", to=...),
    "NaN as kl_coef": saved("kl_coef", to=float("nan")),
    "another key": saved("x", to=5),
}
FILES: Mapping[str, Mapping[str, Edit]] = {
    "config.json": {**BYTES, **JSON, "other stage": sets(stage="sft"), "no stage": sets(stage=...),
                    "a number as a section": sets(model=5), "other seed": sets(seed=-1),
                    "null as a section": sets(data=None)},
    "parents.json": {**BYTES, **JSON, "a number": sets(sft=5), "null as a role": sets(sft=None),
                     "a list as a role": sets(sft=["a"]), "other": sets(sft="0" * 16)},
    "run_id.txt": {"missing": remove, **BYTES, "other": says("0123456789abcdef"),
                   "long": says("a" * 10**6), "lines": says("a\nb\n")},
    "metrics.csv": {**BYTES, "text": adds("4,x"), "NaN step": cells(2, step="nan"),
                    "negative step": cells(2, step="-1"), "huge step": cells(2, step="9" * 5000),
                    "a step twice": cells(2, repeat=True), "steps in disorder": cells(2, step="3"),
                    "quote": adds('"'), "a NUL": adds(b"4,\0"), "bytes": adds(b"\xff"),
                    "a long cell": adds("4," + "1" * 200_000),
                    "header twice": cells(0, repeat=True),
                    "column twice": cells(0, step="step,reward_mean")},
    "samples/train.jsonl": {**BYTES, **JSONL},
    "samples": {"file": lambda path: (remove(path), path.touch()), "dangling": dangling},
    "samples/eval_000003.jsonl": {"folder": folder, "dangling": dangling},
    "checkpoints": {"file": lambda path: (remove(path), path.touch()), "dangling": dangling},
    "checkpoints/000002.ckpt": {"missing": remove, **BYTES, **CHECKPOINT},
    "checkpoints/000003.ckpt": {"folder": folder, "dangling": dangling},
    "checkpoints/best.ckpt": {"folder": folder, "dangling": dangling},
    "last_batch.parquet": {"folder": lambda path: path.mkdir()},
    "failed.txt": {"folder": lambda path: path.mkdir()},
    "curves.png": {"folder": folder, "dangling": dangling},
    "diminishing.json": {"folder": lambda path: path.mkdir(),
                         "dangling": lambda path: path.symlink_to("nowhere")},
    "diminishing.png": {"folder": lambda path: path.mkdir()},
    "report.html": {"folder": folder, "dangling": dangling},
    "wandb_id.txt": {"folder": lambda path: path.mkdir(), "bytes": says(b"\xff"),
                     "empty": says(""), "slash": says("a/b"), "long": says("a" * 999)},
    "rollouts": {"file": lambda path: path.touch()},
    "rollouts/000003.parquet": {"folder": lambda path: path.mkdir(parents=True)},
    "tensorboard": {"file": lambda path: path.touch()},
    "final": {"file": lambda path: path.touch(), "dangling": lambda p: p.symlink_to("nowhere")},
}  # fmt: skip
GOES_ON = {
    "parents.json": ("lone surrogate",),  # of no role that the run has
    "samples/train.jsonl": ("empty", "halved"),  # a line that was cut off is left out
    "metrics.csv": ("empty", "halved"),  # likewise
}
"""Damages with which a run goes on, or is refused for another reason."""
OTHERS = {"parents.json": "the models it was started from", "run_id.txt": "000002.ckpt is foreign"}
"""What is said in place of the file's name where it holds what another run's could."""
CASES = [
    ("ppo", "2", file, name, edit)
    for file, edits in FILES.items()
    for name, edit in edits.items()
    if file not in GOES_ON or name not in GOES_ON[file]
] + [("sft", "5", "checkpoints/000005.ckpt", name, edit) for name, edit in BYTES.items()]


@pytest.fixture
def place(tmp_path: Path, pipeline: Workplace) -> Workplace:
    """A copy of the workplace in which all stages ran."""
    shutil.copytree(pipeline.folder, tmp_path / "work", symlinks=True)
    return Workplace(tmp_path / "work")


@pytest.mark.parametrize(
    ("stage", "name", "file", "edit"),
    [pytest.param(s, n, f, e, id=f"{s}-{f}-{damage}") for s, n, f, damage, e in CASES],
)
def test_a_damaged_file_is_named_and_nothing_is_removed(
    place: Workplace, stage: str, name: str, file: str, edit: Edit
) -> None:
    """A later checkpoint, rows and samples are there, which the resume would delete."""
    shutil.rmtree(place.stage(stage) / "final")
    edit(place.stage(stage) / file)
    before = tree(place.folder)
    outcome = run(place, "resume", name, f"stage={stage}")
    error = outcome.error
    assert file.split("/")[-1] in error or OTHERS[file] in error
    assert tree(place.folder) == before
