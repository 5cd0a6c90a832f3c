"""A damaged file of a run that is resumed is named, and nothing is removed or changed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ..matrix import matrix
from .conftest import Workplace, run, tree

Edit = Callable[[Path], Any]


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def says(content: bytes) -> Edit:
    return lambda file: file.write_bytes(content)


def adds(line: bytes) -> Edit:
    return lambda file: file.write_bytes(file.read_bytes() + line + b"\n")


def saved(*keys: str | int, to: Any) -> Edit:
    """What a checkpoint holds under the keys is `to`, or `to` of it; `...` takes it out."""

    def edit(file: Path) -> None:
        tree = part = torch.load(file, weights_only=True)
        for key in keys[:-1]:
            part = part[key]
        if to is ...:
            del part[keys[-1]]
        else:
            part[keys[-1]] = to(part[keys[-1]]) if callable(to) else to
        torch.save(tree, file)

    return edit


def weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The first weight of a checkpoint is another one."""
    return saved(
        "state_dict", to=lambda x: {k: change(v) if k == min(x) else v for k, v in x.items()}
    )


CHECKPOINT = "checkpoints/000002.ckpt"
RESUMED: list[tuple[str, Edit]] = [
    ("config.json", halve), ("parents.json", says(b"[1]")), ("metrics.csv", adds(b"\xff")),
    ("samples/train.jsonl", adds(b"[]")), ("samples/train.jsonl", adds(b"{}")),
    ("run_id.txt", Path.unlink),
    (CHECKPOINT, says(b"\0" * 64)), (CHECKPOINT, saved("optimizer_states", to=...)),
    (CHECKPOINT, saved("iteration", to=7)), (CHECKPOINT, saved("kl_coef", to=float("nan"))),
    (CHECKPOINT, weight(lambda x: x * torch.nan)), (CHECKPOINT, weight(lambda x: x[None])),
]  # fmt: skip


@pytest.mark.parametrize(("file", "edit"), matrix(RESUMED, *RESUMED[::2]), ids=range(len(RESUMED)))
def test_a_damaged_file_of_a_run_that_is_resumed(
    finished: Workplace, file: str, edit: Edit
) -> None:
    """A later checkpoint, rows and samples are there, which the resume would delete."""
    shutil.rmtree(finished.stage("ppo") / "final")
    edit(finished.stage("ppo") / file)
    before = tree(finished.folder)
    error = run(finished, "resume", "2", "stage=ppo").error
    assert file.split("/")[-1] in error or "000002.ckpt is foreign" in error
    assert tree(finished.folder) == before
