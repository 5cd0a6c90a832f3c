"""The check that a run can be resumed from what callbacks put into its checkpoints.

A checkpoint is read with torch.load(weights_only=True), which refuses objects of other classes.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.io.user_code import FAULTS

PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.nn.Parameter)
"""Types that every checkpoint may hold."""
CALLBACKS = "callbacks"
"""Checkpoint key of the states of callbacks, by the callback's `state_key`."""


def check_states(callbacks: Iterable[Callback]) -> None:
    """Raise CheckpointError where the state of a callback cannot be loaded again."""
    for callback in callbacks:
        try:
            state = state_of(callback)
        except CheckpointError:  # a state that exists only after the start is saved later
            continue
        require_loadable(f"{type(callback).__name__}.state_dict()", state)


def state_of(callback: Callback) -> dict[str, Any]:
    """Return the state of a callback; raises CheckpointError where its `state_dict` fails."""
    try:
        return callback.state_dict()
    except FAULTS as error:
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{type(callback).__name__}.state_dict() raised {shown}, so that no checkpoint can be "
            "written; allowed: a dictionary of tensors, numbers, texts, None, and dictionaries and "
            "lists of them"
        ) from error


def check_contents(checkpoint: Mapping[str, Any], callbacks: Iterable[Callback]) -> None:
    """Raise CheckpointError where the contents of a checkpoint cannot be loaded again.

    callbacks: those of the run, which the error names by class.
    """
    states = checkpoint[CALLBACKS]
    for callback in callbacks:
        if callback.state_key in states:
            require_loadable(f"{type(callback).__name__}.state_dict()", states[callback.state_key])
    for key, value in checkpoint.items():
        require_loadable(f"checkpoint[{key!r}]", value)


def require_loadable(where: str, tree: Any) -> None:
    """Raise CheckpointError naming the first item of `tree` that cannot be loaded again."""
    if type(tree) in PLAIN:
        return
    if type(tree) in (dict, OrderedDict):
        for key, value in tree.items():
            require_loadable(f"key {key!r} of {where}", key)
            require_loadable(f"{where}[{key!r}]", value)
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            require_loadable(f"{where}[{index}]", value)
    elif not is_loadable(tree):
        raise CheckpointError(
            f"{where} is an object of type {type(tree).__name__}, from which no run can be "
            "resumed; allowed: tensors, numbers, texts, None, and dictionaries and lists of them"
        )


def is_loadable(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) reads what torch.save writes of the value."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # a class of the user's own may raise anything
        return False
    return True
