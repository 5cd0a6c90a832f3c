"""resume=auto: a run goes on if it can, and starts where there is none."""

import shutil
from typing import Any

import pytest

from .conftest import Workplace, rows, tree, weights
from .test_resume import checkpoints


@pytest.fixture
def cut_off(finished: Workplace) -> Workplace:
    """In which sft has six steps, the checkpoints of the last two and of the best, no final/."""
    shutil.rmtree(finished.stage("sft") / "final")
    return finished


def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a stage begins."""

    def load(*arguments: Any, **named: Any) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr("lightning_rlhf.stages.fit.entered", load)


def test_it_starts_goes_on_and_ends(
    workplace: Workplace, pipeline: Workplace, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command, called again until its status is 0, and once more."""
    with monkeypatch.context():
        cut("step", 3)
        assert "PowerCut" in workplace.mini("stage=sft", "resume=auto").err
        monkeypatch.undo()
    assert checkpoints(workplace, "sft")[:2] == ["000002", "000003"]
    out = workplace.mini("stage=sft", "resume=auto").succeeded.out
    assert "going on from outputs/default/mini/sft/checkpoints/000003.ckpt" in out
    folder, unbroken = workplace.stage("sft"), pipeline.stage("sft")
    assert (weights(folder), rows(folder)) == (weights(unbroken), rows(unbroken))
    before = tree(workplace.outputs)
    unbuilt(monkeypatch)
    out = workplace.mini("stage=sft", "resume=auto").succeeded.out
    assert out.startswith("sft: finished already, outputs/default/mini/sft/final\nnext: ")
    assert tree(workplace.outputs) == before


def test_a_run_without_a_checkpoint_starts_anew(cut_off: Workplace, pipeline: Workplace) -> None:
    """Killed after its first row: neither resume=true nor the plain command goes on."""
    folder = cut_off.stage("sft")
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.csv").write_text("step,update/loss\n1,9.0\n")
    assert "has no checkpoint to go on from" in cut_off.mini("stage=sft", "resume=true").error
    assert "to go on from. Give resume=auto or overwrite=true" in cut_off.mini("stage=sft").error
    out = cut_off.mini("stage=sft", "resume=auto").succeeded.out
    assert "cut off before its first checkpoint; it starts over" in out
    assert rows(folder) == rows(pipeline.stage("sft"))


def test_a_damaged_newest_one_is_passed_over(cut_off: Workplace, pipeline: Workplace) -> None:
    (cut_off.stage("sft") / "checkpoints" / "000006.ckpt").write_bytes(b"half")
    out = cut_off.mini("stage=sft", "resume=auto").succeeded.out
    assert "000006.ckpt cannot be read" in out
    assert "resume=auto goes on from 000005.ckpt" in out
    assert rows(cut_off.stage("sft")) == rows(pipeline.stage("sft"))


@pytest.mark.parametrize("left", ["final", "none readable"])
def test_what_is_refused_is_left_as_it_is(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Another configuration, and damage without a way on."""
    unbuilt(monkeypatch)
    folder = finished.stage("sft")
    words, message = ["sft.lr=0.5"], "cannot be resumed: sft.lr was 0.001, is 0.5"
    if left == "none readable":
        shutil.rmtree(folder / "final")
        for path in (folder / "checkpoints").iterdir():
            path.write_bytes(b"")
        words, message = [], "000006.ckpt cannot be read"
    before = tree(finished.outputs)
    assert message in finished.mini("stage=sft", *words, "resume=auto").error
    assert tree(finished.outputs) == before


def test_other_models_under_a_finished_run_are_told(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor must not take what was made of the model before for the end."""
    manifest = finished.stage("sft") / "final" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    error = finished.mini("stage=rm", "resume=auto").error
    assert "cannot be resumed: the models it was started from are others now" in error


def test_a_kill_before_the_page_leaves_it_to_the_next_call(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between `final/` and report.html: nothing is trained, and the page is that of the run."""
    folder = finished.stage("ppo")
    page = (folder / "report.html").read_text()
    expected = tree(folder)
    shutil.rmtree(folder / "final")

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("lightning_rlhf.stages.final.leave_report", die)
        assert finished.mini("stage=ppo", "resume=true").status != 0
    assert (folder / "final").is_dir()
    (folder / ".0123.lightning-rlhf.tmp").write_text("half")  # the page of which the kill came
    (folder / "failed.txt").write_text("another command: it is being written")
    monkeypatch.setattr("lightning_rlhf.stages.fit.entered", die)
    finished.mini("stage=ppo", "resume=auto").succeeded  # noqa: B018
    found = (folder / "report.html").read_text()
    assert found != page  # its time is another one
    assert "has not finished" not in found
    assert tree(folder).keys() == expected.keys()
    (folder / "report.html").unlink()
    finished.mini("stage=ppo", "resume=auto").succeeded  # noqa: B018
    assert (folder / "report.html").read_text() == found
