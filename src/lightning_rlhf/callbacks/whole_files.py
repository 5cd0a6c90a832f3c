"""Atomic writing of Lightning's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_rlhf.callbacks.checkpoint_files import OUTLINE, outline
from lightning_rlhf.io.storage import make_folder, written_whole


class WholeFiles(TorchCheckpointIO):
    """A CheckpointIO that writes to a temporary file and renames it once it is on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        target = Path(path)
        make_folder(target.parent)
        needed = sum(tensor.nbytes for tensor in tensors(checkpoint))
        with written_whole(target, needed) as beside, beside.open("wb") as file:
            torch.save(checkpoint | {OUTLINE: outline(checkpoint)}, file)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dictionaries and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)
