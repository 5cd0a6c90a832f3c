"""Matrix products whose shapes matter: those that are compiled anew for each."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64  # of activations; half as many make twice as many shapes


def compiled_by_shape(x: Tensor) -> bool:
    """Whether products with x are compiled for their shapes: in 16 bits on a CPU.

    oneDNN takes a millisecond for each shape that it has not met, and keeps what it compiled: 0.6
    to 0.75 MB a shape on a processor with AMX, of up to 1,024 shapes.
    """
    if x.device.type != "cpu":
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype.itemsize == 2


def rounded_up(count: int, multiple: int) -> int:
    """The smallest multiple that is not below the count."""
    return -(-count // multiple) * multiple
