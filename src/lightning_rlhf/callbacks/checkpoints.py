"""Checkpointing of a run, so that it can be resumed bit for bit after an interruption.

Files are written whole. What goes into a checkpoint is checked when it is saved: it is read with
torch.load(weights_only=True), which refuses objects of other classes.
"""

import io
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_rlhf.callbacks import files, progress
from lightning_rlhf.callbacks.stop import Stop, Stopped
from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import CheckpointError, DivergedError, StorageError, first_line
from lightning_rlhf.core.metrics import JUDGE, Goal, require_metrics, signed
from lightning_rlhf.io import console, storage
from lightning_rlhf.parallel import sharding
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.parallel.world import world


class WholeFiles(TorchCheckpointIO):
    """A CheckpointIO that writes to a temporary file and renames it once it is on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        target = Path(path)
        if world().rank > 0:
            return  # it has gathered sharded weights with the first one
        storage.make_folder(target.parent)
        with storage.written_whole(target) as temporary, temporary.open("wb") as file:
            torch.save(checkpoint | {files.OUTLINE: files.outline_of(checkpoint)}, file)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if sharding.trains():  # mapped, as each process takes its parts of all weights
            return files.load_checkpoint(path)
        return super().load_checkpoint(path, *args, **kwargs)


def check_loadable(parts: Mapping[str, Any]) -> None:
    """Raise CheckpointError where torch.load would refuse a part of a checkpoint.

    parts: name of a part -> the part.
    """

    def without_tensors(tree: Any) -> Any:  # which are loaded in any case
        if type(tree) in (dict, OrderedDict):
            return {key: without_tensors(value) for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return [without_tensors(value) for value in tree]
        return None if type(tree) in (torch.Tensor, torch.nn.Parameter) else tree

    for where, part in parts.items():
        file = io.BytesIO()
        try:
            torch.save(without_tensors(part), file)
            file.seek(0)
            refused = ", ".join(get_unsafe_globals_in_checkpoint(file))
        except Exception as error:  # pickling calls code of the user's own
            refused = first_line(error)
        if refused:
            raise CheckpointError(
                f"{where} holds objects from which no run can be resumed: {refused}; allowed: "
                "tensors, numbers, texts, None, and dictionaries and lists of them"
            )


@dataclass(eq=False)
class Checkpoints(progress.Stateful):
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
      counters together at the end of a step. Sharded trained weights are saved after signals alone.
    """

    kept: ClassVar[tuple[str, ...]] = ("best", "last", "best_step", "evaluated")
    folder: Path
    config: StageConfig
    """Section of the stage; the checkpoint of its `final` is kept where that is a step."""
    origin: files.Origin
    stop: Stop
    goal: Goal
    """Empty where no evaluation is better than another; there is no `best.ckpt` then."""
    replicas: Replicas = ONE
    """Processes of the run, of which the first writes the files."""
    measured: int | None = field(default=None, init=False)
    """Step of the latest evaluation of this process."""
    best: tuple[float, ...] | None = field(default=None, init=False)
    """Values of the `goal` metrics at the best evaluation so far."""
    last: tuple[float, ...] | None = field(default=None, init=False)
    """Values of the `goal` metrics at the latest evaluation."""
    best_step: int | None = field(default=None, init=False)
    """Step of the best evaluation so far."""
    evaluated: int | None = field(default=None, init=False)
    """Step of the latest evaluation."""
    _saved: tuple[int, int | None] | None = field(default=None, init=False)
    """Step and latest evaluation of the newest checkpoint."""
    _finished: tuple[int, int, int] | None = field(default=None, init=False)
    """Value of `counters` at the end of the last step."""
    _since: float = field(default=0.0, init=False)
    """Time of the newest checkpoint, or of the first step, in seconds of the monotonic clock."""
    _first: int = field(default=0, init=False)
    """Step from which the run resumes; 0 for a new run."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        states = {f"{name}.state_dict()": x for name, x in checkpoint["callbacks"].items()}
        others = {f"checkpoint[{n!r}]": x for n, x in checkpoint.items() if n != "callbacks"}
        check_loadable(states | others)
        checkpoint[files.RUN] = asdict(self.origin) | {"step": progress.trained(trainer)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        self._first = checkpoint[files.RUN]["step"]

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Delete later checkpoints before the rows and samples of later steps: otherwise a run that
        # is interrupted in between would keep a checkpoint that is newer than its rows.
        if trainer.ckpt_path is not None and self.replicas.is_first:
            if gone := files.go_back(self.folder, self._first):
                console.print_line(f"deleted: {', '.join(gone)}")
            self.delete_surplus()  # a kill within `save` leaves too many

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            try:
                state = callback.state_dict()
            except Exception:  # code of the user's own, whose state may be there after a step alone
                continue
            check_loadable({f"{type(callback).__name__}.state_dict()": state})
        self.on_validation_start(trainer, pl_module)
        step, self._since = progress.trained(trainer), monotonic()
        self._finished = counters(trainer, pl_module)
        if trainer.ckpt_path is None:
            return
        self._saved = step, self.evaluated
        if not (self.folder / files.BEST).exists():  # deleted, being later than `step`
            self.best = self.best_step = None
        if step > 0 and step % self.config.val_every == 0 and self.evaluated != step:
            # The evaluation that is due, as Lightning runs it during training.
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False  # start with the first batch
            trainer.validating = True
            loop.run()
            trainer.training = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._finished = counters(trainer, pl_module)
        step, config = progress.trained(trainer), self.config
        minutes = (monotonic() - self._since) / 60
        is_due = (
            step % config.checkpoint_every == 0
            or step % config.val_every == 0
            or (config.checkpoint_minutes is not None and minutes >= config.checkpoint_minutes)
            or step == trainer.num_training_batches
        )
        # Every process saves where it is due in one of them, by whose clock or callback it may be,
        # and ends where a signal or a callback ends one.
        found = self.replicas.largest(2 if trainer.should_stop else int(is_due))
        if found > 0:
            self.save(trainer)
        trainer.should_stop = found == 2
        self.stop.obey(self.replicas)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.replicas.size > 1:
            self.stop.listen()  # Lightning's handler may interrupt a collective, which never ends

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.stop.obey(self.replicas)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not progress.is_evaluation(trainer):
            return
        metrics = progress.latest(trainer)
        require_metrics(f"{self.origin.stage}.best.metric", self.goal, metrics)
        if trainer.sanity_checking:
            return
        step = progress.trained(trainer)
        names = [n for n in metrics if n.startswith("eval/") and not n.startswith(JUDGE)]
        bad = [f"{name} is {metrics[name]:g}" for name in names if not math.isfinite(metrics[name])]
        if bad:  # before the evaluation counts as done, so that a resumed run raises it again
            stage, made = self.origin.stage, trainer.global_step
            message = f"{stage} has diverged: after step {step}, {' and '.join(bad)}"
            raise DivergedError(f"{message}. {divergence_advice(stage, made)}")
        self.evaluated = self.measured = step
        self.last = found = tuple(metrics[name] for name, _ in self.goal)
        if self.goal and (self.best is None or self.ranked(found) > self.ranked(self.best)):
            self.best, self.best_step = found, step
            if self.replicas.is_first:
                files.link(files.path_of(self.folder, step), self.folder / files.BEST)

    def ranked(self, found: tuple[float, ...]) -> tuple[float, ...]:
        """Return the `goal` metrics with their signs applied: the larger tuple is better."""
        return tuple(signed(x, mode) for (_, mode), x in zip(self.goal, found, strict=True))

    def best_text(self) -> str:
        """Return a description of the `goal` metrics at the best evaluation."""
        assert self.best is not None
        return ", then ".join(
            f"{name} {progress.metric_text(x)} ({'higher' if mode == 'max' else 'lower'} is better)"
            for (name, mode), x in zip(self.goal, self.best, strict=True)
        )

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        is_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        is_whole = self._finished == counters(trainer, pl_module)
        is_new = self._saved != (progress.trained(trainer), self.evaluated)
        if is_training and is_whole and is_new and not isinstance(exception, StorageError):
            # Lightning would count an unfinished batch as finished in a resumed run: that would
            # evaluate after it, or take it for the last batch.
            batches: Any = trainer.fit_loop.epoch_loop.batch_progress
            batches.total.ready = batches.total.started = batches.total.processed
            batches.is_last_batch = False
            if sharding.trains() and not isinstance(exception, Stopped):
                return  # raised in this process alone, which does not have all weights
            try:
                self.save(trainer)
            except Exception as failure:  # must not replace the exception that ended the run
                console.print_line(f"no checkpoint of step {progress.trained(trainer)}: {failure}")

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint of the last finished step, then delete the oldest surplus ones."""
        started, step = monotonic(), progress.trained(trainer)
        path = files.path_of(self.folder, step)
        if self.replicas.is_first or sharding.trains():
            trainer.save_checkpoint(path)
        if self.replicas.is_first:
            self.delete_surplus()
            size = storage.readable(path.stat().st_size)
            console.print_detail(f"checkpoint {step}: {size}, {monotonic() - started:.2f} s")
        self._saved, self._since = (step, self.evaluated), monotonic()

    def delete_surplus(self) -> None:
        """Delete the oldest checkpoints, but for that of `final` where it is a step."""
        for path in files.numbered(self.folder)[: -self.config.checkpoints_kept]:
            if int(path.stem) != self.config.final:
                path.unlink()


def counters(trainer: Trainer, pl_module: Any) -> tuple[int, int, int]:
    """Return the numbers of finished batches, of the module's finished steps, and of started
    optimizer steps.

    The value changes whenever the weights or the module's counters change.
    """
    optimizer = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    return progress.trained(trainer), progress.position(trainer, pl_module), optimizer.total.ready


def divergence_advice(stage: str, made: int) -> str:
    """Return what to do about numbers that are not finite after `made` optimizer steps."""
    reward = ", a reward of enormous size, or a formula of your own" if stage == "ppo" else ""
    if made == 0:
        reason = "No update was made before them, so that no learning rate did this"
        return f"{reason}: it is the model that the run starts from, or the data{reward}"
    name = "run=NAME" if stage == "sft" else "job=NAME"  # which finds what it starts from
    return (
        f"A learning rate that is too large{reward} does this. Start over (overwrite=true or "
        f"{name}) with a smaller {stage}.lr: a resumed run keeps its numbers"
    )
