"""Which checkpoints a run leaves, when, and that one goes on with what was due."""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from lightning_rlhf.callbacks import files
from lightning_rlhf.callbacks.checkpoints import Checkpoints, WholeFiles
from lightning_rlhf.callbacks.evaluation import Evaluation
from lightning_rlhf.callbacks.loggers import MetricsFile
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.callbacks.stop import Stop, Stopped, deferred_signals
from lightning_rlhf.core import errors
from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.core.metrics import MACHINE
from lightning_rlhf.core.validation import build
from lightning_rlhf.runs.stage import find_stage
from lightning_rlhf.stages.ppo import PPO

from ..core.configs import STAGES
from .conftest import FakePPO, Fit

GOAL = PPO.goal
ORIGIN = files.Origin(stage="ppo", model="mini", version="1", run="a")
STAMP = asdict(ORIGIN) | {"step": 1}
NEVER = 1000


def config(**changes: Any) -> SFTConfig:
    """A stage's rhythm; the rest of it is not read."""
    never = {"val_every": NEVER, "checkpoint_every": NEVER}
    return build(SFTConfig, STAGES["sft"][1] | never | changes, "sft")


class At(Callback):
    """Does something in a hook, when that is called for the n-th time."""

    def __init__(self, hook: str, count: int, act: Any) -> None:
        self.left, self.act = count, act
        setattr(self, hook, self.called)

    def called(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


def throw(error: BaseException) -> Any:
    def act() -> None:
        raise error

    return act


class Run:
    """A folder in which FakePPO is trained for six iterations."""

    def __init__(self, folder: Path, fit: Fit) -> None:
        self.folder, self.checkpoints, self.fit = folder, folder / "checkpoints", fit

    def train(
        self, *before: Callback, resume: str | None = None, module: LightningModule | None = None,
        stop: Stop | None = None, **changes: Any,
    ) -> Checkpoints:  # fmt: skip
        settings = config(**changes)
        saver = Checkpoints(self.checkpoints, settings, ORIGIN, stop or Stop(), GOAL)
        self.fit(
            module or FakePPO(), [*before, PPOMetrics(), Evaluation(None, self.folder), saver],
            [MetricsFile(self.folder)], batches=6,
            ckpt_path=None if resume is None else self.checkpoints / f"{resume}.ckpt",
            val_check_interval=settings.val_every, check_val_every_n_epoch=None,
            plugins=[WholeFiles()],
        )  # fmt: skip
        return saver

    @property
    def steps(self) -> list[int]:
        return [int(path.stem) for path in files.numbered(self.checkpoints)]


@pytest.fixture
def run(tmp_path: Path, fit: Fit) -> Run:
    return Run(tmp_path, fit)


def test_when_checkpoints_are_saved_and_kept(run: Run) -> None:
    """Of the steps 2, 3, 4 and 6, every second and before each evaluation, the last three."""
    run.train(checkpoint_every=2, val_every=3, checkpoints_kept=3)
    written = [*map(files.step_of, files.numbered(run.checkpoints))]
    assert run.steps == written == [3, 4, 6]


def test_minutes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of 20 s: every second one ends more than 0.6 minutes after the last checkpoint."""
    now = [0.0]
    monkeypatch.setattr("lightning_rlhf.callbacks.checkpoints.monotonic", lambda: now[0])

    class Clock(Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            now[0] += 20.0

    run.train(Clock(), checkpoint_minutes=0.6, checkpoints_kept=9)
    assert run.steps == [2, 4, 6]


class Judged(FakePPO):
    """Its evaluations after iteration k give a mean reward of rewards[k]."""

    rewards = (0.0, 1.0, 5.0, 3.0, -9.0, 5.0, 4.0)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().validation_step(batch, batch_idx)
        out.scores.score[:] = self.rewards[self.iteration]
        return out


def evaluated(saver: Checkpoints, step: int, checking: bool = False, **metrics: float) -> None:
    """Let the evaluation after `step` give eval/NAME; checking: that before the first step."""
    (saver.folder / f"{step:06d}.ckpt").write_text(str(step))
    batches = SimpleNamespace(total=SimpleNamespace(processed=step))
    trainer: Any = SimpleNamespace(
        sanity_checking=checking, num_sanity_val_steps=math.inf, global_step=step,
        callback_metrics={f"eval/{name}": torch.tensor(x) for name, x in metrics.items()},
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches)),
    )  # fmt: skip
    saver.on_validation_end(trainer, FakePPO())


def saver_of(stage: Any, folder: Path) -> Checkpoints:
    return Checkpoints(
        folder, config(), replace(ORIGIN, stage=stage), Stop(), find_stage(stage).goal
    )


def test_of_equally_accurate_reward_models_the_one_of_the_lower_loss_is_best(
    tmp_path: Path,
) -> None:
    """Of equals in both the earlier one; and as much is known after a resume."""
    saver = saver_of("rm", tmp_path)
    for step, (accuracy, loss) in enumerate([(0.5, 0.1), (0.75, 0.6), (0.75, 0.5), (0.75, 0.5)]):
        evaluated(saver, step, accuracy=accuracy, rm_loss=loss)
        state = saver.state_dict()
        saver = saver_of("rm", tmp_path)
        saver.load_state_dict(state)
    assert (saver.best, saver.best_step, saver.last) == ((0.75, 0.5), 2, (0.75, 0.5))
    assert saver.best_text() == (
        "eval/accuracy 0.750 (higher is better), then eval/rm_loss 0.500 (lower is better)"
    )


def test_the_evaluation_before_the_first_step_needs_all_that_is_monitored_and_is_not_the_best(
    tmp_path: Path,
) -> None:
    saver = saver_of("rm", tmp_path)
    with pytest.raises(
        errors.ConfigError, match=r"^rm\.best\.metric is 'eval/rm_loss'; allowed: eval/acc"
    ):
        evaluated(saver, 0, checking=True, accuracy=0.5)
    evaluated(saver, 0, checking=True, accuracy=0.5, rm_loss=0.7)
    assert (saver.evaluated, saver.best_step) == (None, None)


class Remembers(Callback):
    """Has an object of a class of its own as its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"rules": [config()]}


class Adds(Callback):
    """Adds an object of a class of its own to every checkpoint."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [Path("x")]


@pytest.mark.parametrize(
    ("own", "message", "iterations"),
    [
        (Remembers(), r"Remembers\.state_dict\(\) holds .*config\.SFTConfig", 0),
        (Adds(), r"checkpoint\['mine'\] holds objects from which .*: pathlib\.PosixPath;", 1),
    ],
)
def test_what_no_run_can_resume_from_is_one_error_that_names_its_place(
    run: Run, own: Callback, message: str, iterations: int
) -> None:
    """A state is refused before the first step if it is there, else at the first checkpoint."""
    module = FakePPO()
    with pytest.raises(errors.CheckpointError, match=f"^{message}"):
        run.train(own, module=module, checkpoint_every=1)
    assert module.iteration == iterations
    assert run.steps == []


class Cut(Exception):
    """No time for anything."""


@pytest.fixture
def powerless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved where a run breaks off."""
    monkeypatch.setattr(Checkpoints, "on_exception", lambda *_: None)


def left(folder: Path) -> dict[str, Any]:
    """Return the rows of metrics.csv, without what the machine decides, and all samples."""
    rows = [
        {name: str(x) for name, x in row.items() if not name.startswith(MACHINE)}
        for row in files.read_rows(folder / "metrics.csv").values()
    ]
    samples = sorted((folder / "samples").iterdir())
    return {"rows": rows} | {path.name: path.read_text() for path in samples}


@pytest.mark.usefixtures("powerless")
@pytest.mark.parametrize(
    ("hook", "count", "resume"),
    [
        ("on_train_batch_end", 4, "000002"),  # in the middle of what follows the fourth iteration
        ("on_validation_batch_end", 4, "000004"),  # of two batches each
    ],
)
def test_what_was_due_at_a_checkpoint_is_done_first(
    run: Run, tmp_path: Path, fit: Fit, hook: str, count: int, resume: str
) -> None:
    """Evaluations after 2, 4 and 6 iterations, each also the best so far."""
    whole = Run(tmp_path / "whole", fit)
    whole.folder.mkdir()
    expected = whole.train(val_every=2)
    with pytest.raises(Cut):
        run.train(At(hook, count, throw(Cut())), val_every=2)
    assert run.checkpoints.joinpath(f"{resume}.ckpt") == files.numbered(run.checkpoints)[-1]
    saver = run.train(resume=resume, val_every=2)
    assert left(run.folder) == left(whole.folder)
    assert run.steps == whole.steps
    assert (saver.best, saver.best_step) == (expected.best, expected.best_step) == ((6.5,), 6)
    assert files.step_of(run.checkpoints / "best.ckpt") == 6


def test_resuming_from_an_older_one_deletes_the_later_ones(run: Run, capsys: Any) -> None:
    """Before rows and samples: or a run that is cut off would go on from what is later than them.

    A best one that is later is gone; the best of those to come takes its place.
    """
    run.train(val_every=2, checkpoints_kept=9)
    (run.checkpoints / ".0123.lightning-rlhf.tmp").touch()
    with pytest.raises(Cut):
        run.train(At("on_train_start", 1, throw(Cut())), val_every=2, resume="000002")
    assert [path.name for path in run.checkpoints.iterdir()] == ["000002.ckpt"]
    assert len((run.folder / "metrics.csv").read_text().splitlines()) == 1 + 6
    gone = (f"{name}.ckpt (later than step 2)" for name in ("000004", "000006", "best"))
    said = f"deleted: {', '.join(gone)}"
    assert said in capsys.readouterr().out
    saver = run.train(val_every=2, checkpoints_kept=9, resume="000002")
    assert run.steps == [2, 4, 6]
    assert saver.best_step == 6


def test_a_best_one_that_cannot_be_read_is_in_nobodys_way(run: Run, capsys: Any) -> None:
    run.train(val_every=2, checkpoints_kept=9)
    best = run.checkpoints / "best.ckpt"
    best.unlink()
    best.write_bytes(b"PK")
    saver = run.train(val_every=2, checkpoints_kept=9, resume="000004")
    said = "deleted: 000006.ckpt (later than step 4), best.ckpt (unreadable)"
    assert said in capsys.readouterr().out
    assert saver.best_step == files.step_of(best) == 6


def test_a_best_one_that_is_gone_is_no_measure(run: Run) -> None:
    """The one after 6 iterations was; on the second way every reward is lower than all before."""
    run.train(val_every=2, checkpoints_kept=9)
    module = Judged()
    module.rewards = (-1.0,) * 7
    saver = run.train(module=module, val_every=2, resume="000004")
    assert (saver.best, saver.best_step) == ((-1.0,), 4)
    assert files.step_of(run.checkpoints / "best.ckpt") == 4


def test_the_best_one_can_be_gone_on_from(run: Run) -> None:
    """The first of the two highest; it gets its number back, and stays the best."""
    saver = run.train(module=Judged(), val_every=1)
    for resumed, steps in ((False, [5, 6]), (True, [2, 3, 4, 5, 6])):
        if resumed:
            saver = run.train(module=Judged(), val_every=1, resume="best", checkpoints_kept=9)
        assert (saver.best, saver.best_step) == ((5.0,), 2)
        assert run.steps == steps
        assert files.step_of(run.checkpoints / "best.ckpt") == 2


class Fails(FakePPO):
    """In its third iteration, before or after the optimizer's first step."""

    def __init__(self, error: BaseException, has_begun: bool = False) -> None:
        super().__init__()
        self.error, self.has_begun = error, has_begun

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.iteration < 2:
            return super().training_step(batch, batch_idx)
        if self.has_begun:
            self.optimizers().step()
        raise self.error


@pytest.mark.parametrize(("has_begun", "steps"), [(False, [2]), (True, [])])
def test_an_exception_saves_the_step_before_unless_weights_have_changed(
    run: Run, has_begun: bool, steps: list[int]
) -> None:
    with pytest.raises(MemoryError):
        run.train(module=Fails(MemoryError(), has_begun))
    assert run.steps == steps
    for path in files.numbered(run.checkpoints):
        assert torch.load(path, weights_only=True)["iteration"] == 2


def test_an_evaluation_is_not_repeated_after_an_exception(run: Run) -> None:
    """The checkpoint before it is written once more, with the evaluation; the others keep step."""
    with pytest.raises(errors.RewardError):
        run.train(module=Fails(errors.RewardError("away")), val_every=2)
    assert run.steps == [2]
    written = run.folder / "samples" / "eval_000002.jsonl"
    written.write_text("not again\n")
    saver = run.train(val_every=2, resume="000002", checkpoints_kept=9)
    assert run.steps == [2, 4, 6]
    assert saver.evaluated == 6
    assert written.read_text() == "not again\n"


# Signals.


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """A job in a shell's background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("signum", "hook", "step"),
    [
        (signal.SIGTERM, "on_train_batch_start", 3),  # in the third iteration
        (signal.SIGINT, "on_validation_batch_end", 4),  # in the second evaluation, after the fourth
    ],
)
def test_a_signal_ends_the_run_after_the_step(
    run: Run, signum: signal.Signals, hook: str, step: int
) -> None:
    before = signal.getsignal(signum)
    stop = Stop()
    kill = At(hook, 3, lambda: os.kill(os.getpid(), signum))
    with pytest.raises(Stopped) as stopped, deferred_signals(stop):
        run.train(kill, stop=stop, val_every=2)
    assert stopped.value.code == 128 + signum
    assert signal.getsignal(signum) == before
    assert run.steps[-1] == step
    found = torch.load(files.numbered(run.checkpoints)[-1], weights_only=True)
    assert found["callbacks"]["Checkpoints"]["evaluated"] == 2


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_signals(Stop()):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# What is no checkpoint of the run.


def test_a_bit_that_fell_over_in_a_tensor_is_seen(tmp_path: Path) -> None:
    """torch itself would read it."""
    path, tensor = tmp_path / "000001.ckpt", torch.full((64,), 1.2345)
    WholeFiles().save_checkpoint({"state_dict": {"a": tensor}, "lightning_rlhf": STAMP}, path)
    files.check_checkpoint(path, ORIGIN)
    data = bytearray(path.read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert torch.load(path, weights_only=True)["state_dict"]["a"][1] != tensor[1]
    with pytest.raises(
        errors.CheckpointError, match=r"000001.ckpt cannot be read: \S+ in it is damaged"
    ):
        files.check_checkpoint(path, ORIGIN)


def test_a_checkpoint_of_another_run_or_name_or_one_that_was_cut_off_is_refused(run: Run) -> None:
    run.train()
    whole = run.checkpoints / "000006.ckpt"
    files.check_checkpoint(whole, ORIGIN)
    assert files.read_stamp(whole) == asdict(ORIGIN) | {"step": 6}
    for change, said in (
        ({"stage": "sft"}, "of stage ppo, not sft"),
        ({"version": "2"}, "of lightning-rlhf 1, not 2"),
        ({"run": "b"}, "of run a, not b"),
    ):
        with pytest.raises(errors.CheckpointError, match=f"000006.ckpt is foreign: {said}"):
            files.check_checkpoint(whole, replace(ORIGIN, **change))
    other = whole.rename(whole.with_stem("000009"))
    with pytest.raises(errors.CheckpointError, match=r"000009.ckpt is foreign: of step 6, not 9"):
        files.check_checkpoint(other, ORIGIN)
    other.write_bytes(other.read_bytes()[:1000])
    with pytest.raises(errors.CheckpointError, match=r"000009.ckpt cannot be read: "):
        files.check_checkpoint(other, ORIGIN)
