"""One thread for each test process: small matrices gain nothing from more, and wait for them."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # until all is imported and collected


def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than the cores: tests wait for processes, servers and signals."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest single test, so that no process waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_standin.py")


def pytest_collection_finish() -> None:
    """Leave what is imported and collected by now, which stays, out of all garbage collections.

    They would otherwise go through millions of objects again and again. Collections of what is
    made later begin at 10,000 objects in place of 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leave no object to the garbage collections with which pytest ends."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _fsync_does_not_wait() -> Iterator[None]:
    """Let fsync return at once: no test cuts the power, and those of durability see the calls."""
    with patch.object(os, "fsync", os.fstat):
        yield


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """largest_file(bytes): the system refuses larger files, as it refuses all on a full disk."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))

    return limit


@pytest.fixture
def to_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the rows that oneDNN was handed."""
    import torch  # not before the number of threads is said

    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no such operator")
    operator, shapes = torch.ops.mkldnn._linear_pointwise, []

    def spy(x: torch.Tensor, *args: object) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        y: torch.Tensor = operator(x, *args)
        return y

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    return shapes


@pytest.fixture
def by_onednn(
    to_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ...]]:
    """Every product that may go to oneDNN does, on any processor and however small."""
    monkeypatch.setattr("lightning_rlhf.kernels.layers.fp32_by_onednn", lambda: True)
    monkeypatch.setattr("lightning_rlhf.kernels.layers.WORTH", 0)
    monkeypatch.setattr("lightning_rlhf.kernels.layers.FEWEST", 0)
    return to_onednn


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 stays with torch, on any processor."""
    monkeypatch.setattr("lightning_rlhf.kernels.layers.fp32_by_onednn", lambda: False)
