"""One thread for each test process: small matrices gain nothing from more, and wait for them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from lightning_rlhf.core import products

os.environ["OMP_NUM_THREADS"] = "1"


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
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product that may go to oneDNN does, on any processor and however small."""
    monkeypatch.setattr(products, "fp32_by_onednn", lambda: True)
    monkeypatch.setattr(products, "WORTH", 0)
