"""A few training samples every few iterations: on the console, in the loggers and in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from rich import get_console
from rich.table import Table
from rich.text import Text

from lightning_rlhf.callbacks.contract import PPOView, ppo_view
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.core.types import Experience
from lightning_rlhf.io.reading import damaged_line, json_lines
from lightning_rlhf.io.storage import (
    flush,
    flush_entry,
    full_disk_told,
    make_folder,
    written_whole,
)
from lightning_rlhf.io.visible import json_line, visible

if TYPE_CHECKING:
    import wandb

Sample = dict[str, Any]

SAMPLES = "samples"
"""Name of the folder in that of a run."""
HELD_OUT = "held_out.jsonl"
"""Name of the file there of the responses that are sampled after supervised fine-tuning."""
COUNT = 4
"""Responses that are kept of an iteration."""
COLUMNS = ("iteration", "prompt", "response", "score", "kl", "ended")
"""Keys of a sample that are shown in tables; kl in nats, summed over the response."""
DECIMALS = 4
"""Number of decimals of the numbers of a token in a file of samples."""


class Samples(Callback):
    """Shows the first `count` responses of every `every_n_iterations`-th batch.

    The console cuts prompts and responses to `characters`, None shows none there; loggers and
    `<run_dir>/samples/train.jsonl` get them whole.
    """

    def __init__(
        self, *, every_n_iterations: int, count: int, characters: int | None, run_dir: Path
    ) -> None:
        self._every_n_iterations = every_n_iterations
        self._count = count
        self._characters = characters
        self._path = train_samples(run_dir)
        self._wandb_table: wandb.Table | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._path.exists():
            keep_until(self._path, ppo_view(pl_module).iteration)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        iteration = ppo_view(pl_module).iteration
        if not trainer.is_global_zero or iteration % self._every_n_iterations != 0:
            return
        experience = outputs[RESULT].experience.select(slice(0, self._count))
        samples = training_samples(ppo_view(pl_module), experience)
        if self._characters is not None:
            get_console().print(console_table(samples, self._characters))
        self._append(samples)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_metrics({"samples": self._extended_table(samples)}, step=iteration)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", markdown(samples), iteration)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush the samples before the checkpoint that comes after them is written."""
        if trainer.is_global_zero and self._path.exists():
            flush(self._path)
            flush_entry(self._path.parent)

    def _append(self, samples: Sequence[Sample]) -> None:
        make_folder(self._path.parent)
        with full_disk_told(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(json_line(sample) + "\n" for sample in samples)

    def _extended_table(self, samples: Sequence[Sample]) -> wandb.Table:
        """Return one table for the whole run, of which W&B uploads only the rows that are new."""
        import wandb

        if self._wandb_table is None:
            self._wandb_table = wandb.Table(columns=list(COLUMNS), log_mode="INCREMENTAL")
        for sample in samples:
            self._wandb_table.add_data(*(sample[column] for column in COLUMNS))
        return self._wandb_table


def train_samples(run_dir: Path) -> Path:
    """Return where the samples of training are."""
    return run_dir / SAMPLES / "train.jsonl"


def eval_samples(run_dir: Path, iteration: int) -> Path:
    """Return where the samples of the evaluation after an iteration are."""
    return run_dir / SAMPLES / f"eval_{iteration:06d}.jsonl"


def training_samples(module: PPOView, experience: Experience) -> list[Sample]:
    """Return the responses of an experience as text, with their prompts and numbers.

    Beside COLUMNS, a sample has `per_token`: for each token of the response its `text`, its `kl` to
    the reference in nats and its `advantage`, rounded to DECIMALS.
    """
    mask = experience.response_mask
    prompts = module.prompt_rows("train")
    kl = torch.where(mask, experience.kl, 0.0).sum(dim=1)
    numbers = {"kl": experience.kl, "advantage": experience.advantages}
    columns = {
        name: [
            [round(number, DECIMALS) for number in row[real].tolist()]
            for row, real in zip(found, mask, strict=True)
        ]
        for name, found in numbers.items()
    }
    return [
        {
            "iteration": module.iteration,
            "prompt": prompts[index]["prompt"],
            "response": module.chat.decode_response(response),
            "score": score,
            "kl": kl_sum,
            "ended": ended,
            "per_token": {"text": [module.chat.show([token]) for token in response]}
            | {name: rows[row] for name, rows in columns.items()},
        }
        for row, (response, index, score, kl_sum, ended) in enumerate(
            zip(
                real_tokens(experience.responses, mask),
                experience.index.tolist(),
                experience.score.tolist(),
                kl.tolist(),
                experience.ended.tolist(),
                strict=True,
            )
        )
    ]


def console_table(samples: Sequence[Sample], characters: int) -> Table:
    """Return the samples for reading; text longer than `characters` is cut."""
    table = Table(title=f"samples of iteration {samples[0]['iteration']}", title_justify="left")
    table.add_column("prompt", ratio=2)
    table.add_column("response", ratio=3)
    table.add_column("score", justify="right")
    table.add_column("kl, nats", justify="right")
    table.add_column("ended", justify="right")
    for sample in samples:
        table.add_row(
            Text(visible(_cut(sample["prompt"], characters))),
            Text(visible(_cut(sample["response"], characters))),
            f"{sample['score']:z.2f}",
            f"{sample['kl']:z.2f}",
            "yes" if sample["ended"] else "no",
        )
    return table


def markdown(samples: Sequence[Sample]) -> str:
    """Return the samples as a Markdown table, which TensorBoard renders."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_cell(sample[c]) for c in COLUMNS)} |" for sample in samples]
    return "\n".join(lines)


def keep_until(path: Path, iteration: int) -> None:
    """Drop the samples of later iterations, which a resumed run draws again, or one cut off."""
    kept = [f"{line}\n" for line, drawn in read_samples(path) if drawn <= iteration]
    with written_whole(path) as beside:
        beside.write_bytes("".join(kept).encode())


def read_samples(path: Path) -> list[tuple[str, int]]:
    """Return the lines of a file of samples, each with the iteration that drew it.

    Raises CheckpointError, with the line, where the file is damaged.
    """
    found = []
    for number, (line, sample) in enumerate(json_lines(path), start=1):
        iteration = sample.get("iteration")
        if type(iteration) is not int or iteration < 0:
            raise damaged_line(path, number, "it does not say its iteration")
        found.append((line, iteration))
    return found


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
