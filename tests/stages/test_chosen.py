"""Weights of a checkpoint in a module: whole, and one part of it."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rlhf.callbacks.files import OUTLINE, RUN, Origin, outline_of
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.evaluation.select import load_weights

ORIGIN = Origin(stage="ppo", model="mini", version="1", run="a")


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    """Write a checkpoint with roles.weight and critic.weight, changed by `tensors`."""
    state = {"roles.weight": torch.tensor([[1.0, 2.0]]), "critic.weight": torch.tensor([[3.0]])}
    state |= {f"{name}.weight": tensor for name, tensor in tensors.items()}
    content: dict[str, Any] = {"state_dict": state, RUN: asdict(ORIGIN) | {"step": 3}}
    content[OUTLINE] = outline_of(content)
    path = folder / "000003.ckpt"
    torch.save(content, path)
    return path


def test_a_part_takes_its_own_weights(tmp_path: Path) -> None:
    roles = nn.Linear(2, 1, bias=False)
    load_weights(roles, written(tmp_path, critic=torch.tensor([[torch.nan]])), ORIGIN, "roles.")
    assert roles.weight.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([[1.0, 2.0, 3.0]], r"its weight is \[1, 3\] of torch.float32, the model's \[1, 2\] of"),
        ([[1.0, float("inf")]], "holds numbers that are NaN or infinite, in weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, found: list[list[float]], message: str
) -> None:
    path = written(tmp_path, roles=torch.tensor(found))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(nn.Linear(2, 1, bias=False), path, ORIGIN, "roles.")
    assert str(path) in str(caught.value)


def test_other_parameters_and_another_run_are_refused(tmp_path: Path) -> None:
    path, own = written(tmp_path), nn.Linear(2, 1, bias=False)
    for roles, origin, prefix, message in (
        (nn.Linear(2, 1), ORIGIN, "roles.", "lacks 1 of the trained parameters and has 0"),
        (own, ORIGIN, None, "lacks 1 of the trained parameters and has 2"),
        (own, replace(ORIGIN, run="b"), "roles.", "of run a, not b"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_weights(roles, path, origin, prefix)
