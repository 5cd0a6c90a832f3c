"""A report whose numbers cannot be logged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.evaluation import evaluate_reward


def test_loggers_are_closed_as_failed_where_one_of_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space left")

    codes: list[int] = []
    monkeypatch.setattr(evaluate_reward, "close_loggers", lambda _, code: codes.append(code))
    ready: Any = SimpleNamespace(
        settings=None, claim=lambda: tmp_path, open_loggers=lambda: [Full()]
    )  # fmt: skip
    with pytest.raises(OSError, match="no space left"):
        evaluate_reward.leave_final(ready, {}, lambda _: None, lambda _: None)
    assert codes == [1]
    assert not list(tmp_path.iterdir())
