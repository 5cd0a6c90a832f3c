"""The name of a run, with its job, wherever people read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lightning_rlhf.callbacks.loggers import RunIdentity
from lightning_rlhf.runs import run

from .conftest import Workplace


def test_a_job_is_named_in_pictures_report_and_dashboard(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    headings: dict[str, str] = {}
    identities: list[RunIdentity] = []
    real = run.RunIdentity

    save = Figure.savefig

    def keep(figure: Figure, path: Any, **options: Any) -> None:
        if not isinstance(path, Path):  # a plot inside a page
            return save(figure, path, **options)
        name = "curves.png" if path.suffix == ".tmp" else path.name
        headings[name] = "".join(figure.get_suptitle().split())
        return None

    def noted(**named: Any) -> RunIdentity:
        identities.append(real(**named))
        return identities[-1]

    monkeypatch.setattr(Figure, "savefig", keep)
    monkeypatch.setattr(run, "RunIdentity", noted)
    finished.mini("stage=rm", "job=rm.lr-0.1", "rm.lr=0.1").succeeded  # noqa: B018
    name = "default/mini/rm.lr-0.1/rm"
    report = (finished.outputs / name / "final" / "report.md").read_text()
    assert report.startswith(f"# Is this reward fit to be maximised? {name}\n")
    assert headings["curves.png"] == f"Rewardmodel:{name}"
    assert {headings[file] for file in ("rewards.png", "length.png")} == {name}
    (identity,) = identities
    assert (identity.name, identity.job) == (name, "rm.lr-0.1")
    assert identity.tags == ["rm", "mini", "rm.lr-0.1"]
