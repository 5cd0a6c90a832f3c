"""Checkpointing of a run, so that it can be resumed bit for bit after an interruption.

Files are written whole. What callbacks put into a checkpoint is checked when it is saved: it is
read with torch.load(weights_only=True), which refuses objects of other classes.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlhf.callbacks.checkpoint_files import (
    BEST,
    OUTLINE,
    RUN,
    SUFFIX,
    Origin,
    go_back,
    keep_newest,
    link_best,
    outline,
    path_of,
    stamp,
)
from lightning_rlhf.callbacks.contract import is_evaluation, position, require_finite_metrics
from lightning_rlhf.callbacks.progress import number_text
from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import CheckpointError, StorageError
from lightning_rlhf.core.metrics import Goal, require_metrics, signed
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import make_folder, readable, written_whole
from lightning_rlhf.io.user_code import FAULTS
from lightning_rlhf.parallel.replicas import ONE, Replicas


class WholeFiles(TorchCheckpointIO):
    """A CheckpointIO that writes to a temporary file and renames it once it is on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        target = Path(path)
        make_folder(target.parent)
        needed = sum(tensor.nbytes for tensor in tensors(checkpoint))
        with written_whole(target, needed) as beside, beside.open("wb") as file:
            torch.save(checkpoint | {OUTLINE: outline(checkpoint)}, file)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dictionaries and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)


PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.nn.Parameter)
"""Types that every checkpoint may hold."""
CALLBACKS = "callbacks"
"""Checkpoint key of the states of callbacks, by the callback's `state_key`."""


def check_states(callbacks: Iterable[Callback]) -> None:
    """Raise CheckpointError where the state of a callback cannot be loaded again."""
    for callback in callbacks:
        try:
            state = state_of(callback)
        except CheckpointError:  # a state that exists only after the start is saved later
            continue
        require_loadable(f"{type(callback).__name__}.state_dict()", state)


def state_of(callback: Callback) -> dict[str, Any]:
    """Return the state of a callback; raises CheckpointError where its `state_dict` fails."""
    try:
        return callback.state_dict()
    except FAULTS as error:
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{type(callback).__name__}.state_dict() raised {shown}, so that no checkpoint can be "
            "written; allowed: a dictionary of tensors, numbers, texts, None, and dictionaries and "
            "lists of them"
        ) from error


def check_contents(checkpoint: Mapping[str, Any], callbacks: Iterable[Callback]) -> None:
    """Raise CheckpointError where the contents of a checkpoint cannot be loaded again.

    callbacks: those of the run, which the error names by class.
    """
    states = checkpoint[CALLBACKS]
    for callback in callbacks:
        if callback.state_key in states:
            require_loadable(f"{type(callback).__name__}.state_dict()", states[callback.state_key])
    for key, value in checkpoint.items():
        require_loadable(f"checkpoint[{key!r}]", value)


def require_loadable(where: str, tree: Any) -> None:
    """Raise CheckpointError naming the first item of `tree` that cannot be loaded again."""
    if type(tree) in PLAIN:
        return
    if type(tree) in (dict, OrderedDict):
        for key, value in tree.items():
            require_loadable(f"key {key!r} of {where}", key)
            require_loadable(f"{where}[{key!r}]", value)
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            require_loadable(f"{where}[{index}]", value)
    elif not is_loadable(tree):
        raise CheckpointError(
            f"{where} is an object of type {type(tree).__name__}, from which no run can be "
            "resumed; allowed: tensors, numbers, texts, None, and dictionaries and lists of them"
        )


def is_loadable(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) reads what torch.save writes of the value."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # a class of the user's own may raise anything
        return False
    return True


class Checkpoints(Callback):
    """Callback that writes `<folder>/<step>.ckpt`, and keeps the newest ones and `best.ckpt`.

    A step is a batch: an iteration of PPO, an optimizer step in the other stages. Lightning's
    ModelCheckpoint counts optimizer steps, of which PPO takes several per batch.

    A checkpoint always belongs to a finished step whose metric rows and samples are written: place
    this callback after those that write them. They flush their files in `on_save_checkpoint`, so
    that after a loss of power no checkpoint lacks the rows up to it. A checkpoint is written
    - every `checkpoint_every` steps, after `checkpoint_minutes`, and at the last step, also where
      a callback before this one ends the run there;
    - before an evaluation, so that an interrupted evaluation loses nothing: the checkpoint records
      that the evaluation is due, and a run that resumes from it starts with the evaluation;
    - when an exception ends the run, including the one raised by `stop` after a signal, if no
      optimizer step was started since the last finished step. The modules update all their other
      counters together at the end of a step.
    """

    def __init__(
        self,
        folder: Path,
        config: StageConfig,
        origin: Origin,
        stop: Stop,
        goal: Goal,
        replicas: Replicas = ONE,
    ) -> None:
        """Set up the callback.

        config: section of the stage; the checkpoint of its `final` is kept where that is a step.
        goal: empty where no evaluation is better than another; there is no `best.ckpt` then.
        replicas: processes of the run, of which the first writes the files.
        """
        self.folder = folder
        self.config = config
        self.origin = origin
        self.stop = stop
        self.goal = goal
        self.replicas = replicas
        self.kept = config.final if isinstance(config.final, int) else None
        """Step whose checkpoint is kept whatever its age."""
        self.measured: int | None = None
        """Step of the latest evaluation of this process."""
        self.best: tuple[float, ...] | None = None
        """Values of the `goal` metrics at the best evaluation so far."""
        self.best_step: int | None = None
        """Step of the best evaluation so far."""
        self.evaluated: int | None = None
        """Step of the latest evaluation."""
        self._saved: tuple[int, int | None] | None = None
        """Step and latest evaluation of the newest checkpoint."""
        self._finished: tuple[int, int, int] | None = None
        """Value of `progress` at the end of the last step."""
        self._since = monotonic()
        """Time of the newest checkpoint, or of the start, in seconds of the monotonic clock."""
        self._first = 0
        """Step from which the run resumes; 0 for a new run."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "evaluated": self.evaluated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self.best_step = state_dict["best_step"]
        self.evaluated = state_dict["evaluated"]

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        check_contents(checkpoint, trainer.callbacks)  # type: ignore[attr-defined]
        checkpoint[RUN] = stamp(self.origin, trained(trainer))

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._first = checkpoint[RUN]["step"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_states(trainer.callbacks)  # type: ignore[attr-defined]
        # Delete later checkpoints before the rows and samples of later steps: otherwise a run that
        # is interrupted in between would keep a checkpoint that is newer than its rows.
        if trainer.ckpt_path is None or not self.replicas.is_first:
            return
        gone = go_back(self.folder, self._first)
        for why in dict.fromkeys(gone.values()):
            print_line(f"deleted, as {why}: {', '.join(n for n in gone if gone[n] == why)}")
        # A kill within `save` leaves too many checkpoints.
        keep_newest(self.folder, self.config.checkpoints_kept, self.kept)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.listen()
        step = trained(trainer)
        self._finished = progress(trainer, pl_module)
        if trainer.ckpt_path is None:
            return
        self._saved = step, self.evaluated
        if not (self.folder / f"{BEST}{SUFFIX}").exists():  # deleted, being later than `step`
            self.best = self.best_step = None
        if step > 0 and step % self.config.val_every == 0 and self.evaluated != step:
            evaluate(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        self._finished = progress(trainer, pl_module)
        if self.is_due(trainer):
            self.save(trainer)
        self.agree(trainer)

    def is_due(self, trainer: L.Trainer) -> bool:
        """Return True if a checkpoint of the finished step is due."""
        step, config = trained(trainer), self.config
        if step % config.checkpoint_every == 0 or step % config.val_every == 0:
            return True
        minutes = (monotonic() - self._since) / 60
        is_late = config.checkpoint_minutes is not None and minutes >= config.checkpoint_minutes
        return is_late or step == trainer.num_training_batches or trainer.should_stop

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.listen()

    def listen(self) -> None:
        """Receive signals in place of Lightning, whose handler waits for the other processes.

        It may interrupt another collective operation, which then never ends.
        """
        if self.replicas.size > 1:
            self.stop.listen()

    def agree(self, trainer: L.Trainer) -> None:
        """End the run in every process where a signal or a callback ends it in one of them."""
        trainer.should_stop = bool(self.replicas.largest(int(trainer.should_stop)))
        self.stop.obey(self.replicas)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.stop.obey(self.replicas)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not is_evaluation(trainer):
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        require_metrics(f"{self.origin.stage}.best.metric", self.goal, metrics)
        if trainer.sanity_checking:
            return
        step = trained(trainer)
        # Raised before the evaluation counts as done, so that a resumed run raises it again.
        require_finite_metrics(self.origin.stage, step, trainer.global_step, metrics)
        self.evaluated = self.measured = step
        found = tuple(metrics[name] for name, _ in self.goal)
        if self.goal and (self.best is None or self.signed(found) > self.signed(self.best)):
            self.best, self.best_step = found, step
            if self.replicas.is_first:
                link_best(self.folder, step)

    def signed(self, found: tuple[float, ...]) -> tuple[float, ...]:
        """Return the `goal` metrics with their signs applied: the larger tuple is better."""
        return tuple(signed(x, mode) for (_, mode), x in zip(self.goal, found, strict=True))

    def best_text(self) -> str:
        """Return a description of the `goal` metrics at the best evaluation."""
        assert self.best is not None
        return ", then ".join(
            f"{name} {number_text(x)} ({'higher' if mode == 'max' else 'lower'} is better)"
            for (name, mode), x in zip(self.goal, self.best, strict=True)
        )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        is_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        is_whole = self._finished == progress(trainer, pl_module)
        is_new = self._saved != (trained(trainer), self.evaluated)
        if is_training and is_whole and is_new and not isinstance(exception, StorageError):
            forget_begun_batch(trainer)
            try:
                self.save(trainer)
            except Exception as failure:  # must not replace the exception that ended the run
                print_line(f"no checkpoint of step {trained(trainer)}: {failure}")

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint of the last finished step, then delete the oldest surplus ones."""
        started, step = monotonic(), trained(trainer)
        if not self.replicas.is_first:
            self._saved = step, self.evaluated
            return
        path = path_of(self.folder, step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state_of(callback)  # Lightning's own call would raise what the callback raises
        trainer.save_checkpoint(path)
        keep_newest(self.folder, self.config.checkpoints_kept, self.kept)
        self._saved, self._since = (step, self.evaluated), monotonic()
        print_line(
            f"checkpoint {step}: {readable(path.stat().st_size)}, {self._since - started:.2f} s"
        )


def trained(trainer: L.Trainer) -> int:
    """Return the number of batches trained on, over all resumes."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def progress(trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[int, int, int]:
    """Return the numbers of finished batches, of the module's finished steps, and of started
    optimizer steps.

    The value changes whenever the weights or the module's counters change.
    """
    optimizer = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    return trained(trainer), position(trainer, pl_module), optimizer.total.ready


def forget_begun_batch(trainer: L.Trainer) -> None:
    """Remove an unfinished batch from Lightning's progress counters.

    Otherwise a resumed run would count it as finished: it would evaluate after it, or take it for
    the last batch.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    batches.total.ready = batches.total.started = batches.total.processed
    batches.is_last_batch = False


def evaluate(trainer: L.Trainer) -> None:
    """Run the evaluation that is due at the resumed step, as Lightning runs it during training."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # start with the first batch
    trainer.validating = True
    loop.run()
    trainer.training = True
