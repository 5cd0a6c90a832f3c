"""Cases of a test: those that make test runs, and those that make engines-check adds."""

from collections.abc import Iterable
from typing import Any

import pytest


def matrix(cases: Iterable[Any], *run: Any) -> list[Any]:
    """Return the cases, of which make test has only those in `run`."""
    listed = [*cases]
    assert set(run) <= set(listed)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in run else [pytest.mark.matrix],
        )
        for case in listed
    ]
