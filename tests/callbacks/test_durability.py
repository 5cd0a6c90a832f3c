"""What is on the disk, in which order, and what a kill between two deletions leaves."""

import os
from pathlib import Path

import pytest

from lightning_rlhf.callbacks.checkpoints import Checkpoints, WholeFiles
from lightning_rlhf.callbacks.evaluation import Evaluation, Samples
from lightning_rlhf.callbacks.files import read_rows
from lightning_rlhf.callbacks.loggers import MetricsFile, RunTensorBoard
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.stages.ppo import PPO

from .conftest import FakePPO, Fit
from .test_checkpoints import ORIGIN, Run, config

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="tells the name of an open file"
)


class Disk:
    """Which bytes of which file would survive a loss of power."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[Path, int] = {}
        """File -> its size, or folder -> how many names were in it, at the latest fsync."""
        self.at_checkpoint: dict[int, dict[Path, tuple[int, int]]] = {}
        """Step -> file -> its bytes on the disk, and all, as the checkpoint got its name."""
        fsync, replace = os.fsync, os.replace

        def note_fsync(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.synced[path] = len(os.listdir(path)) if path.is_dir() else path.stat().st_size

        def note_replace(source: Path, target: Path) -> None:
            if target.suffix == ".ckpt" and target.stem.isdigit():
                files = [f for f in target.parents[1].rglob("*") if f.is_file()]
                self.at_checkpoint[int(target.stem)] = {
                    f: (self.synced.get(f, 0), f.stat().st_size)
                    for f in files
                    if f.suffix not in (".ckpt", ".tmp")
                }
            replace(source, target)
            if source in self.synced:
                self.synced[target] = self.synced.pop(source)

        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "replace", note_replace)

    def check(self, *steps: int) -> None:
        """Fail unless all files were on the disk before each of the checkpoints of `steps`."""
        assert tuple(self.at_checkpoint) == steps
        for files in self.at_checkpoint.values():
            assert files
            assert {f.name: sizes for f, sizes in files.items() if sizes[0] != sizes[1]} == {}


def test_rows_and_samples_are_on_the_disk_before_the_checkpoint(
    tmp_path: Path, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of the run, whenever a checkpoint gets its name, and the names in their folder."""
    disk = Disk(monkeypatch)
    settings = config(checkpoint_every=2, val_every=3)
    fit(
        FakePPO(),
        [
            PPOMetrics(),
            Evaluation(None, tmp_path),
            Samples(tmp_path, 1, 2, 9),
            Checkpoints(tmp_path / "checkpoints", settings, ORIGIN, Stop(), PPO.goal),
        ],
        # TensorBoard's writer keeps events for two minutes.
        [MetricsFile(tmp_path), RunTensorBoard(tmp_path)],
        batches=6,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
        plugins=[WholeFiles()],
    )
    disk.check(2, 3, 4, 6)
    kept = disk.at_checkpoint[4]
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    sizes = [files[events][0] for files in disk.at_checkpoint.values()]
    assert sizes == sorted(set(sizes)), "each has more"
    assert {str(file.relative_to(tmp_path)) for file in kept if file.parent != events.parent} == {
        "metrics.csv", "samples/train.jsonl", "samples/eval_000000.jsonl",
        "samples/eval_000003.jsonl",
    }  # fmt: skip
    assert disk.synced[tmp_path / "samples"] >= 2, "the names of the files in it"


def test_a_kill_between_deletions_leaves_no_checkpoint_for_ever(tmp_path: Path, fit: Fit) -> None:
    """At the last step, after which nothing is saved any more: the resume deletes what is left."""
    run = Run(tmp_path, fit)
    run.train(checkpoint_every=1, checkpoints_kept=5)
    assert len(run.steps) == 5
    run.train(resume="000006", checkpoint_every=1, checkpoints_kept=2)
    assert run.steps == [5, 6]


def test_metrics_whose_file_was_moved_are_written_whole(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in (1, 2):
        file.log_metrics({"loss": step / 2}, step)
    file.path.rename(tmp_path / "moved.csv")
    file.log_metrics({"loss": 1.5}, 3)
    assert read_rows(file.path) == {step: {"loss": step / 2} for step in (1, 2, 3)}
