"""Run folders behind symbolic links, and folders that cannot be written."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.cli.sweep import job_name
from lightning_rlhf.io.storage import WRITTEN

from .conftest import MINI, Workplace, tree, weights


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage may begin: it is too late to refuse then."""

    def load(*arguments: Any, **named: Any) -> None:
        raise AssertionError("it is too late to refuse")

    monkeypatch.setattr("lightning_rlhf.stages.fit.entered", load)


def linked(place: Workplace, link: Path) -> Path:
    """Move a folder of the run to another disk, say, and leave a link; where it is now."""
    target = place.folder / "disk" / link.name
    target.parent.mkdir()
    shutil.move(link, target)
    link.symlink_to(target)
    return target


def test_overwrite_replaces_what_a_link_points_to(finished: Workplace, pipeline: Workplace) -> None:
    """The stage's folder, as outputs= itself could be; what is beside it stays."""
    stage = finished.stage("sft")
    target = linked(finished, stage)
    beside = target.parent / "mine"
    beside.touch()
    (stage / "samples" / "stale.jsonl").touch()
    (stage / "final_000002").mkdir()
    (stage / "mine.txt").touch()
    for inside in ("final/mine.txt", "checkpoints/mine.txt"):  # which would go with their folder
        (stage / inside).touch()
        before = weights(stage)
        assert inside in finished.mini("stage=sft", "overwrite=true").error
        assert weights(stage) == before
        (stage / inside).unlink()
    (stage / "checkpoints" / ".DS_Store").touch()
    (stage / "final" / "manifest.json").write_text("{")
    known = (stage / "final" / WRITTEN).rename(stage / "known")  # then nobody knows what is ours
    assert "final/manifest.json" in finished.mini("stage=sft", "overwrite=true").error
    assert weights(stage) == before
    known.rename(stage / "final" / WRITTEN)
    finished.mini("stage=sft", "overwrite=true").succeeded  # noqa: B018
    assert stage.is_symlink()
    assert stage.resolve() == target
    assert not (stage / "samples" / "stale.jsonl").exists()
    assert not (stage / "final_000002").exists()
    assert (stage / "mine.txt").is_file()
    assert weights(stage) == weights(pipeline.stage("sft"))
    assert sorted(target.parent.iterdir()) == sorted([target, beside])


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    ("name", "words"),
    [("config.json", ("overwrite=true",)), ("final/model", ("resume=auto",)), (".lock", ("-m",))],
)
def test_a_run_starts_in_no_folder_with_foreign_files(
    workplace: Workplace, name: str, words: tuple[str, ...]
) -> None:
    folder = workplace.stage("sft")
    job = job_name([*MINI[2:], "seed=1"], None) if words == ("-m",) else "."
    folder = folder.parent / str(job) / folder.name
    for file in (folder / name, folder / "failed.txt"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"model_type": "gpt2"}')
    before = tree(workplace.folder)
    done = workplace.call(*words[:1], *MINI, "stage=sft", "seed=1", *words[1:])
    assert done.status == 1
    assert "config.json" in done.out + done.err
    assert "Traceback" not in done.out + done.err
    assert before.items() <= tree(workplace.folder).items()


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(("depth", "target"), [(0, "gone"), (3, None)])
def test_a_link_that_leads_to_no_folder(
    workplace: Workplace, target: str | None, depth: int
) -> None:
    """As the stage's folder to nothing; a file in the place of one of those above it."""
    stage = workplace.stage("sft")
    place = (stage, *stage.parents)[depth]
    place.parent.mkdir(parents=True, exist_ok=True)
    if target is None:
        place.write_text("no folder")
    else:
        place.symlink_to(target)
    error = workplace.mini("stage=sft", *["overwrite=true"] * (depth % 2)).error
    link = f", a symbolic link to {os.readlink(place)}," if place.is_symlink() else ""
    name = place.relative_to(workplace.folder)
    assert error.startswith("outputs=outputs: ")
    assert error.endswith(f"{name}{link} is no folder that can be written into")
    assert os.path.lexists(place)


@pytest.mark.usefixtures("unbuilt")
def test_outputs_that_cannot_be_written(workplace: Workplace) -> None:
    error = workplace.mini("stage=sft", "outputs=/proc/outputs").error
    assert error.startswith("outputs=/proc/outputs: ")
    done = workplace.sweep("stage=sft", "seed=1", "outputs=/dev/null")
    assert done.status == 1
    assert "Traceback" not in done.out + done.err
