"""Every iteration of PPO in a file of its own, to be replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor

from lightning_rlhf.callbacks.checkpoints import progress
from lightning_rlhf.callbacks.contract import ppo_view
from lightning_rlhf.callbacks.digest import parameters_digest
from lightning_rlhf.callbacks.terminal import print_line
from lightning_rlhf.core.errors import NotFiniteError, StorageError
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.core.types import UpdateStats
from lightning_rlhf.data.rollouts import (
    UPDATES,
    Recorded,
    file_of,
    machine,
    recorded_iterations,
    stats,
    weights_of,
    write_recorded,
)
from lightning_rlhf.io.storage import written_whole


class Recorder(Callback):
    """Writes `<run_dir>/rollouts/<iteration>.parquet` after each iteration."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        iteration = ppo_view(pl_module).iteration
        recorded = latest(pl_module, iteration, outputs[RESULT].updates)
        write_recorded(file_of(self._run_dir, iteration), recorded)


class NonFiniteDump(Callback):
    """Writes the batch of an iteration that ends the run because its updates are not finite.

    The file is that of the iteration which was not finished. `lightning-rlhf replay` runs it where
    a checkpoint stands right before it, or all iterations since one are recorded. Where some of
    its updates were made, no checkpoint is written at the end: the trained weights are, beside it,
    for `lightning-rlhf replay` to show the batch with.
    A resumed run forgets the files after its checkpoint: it goes through those iterations again.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.kept: int | None = None
        """The iteration that was written."""
        self._begun = 0
        """Optimizer steps before the iteration."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for iteration in recorded_iterations(self._run_dir):
            if iteration > ppo_view(pl_module).iteration:
                file_of(self._run_dir, iteration).unlink()
                weights_of(self._run_dir, iteration).unlink(missing_ok=True)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begun = progress(trainer, pl_module)[-1]

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, NotFiniteError):
            iteration = ppo_view(pl_module).iteration + 1
            recorded = latest(pl_module, iteration, updates=None)
            try:
                write_recorded(file_of(self._run_dir, iteration), recorded)
                if made := progress(trainer, pl_module)[-1] - self._begun:
                    path = weights_of(self._run_dir, iteration)
                    write_weights(path, pl_module.state_dict(), updates=made)
            except StorageError as failure:  # what ended the run is reported, and not this
                print_line(f"the batch of iteration {iteration} is not kept: {failure}")
            else:
                self.kept = iteration


def write_weights(path: Path, weights: Mapping[str, Tensor], updates: int) -> None:
    """Write the file whole or not at all. updates: of the iteration, that led to the weights.

    Raises StorageError where the disk holds no more.
    """
    whole = {name: x.detach().cpu().contiguous() for name, x in weights.items()}
    with written_whole(path, sum(x.nbytes for x in whole.values())) as beside:
        save_file(whole, beside, metadata={UPDATES: str(updates)})


def latest(
    pl_module: LightningModule, iteration: int, updates: Sequence[UpdateStats] | None
) -> Recorded:
    """Return the record of the module's current or latest iteration.

    iteration: its number, from 1. updates: None where the iteration was broken off.
    """
    module = ppo_view(pl_module)
    batch = module.batch
    assert batch is not None
    experience = batch.experience
    rows = module.prompt_rows("train")
    return Recorded(
        experience=experience,
        kl_coef=batch.kl_coef,
        shuffle=batch.shuffle,
        iteration=iteration,
        prompts=[rows[index]["prompt"] for index in experience.index.tolist()],
        responses=[
            module.chat.decode_response(tokens)
            for tokens in real_tokens(experience.responses, experience.response_mask)
        ],
        components=[term.name for term in module.reward.terms],
        has_critic=module.critic is not None,
        updates=None if updates is None else stats(updates),
        parameters=None if updates is None else parameters_digest(pl_module.state_dict()),
        machine=machine(pl_module.device),
    )
