"""Parquet files of what a run trains on: iterations of PPO, and the batch that ends a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_rlhf.core.errors import NotFiniteError, StorageError
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.records import Experience
from lightning_rlhf.data.batches import StageData
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.lengths import Tokenised
from lightning_rlhf.data.rollouts import (
    LAST_BATCH,
    file_of,
    recorded_columns,
    recorded_iterations,
    write_table,
)
from lightning_rlhf.data.rows import Rows
from lightning_rlhf.io.console import print_line

BY_ROW = ("old_logprobs", "ref_logprobs", "old_values", "component_scores")
"""Fields of Experience in which a row does not depend on the others."""
NAMED = 20
"""Number of rows of the data that the message at the end of a run names."""


class Recorder(Callback):
    """Writes iterations of PPO to `<run_dir>/rollouts/`: each, or only one that ends the run.

    An iteration ends the run where its updates are not finite. A resumed run deletes the files
    after its checkpoint, since it goes through those iterations again.
    """

    def __init__(self, run_dir: Path, rows: Rows[Any], *, every: bool) -> None:
        """Store the folder of the run and its prompts; every: True to write each iteration."""
        self._run_dir = run_dir
        self._rows = rows
        self._every = every

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for iteration in recorded_iterations(self._run_dir):
            if iteration > pl_module.iteration:
                file_of(self._run_dir, iteration).unlink()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        if self._every:
            iteration = pl_module.iteration
            write_table(file_of(self._run_dir, iteration), iteration_columns(pl_module))

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, NotFiniteError):
            return
        experience = cast(Experience, pl_module.experience)
        iteration = pl_module.iteration + 1
        path = file_of(self._run_dir, iteration)
        if written(path, iteration_columns(pl_module)):
            # Advantages are whitened, so that one row that is not finite would spoil all of them.
            numbers = (experience.score[:, None], *(getattr(experience, x) for x in BY_ROW))
            bad = experience.index[~torch.cat(numbers, dim=1).isfinite().all(dim=1)].tolist()
            exception.batch = (
                f"Iteration {iteration} is in {path}, and `lightning-rlhf replay {self._run_dir} "
                f"--iteration {iteration}` shows it; "
                f"{places(self._rows, self._rows.numbers, experience.index.tolist(), bad)}"
            )


def iteration_columns(module: Any) -> dict[str, Any]:
    """Return the columns of the module's current or latest iteration."""
    experience = cast(Experience, module.experience)
    rows = module.prompt_rows("train")
    return recorded_columns(
        experience,
        [rows[index]["prompt"] for index in experience.index.tolist()],
        [
            module.chat.decode_response(tokens)
            for tokens in real_tokens(experience.responses, experience.response_mask)
        ],
        components=[term.name for term in module.reward.terms],
        show=module.chat.show,
        has_critic=module.critic is not None,
    )


class KeepLastBatch(Callback):
    """Writes `<run_dir>/last_batch.parquet` when updates that are not finite end SFT, RM or DPO.

    One row per example of the last batch: the number of its row in the data, texts and token ids,
    and its loss by itself. A resumed run deletes the file, since it trains on that batch again.
    """

    def __init__(
        self, run_dir: Path, rows: Rows[Any], tokenised: Tokenised[Any], data: StageData,
        chat: ChatFormat,
    ) -> None:  # fmt: skip
        """Store the sources; rows, tokenised, data: the training data as rows, tokens, batches."""
        self._path = run_dir / LAST_BATCH
        self._rows = rows
        self._numbers = tokenised.numbers
        self._data = data
        self._chat = chat

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._path.unlink(missing_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, NotFiniteError):
            return
        step = pl_module.iteration
        positions = self._data.schedule.batch(step)
        examples = [self._data.train[i] for i in positions]
        columns: dict[str, Any] = {"number": [self._numbers[i] for i in positions]}
        for name in (field.name for field in fields(examples[0])):
            cells = [getattr(example, name) for example in examples]
            if isinstance(cells[0], float):  # the margin of a pair
                columns[name] = pa.array(cells, pa.float64())
                continue
            if name != "learned":  # positions in the prompt
                columns[name] = pa.array(map(self._chat.show, cells), pa.string())
            columns[f"{name}_tokens"] = pa.array(map(list, cells), pa.list_(pa.int64()))
        bad: list[int] = []
        try:
            with trainer.precision_plugin.forward_context():
                batch = self._data.collate(examples).to(pl_module.device)
                losses: Tensor = pl_module.row_losses(batch).float().cpu()
            columns["loss"] = losses.numpy()
            bad = [i for i, x in zip(positions, losses.isfinite(), strict=True) if not x]
        except Exception as failure:  # the batch itself is still written
            print_line(f"the batch that ended the run has no loss of each row: {failure}")
        if written(self._path, columns):
            exception.batch = (
                f"The batch of step {step + 1} is in {self._path}; "
                f"{places(self._rows, self._numbers, positions, bad)}"
            )


def written(path: Path, columns: Mapping[str, Any]) -> bool:
    """Write a table as a run ends; return False, and print why, where it finds no room."""
    try:
        write_table(path, columns)
    except StorageError as failure:  # must not replace the exception that ended the run
        print_line(f"the batch that ended the run is not kept: {failure}")
        return False
    return True


def places(
    rows: Rows[Any], numbers: Sequence[int], batch: Iterable[int], bad: Iterable[int]
) -> str:
    """Return where in the data the rows of a batch are: those not finite, without any the batch.

    numbers: number of each row in the source. batch, bad: positions in `numbers`.
    """
    found, whole = (sorted({numbers[i] for i in positions}) for positions in (bad, batch))
    begin = "not finite" if found else "its rows"
    if found == whole and len(found) > 1:
        begin = "all of its rows are not finite"
    found = found or whole
    more = [f"{len(found) - NAMED} more"] * (len(found) > NAMED)
    named = ", ".join([*map(str, found[:NAMED]), *more])
    return f"{begin}: {rows.unit} {named} of {rows.source}"
