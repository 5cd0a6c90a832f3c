"""Evaluation of PPO on held-out prompts, and what is kept of training in files: samples, recorded
iterations, and the batch that ends a run."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pyarrow as pa
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from rich import get_console
from rich.table import Column, Table
from rich.text import Text

from lightning_rlhf.callbacks import files, progress
from lightning_rlhf.callbacks.metrics import perplexity, publish
from lightning_rlhf.core import errors, masking, records, results
from lightning_rlhf.core.metrics import EVAL_PART, HELD_OUT, JUDGE
from lightning_rlhf.data import batches, lengths, rollouts
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Rows
from lightning_rlhf.io import storage, user_code
from lightning_rlhf.io.console import json_line, print_line, visible, visible_line
from lightning_rlhf.rewards import format_check, weighted

COLUMNS = ("iteration", "prompt", "response", "score", "kl", "ended")
"""Keys of a sample that are shown in tables; kl in nats, summed over the response."""
DECIMALS = 4
"""Number of decimals of the numbers of a token in a file of samples."""
BY_ROW = ("old_logprobs", "ref_logprobs", "old_values", "component_scores")
"""Fields of Experience in which a row does not depend on the others."""
NAMED = 20
"""Number of rows of the data that the message at the end of a run names."""


@dataclass(eq=False)
class Samples(Callback):
    """Shows the first `count` responses of every `every`-th batch.

    The console cuts prompts and responses to `characters`, None shows none there; loggers and
    `<run_dir>/samples/train.jsonl` get them whole.
    """

    run_dir: Path
    every: int
    count: int = 4
    characters: int | None = None
    _wandb_table: Any = field(default=None, init=False)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        path, last = self.run_dir / files.TRAIN_SAMPLES, pl_module.iteration
        if trainer.is_global_zero and path.exists():
            # A resumed run draws the samples of later iterations again; one cut off is none.
            lines = storage.json_lines(path)
            kept = [f"{line}\n" for line, sample in lines if sample["iteration"] <= last]
            with storage.written_whole(path) as temporary:
                temporary.write_bytes("".join(kept).encode())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        iteration = pl_module.iteration
        if not trainer.is_global_zero or iteration % self.every != 0:
            return
        experience = outputs[results.RESULT].experience.select(slice(0, self.count))
        samples = training_samples(pl_module, experience)
        if self.characters is not None:
            get_console().print(console_table(samples, self.characters))
        path = self.run_dir / files.TRAIN_SAMPLES
        storage.make_folder(path.parent)
        with storage.storage_errors(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json_line(sample) + "\n" for sample in samples)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                # One table for the whole run, of which W&B uploads only the rows that are new.
                if self._wandb_table is None:
                    self._wandb_table = wandb.Table(columns=list(COLUMNS), log_mode="INCREMENTAL")
                for sample in samples:
                    self._wandb_table.add_data(*(sample[column] for column in COLUMNS))
                logger.log_metrics({"samples": self._wandb_table}, step=iteration)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", markdown(samples), iteration)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Flush the samples before the checkpoint that comes after them is written."""
        path = self.run_dir / files.TRAIN_SAMPLES
        if trainer.is_global_zero and path.exists():
            storage.flush(path)
            storage.flush_entry(path.parent)


def training_samples(module: Any, experience: records.Experience) -> list[files.Sample]:
    """Return the responses of an experience as text, with their prompts and numbers.

    Beside COLUMNS, a sample has `per_token`: for each token of the response its `text`, its `kl` to
    the reference in nats and its `advantage`, rounded to DECIMALS; and `verdicts` as an evaluation.
    """
    prompts, samples = module.collector.prompts["train"], []
    verdicts = module.collector.reward.explain(module.collector.decode(experience, "train"))
    kl_sums = torch.where(experience.response_mask, experience.kl, 0.0).sum(dim=1).tolist()
    for row, index in enumerate(experience.index.tolist()):
        real = experience.response_mask[row]
        response = experience.responses[row][real].tolist()
        per_token = {"text": [module.chat.show([token]) for token in response]}
        for name, numbers in (("kl", experience.kl), ("advantage", experience.advantages)):
            per_token[name] = [round(x, DECIMALS) for x in numbers[row][real].tolist()]
        sample = {
            "iteration": module.iteration,
            "prompt": prompts[index]["prompt"],
            "response": module.chat.decode_response(response),
            "score": experience.score[row].item(),
            "kl": kl_sums[row],
            "ended": experience.ended[row].item(),
            "per_token": per_token,
        }
        sample |= {"verdicts": verdicts[row]} if verdicts[row] else {}
        samples.append(sample)
    return samples


def console_table(samples: Sequence[files.Sample], characters: int) -> Table:
    """Return the samples for reading; text longer than `characters` is cut."""
    numbers = [Column(name, justify="right") for name in ("score", "kl, nats", "ended")]
    table = Table(Column("prompt", ratio=2), Column("response", ratio=3), *numbers)
    table.title, table.title_justify = f"samples of iteration {samples[0]['iteration']}", "left"
    for sample in samples:
        whole = (sample["prompt"], sample["response"])
        texts = [x if len(x) <= characters else x[: characters - 1] + "…" for x in whole]
        cells = [f"{sample[key]:z.2f}" for key in ("score", "kl")]
        cells.append("yes" if sample["ended"] else "no")
        table.add_row(*(Text(visible(text)) for text in texts), *cells)
    return table


def markdown(samples: Sequence[files.Sample]) -> str:
    """Return the samples as a Markdown table, which TensorBoard renders."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for sample in samples:
        cells = (str(sample[column]).replace("|", "\\|") for column in COLUMNS)
        lines.append(f"| {' | '.join(cells)} |".replace("\n", " "))
    return "\n".join(lines)


Judge = Callable[[Mapping[str, Any], str, bool], Mapping[str, float | None]]
"""(prompt row, response, ended) -> parts of a verdict; None where a part does not apply."""


@dataclass(eq=False)
class Evaluation(progress.Stateful):
    """Judges each validation response, logs the means and writes the samples.

    Samples go to `<run_dir>/samples/eval_<iteration>.jsonl`. `first` and `last` hold the metrics
    of the first and the latest evaluation and survive a resume.
    """

    kept: ClassVar[tuple[str, ...]] = ("first", "last")
    judge: Judge | None
    run_dir: Path
    first: dict[str, float] | None = field(default=None, init=False)
    last: dict[str, float] | None = field(default=None, init=False)
    _sft: Sequence[files.Sample] | None = field(default=None, init=False)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Delete the samples of later policies, which a resumed run evaluates again."""
        for path in (self.run_dir / files.SAMPLES).glob("eval_*.jsonl"):
            found = re.fullmatch("eval_([0-9]+)", path.stem)
            if found is not None and int(found[1]) > pl_module.iteration:
                path.unlink()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.logs_evaluation = False
        self._samples: list[files.Sample] = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self._samples += judged_samples(outputs, pl_module.collector.reward, self.judge)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not progress.is_evaluation(trainer):
            return
        samples, iteration = self._samples, pl_module.iteration
        metrics = evaluation_metrics(samples)
        # The policy of iteration 0 is the SFT model.
        if iteration == 0:
            self._sft = samples
        elif self._sft is None and (path := files.eval_samples(self.run_dir, 0)).is_file():
            self._sft = [found for _, found in storage.json_lines(path)]  # of an earlier process
        indices = [sample["index"] for sample in samples]
        if self._sft is not None and [sample["index"] for sample in self._sft] == indices:
            ours, theirs = ([s["score"] for s in some] for some in (samples, self._sft))
            metrics["eval/win_rate"] = format_check.accuracy(ours, theirs)
        publish(trainer, pl_module, metrics)
        self.first = self.first or metrics
        self.last = metrics
        files.write_samples(files.eval_samples(self.run_dir, iteration), samples)


def judged_samples(
    result: results.EvaluationResult, reward: weighted.Reward, judge: Judge | None
) -> list[files.Sample]:
    """Return one sample a response.

    Keys: index, prompt, response, ended, tokens, score, parts (what each component of the reward
    says, by name, before weights), kl (sum_t logprob_t - ref_logprob_t over real tokens, nats),
    ref_logprob (sum_t ref_logprob_t, nats), judge (its parts; empty without a judge), and where
    there are any: verdicts (what components say in words, by name) and token_scores (numbers of
    single tokens that components gave, by name).
    """
    rollout, decoded, scores = result.rollout, result.decoded, result.scores
    mask, ref_logprobs = rollout.response_mask, scores.ref_logprobs
    columns = {
        "ended": rollout.ended,
        "tokens": mask.sum(dim=1),
        "score": scores.score.float(),
        "parts": scores.component_scores,
        "kl": torch.where(mask, rollout.logprobs - ref_logprobs, 0.0).float().sum(dim=1),
        "ref_logprob": ref_logprobs.float().sum(dim=1),
    }
    numbers = {name: column.tolist() for name, column in columns.items()}
    index, samples, verdicts = rollout.index.tolist(), [], reward.explain(decoded)
    components = [term.name for term in reward.terms]
    for place, (row, response) in enumerate(zip(decoded.rows, decoded.responses, strict=True)):
        sample = {"index": index[place], "prompt": row["prompt"], "response": response}
        sample |= {name: cells[place] for name, cells in numbers.items()}
        sample["parts"] = dict(zip(components, sample["parts"], strict=True))
        sample["judge"] = {} if judge is None else dict(judge(row, response, sample["ended"]))
        sample |= {"verdicts": verdicts[place]} if verdicts[place] else {}
        if scores.token_scores is not None and scores.token_scores[place].any():
            rows = scores.token_scores[place, :, : sample["tokens"]].tolist()
            found = {name: row for name, row in zip(components, rows, strict=True) if any(row)}
            sample["token_scores"] = found
        samples.append(sample)
    return samples


def distinct(texts: Iterable[str], n: int) -> float:
    """Return distinct-n: how varied the texts are, 0 to 1; repetition lowers it.

        distinct_n = |{different n-grams}| / |n-grams|, over all texts together

    Source: Li et al. 2016, https://arxiv.org/abs/1510.03055, section 5.1
    Departs: an n-gram is of words, which white space separates. 0 where no text has n words.
    """
    split = (text.split() for text in texts)
    grams = [tuple(words[i : i + n]) for words in split for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def evaluation_metrics(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over samples, and numbers of all samples together.

    A part of the judge's verdict is a mean over the samples that have it.
    """
    tokens = sum(s["tokens"] for s in samples)
    metrics = {
        HELD_OUT: fmean(s["score"] for s in samples),
        "eval/kl": fmean(s["kl"] for s in samples),
        "eval/response_tokens": fmean(s["tokens"] for s in samples),
        "eval/ended": fmean(s["ended"] for s in samples),
        "eval/response_perplexity": perplexity(-sum(s["ref_logprob"] for s in samples) / tokens),
        "eval/distinct_1": distinct((s["response"] for s in samples), 1),
        "eval/distinct_2": distinct((s["response"] for s in samples), 2),
    }
    names = list(samples[0]["parts"])
    if len(names) > 1:
        metrics |= {EVAL_PART + name: fmean(s["parts"][name] for s in samples) for name in names}
    for part in sorted({part for s in samples for part in s["judge"]}):
        values = [x for s in samples if (x := s["judge"].get(part)) is not None]
        metrics |= {JUDGE + part: fmean(values)} if values else {}
    return metrics


def load_judge(source: str) -> Judge:
    """Return the function `name` of the file in `path.py:name`; its faults are errors that name it.

    Raises ConfigError where `source` does not lead to a function.
    """
    judge = user_code.load_function(source, "data.judge")

    def ask(row: Mapping[str, Any], response: str, ended: bool) -> Mapping[str, float | None]:
        try:
            verdict = judge(row, response, ended)
            parts = {visible_line(str(part)): x for part, x in verdict.items()}
            return {part: x if x is None else user_code.user_number(x) for part, x in parts.items()}
        except user_code.FAULTS as error:
            raise errors.ConfigError(
                f"data.judge is {source!r}, which fails on the response {response!r}: {error!r}; "
                "allowed: a dictionary of numbers or None"
            ) from error

    return ask


@dataclass(eq=False)
class Recorder(Callback):
    """Writes iterations of PPO to `<run_dir>/rollouts/`: each, or only one that ends the run.

    An iteration ends the run where its updates are not finite. A resumed run deletes the files
    after its checkpoint, since it goes through those iterations again.
    """

    run_dir: Path
    rows: Rows[Any]
    """Source and numbers of the prompts; their texts are not read."""
    every: bool
    """True to write each iteration."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for iteration in rollouts.recorded_iterations(self.run_dir):
            if iteration > pl_module.iteration:
                rollouts.file_of(self.run_dir, iteration).unlink()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        if self.every:
            path = rollouts.file_of(self.run_dir, pl_module.iteration)
            rollouts.write_table(path, self.columns(pl_module))

    def columns(self, module: Any) -> dict[str, Any]:
        """Return the columns of the module's current or latest iteration."""
        experience, rows = module.experience, module.collector.prompts["train"]
        responses = masking.real_tokens(experience.responses, experience.response_mask)
        return rollouts.recorded_columns(
            experience,
            [rows[index]["prompt"] for index in experience.index.tolist()],
            list(map(module.chat.decode_response, responses)),
            components=[term.name for term in module.collector.reward.terms],
            show=module.chat.show,
            has_critic=module.critic is not None,
        )

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, errors.NotFiniteError):
            return
        experience, iteration = pl_module.experience, pl_module.iteration + 1
        # Advantages are whitened, so that one row that is not finite would spoil all of them.
        numbers = (experience.score[:, None], *(getattr(experience, name) for name in BY_ROW))
        bad = experience.index[~torch.cat(numbers, dim=1).isfinite().all(dim=1)].tolist()
        path = rollouts.file_of(self.run_dir, iteration)
        command = f"lightning-rlhf replay {self.run_dir} --iteration {iteration}"
        where = f"Iteration {iteration} is in {path}, and `{command}` shows it"
        batch = rows_text(self.rows, self.rows.numbers, experience.index.tolist(), bad)
        keep_batch(exception, path, self.columns(pl_module), f"{where}; {batch}")


@dataclass(eq=False)
class KeepLastBatch(Callback):
    """Writes `<run_dir>/last_batch.parquet` when updates that are not finite end SFT, RM or DPO.

    One row per example of the last batch: the number of its row in the data, texts and token ids,
    and its loss by itself. A resumed run deletes the file, since it trains on that batch again.
    """

    run_dir: Path
    rows: Rows[Any]
    """Source of the training data, without their texts; then the data as tokens and as batches."""
    tokenised: lengths.Tokenised[Any]
    data: batches.StageData
    chat: ChatFormat

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        (self.run_dir / rollouts.LAST_BATCH).unlink(missing_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, errors.NotFiniteError):
            return
        step, numbers = pl_module.iteration, self.tokenised.numbers
        positions = self.data.schedule.batch(step)
        examples = [self.data.train[i] for i in positions]
        columns: dict[str, Any] = {"number": [numbers[i] for i in positions]}
        for name in (one.name for one in fields(examples[0])):
            cells = [getattr(example, name) for example in examples]
            if isinstance(cells[0], float | bool):  # the margin of a pair, the label of a response
                columns[name] = pa.array(cells)
                continue
            if name != "learned":  # positions in the prompt
                columns[name] = pa.array(map(self.chat.show, cells), pa.string())
            columns[f"{name}_tokens"] = pa.array(map(list, cells), pa.list_(pa.int64()))
        bad: list[int] = []
        try:
            with trainer.precision_plugin.forward_context():
                batch = self.data.collate(examples).to(pl_module.device)
                losses: torch.Tensor = pl_module.row_losses(batch).float().cpu()
            columns["loss"] = losses.numpy()
            bad = [i for i, x in zip(positions, losses.isfinite(), strict=True) if not x]
        except Exception as failure:  # the batch itself is still written
            print_line(f"the batch that ended the run has no loss of each row: {failure}")
        path = self.run_dir / rollouts.LAST_BATCH
        found = rows_text(self.rows, numbers, positions, bad)
        keep_batch(exception, path, columns, f"The batch of step {step + 1} is in {path}; {found}")


def keep_batch(
    error: errors.NotFiniteError, path: Path, columns: Mapping[str, Any], message: str
) -> None:
    """Write the batch that ended a run and add its place to the error; print why it is not kept."""
    try:
        rollouts.write_table(path, columns)
        error.batch = message
    except errors.StorageError as failure:  # must not replace the exception that ended the run
        print_line(f"the batch that ended the run is not kept: {failure}")


def rows_text(
    rows: Rows[Any], numbers: Sequence[int], batch: Iterable[int], bad: Iterable[int]
) -> str:
    """Return where in the data the rows of a batch are that are not finite, or all without any.

    numbers: number of each row in the source. batch, bad: positions in `numbers`.
    """
    bad = set(bad)
    found = sorted({numbers[i] for i in bad or batch})
    more = f", {len(found) - NAMED} more" * (len(found) > NAMED)
    named = ", ".join(map(str, found[:NAMED])) + more
    return f"{'not finite' if bad else 'its rows'}: {rows.unit} {named} of {rows.source}"
