"""How close is equal, and batches of uneven length. A missing peer is an error, never a skip."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _in_double() -> Iterator[None]:
    """Both peers make some factors in the default dtype, whatever that of their arguments."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(found: Tensor, expected: Tensor, *, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def ragged(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mask of rows of 1 to `width` tokens, the first full; rewards and values, 0 on padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]
    x = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    return mask, torch.where(mask, x[0], 0), torch.where(mask, x[1], 0)
