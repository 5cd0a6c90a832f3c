"""The steps that all stages share: prepare, fit, hand over."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.callbacks.checkpoint_files import load
from lightning_rlhf.callbacks.checkpoints import Checkpoints, trained
from lightning_rlhf.callbacks.contract import position
from lightning_rlhf.callbacks.early_stop import EarlyStop
from lightning_rlhf.callbacks.loggers import RunIdentity, build_loggers, close_loggers
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.callbacks.stop import Stop, deferred_signals
from lightning_rlhf.callbacks.whole_files import WholeFiles
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.data.lengths import (
    Tokenised,
    tokenise_demonstrations,
    tokenise_preferences,
    tokenise_prompts,
)
from lightning_rlhf.data.readers import Rows
from lightning_rlhf.data.rows import Demonstration, Preference, Prompt
from lightning_rlhf.data.splits import Kind, TrainVal, sample
from lightning_rlhf.models.checkpoint import (
    FROM_CONFIG,
    Final,
    Manifest,
    stands_on_random_weights,
    tokenizer_hash,
    versions,
)
from lightning_rlhf.models.export import write_final
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import SFT, Roles
from lightning_rlhf.models.verdict import Verdict
from lightning_rlhf.report.figures import draw_curves
from lightning_rlhf.stages.check_learned import check_learned
from lightning_rlhf.stages.chosen import choose
from lightning_rlhf.stages.console import say, say_lengths
from lightning_rlhf.stages.final import check_final, goal_of, stop_metric
from lightning_rlhf.stages.folder.ending import Export, read_ending
from lightning_rlhf.stages.folder.extend import check_longer
from lightning_rlhf.stages.folder.folders import (
    CHECKPOINTS,
    FINAL,
    claim,
    find_parents,
    folder_of,
    run_name,
)
from lightning_rlhf.stages.folder.resume import origin, resume_point
from lightning_rlhf.stages.objects import build_trainer, own_callbacks, own_loggers
from lightning_rlhf.stages.stage import Settings

R = TypeVar("R", Demonstration, Preference, Prompt)
AtEnd = Callable[[Sequence[Logger], int], None]
"""Function of the loggers and the last step, called before the loggers close."""


class KernelsLine(Callback):
    """Prints which layers are used, once the weights are on the training device."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(roles := getattr(pl_module, "roles", None), Roles):
            say(str(roles.kernels))


@dataclass(frozen=True)
class Prepared:
    """Inputs that all stages have, checked."""

    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    parents: Mapping[str, Final]
    """Role -> checkpoint that it is loaded from."""
    started: float
    """Time at which the stage started, by time.perf_counter()."""
    callbacks: list[Callback]
    """Callbacks of the user's own."""
    loggers: list[Logger]
    """Loggers of the user's own."""
    export: Export | None = None
    """Folder to write instead of `final/`, from a checkpoint; None for a run."""

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return folder_of(self.settings)

    @property
    def device(self) -> torch.device:
        """Return the device that the run computes on."""
        if self.settings.trainer.accelerator == "cpu":
            return torch.device("cpu")
        return torch.device("cuda" if torch.cuda.is_available() else "mps")


@dataclass(frozen=True, kw_only=True)
class Training(ABC):
    """A stage before its first step, for `Trainer.fit(training.module, training.data)`."""

    ready: Prepared
    roles: Roles
    """Models that the module trains and reads."""
    module: L.LightningModule
    data: StageData[Any]

    @abstractmethod
    def save(self, metrics: Mapping[str, float]) -> Path:
        """Write `final/` with the trained model, and return its path.

        metrics: those that the manifest stores.
        """


def check_accelerator(settings: Settings) -> None:
    """Raise ConfigError where the run asks for a GPU and this machine has none."""
    found = torch.cuda.is_available() or torch.backends.mps.is_available()
    if settings.trainer.accelerator == "gpu" and not found:
        raise ConfigError(
            "trainer.accelerator is 'gpu', but torch finds none; allowed: trainer=cpu"
        )


def say_device(settings: Settings) -> None:
    """Print the device and the precision of the run."""
    name = "the CPU"
    if settings.trainer.accelerator == "gpu":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the GPU"
    say(f"computing on {name}, {settings.trainer.precision}")


def make_ready(settings: Settings, parents: Mapping[str, Final] | None = None) -> Prepared:
    """Load the tokenizer and its chat format; nothing is written yet.

    parents: role -> the checkpoint that the run starts from; None finds those that the stage reads.
    """
    parents = find_parents(settings) if parents is None else parents
    sft = parents.get(SFT)
    tokenizer = load_tokenizer(settings.model, sft.path if sft else None)
    chat = ChatFormat(tokenizer, settings.data.chat_template_kwargs)
    own = own_callbacks(settings), own_loggers(settings)
    return Prepared(settings, tokenizer, chat, parents, time.perf_counter(), *own)


TOKENISE: Mapping[Kind, tuple[Callable[..., Tokenised[Any]], str]] = {
    "demonstrations": (tokenise_demonstrations, "demonstration"),
    "preferences": (tokenise_preferences, "preference pair"),
    "prompts": (tokenise_prompts, "prompt"),
}
"""Kind of data -> (function: rows, ChatFormat, DataConfig -> tokens; noun for a row)."""


def tokenised(ready: Prepared, rows: TrainVal[R]) -> tuple[Rows[R], Tokenised[Any], Tokenised[Any]]:
    """Return the validation rows, the training rows as tokens, and the validation rows as tokens.

    At most data.max_val_rows of the rows that fit are kept for validation. Prints the numbers.
    rows: the data that the stage reads.
    """
    data = ready.settings.data
    tokenise, what = TOKENISE[ready.settings.definition.data]
    with Working(f"tokenising the data ({len(rows.train) + len(rows.val):,} rows)"):
        train = tokenise(rows.train, ready.chat, data)
        val = tokenise(rows.val, ready.chat, data)
    held_out = rows.val
    if data.max_val_rows is not None and len(val.examples) > data.max_val_rows:
        fitting = set(val.numbers)
        fits = [i for i, number in enumerate(rows.val.numbers) if number in fitting]
        held_out = sample(rows.val.only(fits), data.max_val_rows, ready.settings.seed)
        val = replace(tokenise(held_out, ready.chat, data), dropped=val.dropped)
    say_lengths(what, rows.train, train)
    say_lengths(what, held_out, val, to_validate=True)
    return held_out, train, val


def identity(settings: Settings) -> RunIdentity:
    """Return what a dashboard shows of the run."""
    return RunIdentity(
        name=run_name(settings),
        run=settings.run,
        model=settings.model.name,
        job=settings.job,
        stage=settings.stage,
        config=settings.tree,
    )


def fit(
    ready: Prepared,
    module: L.LightningModule,
    data: StageData[Any],
    callbacks: list[Callback],
    at_end: AtEnd | None = None,
) -> dict[str, float]:
    """Train over the whole schedule, validate at the end, draw the curves; return the last metrics.

    Raises TrainingError where the model has diverged, or where no update was made.
    """
    settings, stage = ready.settings, ready.settings.definition
    config: StageConfig = settings.config
    steps = len(data.schedule)
    check_final(settings, steps)
    resume_from = resume_point(settings)
    if resume_from is not None:
        check_longer(settings, resume_from, steps)
        check_state(resume_from, module, data)
    claim(settings, ready.parents)
    val_every = config.validation_interval(steps)
    if val_every != config.val_every:
        say(
            f"validating every {val_every} of the {steps} steps, a tenth: "
            f"{settings.stage}.val_every is {config.val_every}, more than the run has"
        )
    loggers = build_loggers(settings.logger, ready.folder, identity(settings)) + ready.loggers
    stop = Stop()
    saver = Checkpoints(
        ready.folder / CHECKPOINTS,
        replace(config, val_every=val_every),
        origin(settings),
        stop,
        goal_of(settings),
        steps,
    )
    rule = EarlyStop(settings.stage, config.stop, stop_metric(settings))
    options = settings.trainer.options
    is_quiet = "enable_progress_bar" in options and options["enable_progress_bar"] is False
    trainer = build_trainer(
        settings.trainer,
        stop,
        callbacks=[
            *callbacks,
            *ready.callbacks,
            rule,
            saver,
            KernelsLine(),
            *([] if is_quiet else [Progress(stage.name, stage.headlines)]),
        ],
        plugins=[WholeFiles()],
        max_epochs=1,
        val_check_interval=val_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1 if stage.validates_first else 0,
        logger=loggers,
        enable_checkpointing=False,
        default_root_dir=ready.folder,
    )
    if resume_from is not None:
        say(f"going on from {resume_from}")
    exit_code = 1
    try:
        with deferred_signals(stop):
            trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
            check_learned(settings.stage, ready.folder, trainer, module)
            done = trained(trainer)
            # The last checkpoint is written before the evaluation of the same step.
            if saver.measured != done:
                trainer.validate(module, datamodule=data, verbose=False)
        chosen = choose(ready.folder, saver, module, done, rule.reason)
        if at_end is not None:
            at_end(loggers, position(trainer, module))
        exit_code = 0
    finally:
        with Working("closing the loggers"):
            close_loggers(loggers, exit_code)
    title = f"{stage.title}: {run_name(settings)}"
    say(f"curves: {draw_curves(ready.folder, title, stage.unit, stage.panels)}")
    if config.final == "last" and saver.best_step not in (None, saver.evaluated):
        say(
            f"the best evaluation was that of step {saver.best_step}: {saver.best_text()}. final/ "
            "is the last step"
        )
    if chosen is not None:
        return chosen
    return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("eval/")}


def check_state(checkpoint: Path, module: L.LightningModule, data: StageData[Any]) -> None:
    """Raise CheckpointError unless the checkpoint belongs to these parameters and data.

    Called before anything in the run's folder is written or removed; Lightning reads it again.
    """
    found = load(checkpoint)
    try:
        data.load_state_dict(found[type(data).__qualname__])
        module.on_load_checkpoint(found)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error


def hand_over(
    ready: Prepared,
    roles: Roles,
    role: str,
    metrics: Mapping[str, float],
    *,
    head: str | None,
    reward: tuple[float, float] | None = None,
    below: torch.Tensor | None = None,
    more: Path | None = None,
    verdicts: Mapping[str, Verdict] | None = None,
) -> Path:
    """Write `final/` and return its path.

    below, more: as for `write_final`; verdicts: as in `Manifest`.
    """
    settings, export = ready.settings, ready.export
    ending = read_ending(ready.folder) if export is None else export.ending
    sft = ready.parents.get(SFT)
    inherited = sft.manifest if sft is not None and sft.is_adapter else None
    base = settings.model.name_or_path
    manifest = Manifest(
        stage=settings.stage,
        base=str(Path(base).resolve()) if base and Path(base).is_dir() else base or FROM_CONFIG,
        base_seed=inherited.base_seed if inherited else settings.seed,
        parents={name: str(final.path.resolve()) for name, final in ready.parents.items()},
        tokenizer_hash=tokenizer_hash(ready.tokenizer),
        chat_template=str(ready.tokenizer.chat_template),
        reward_mean=reward[0] if reward else None,
        reward_std=reward[1] if reward else None,
        metrics=dict(metrics) | {"time/stage_s": time.perf_counter() - ready.started},
        config=settings.tree,
        versions=versions(),
        verdicts={name: asdict(verdict) for name, verdict in (verdicts or {}).items()},
        chosen={} if ending is None else asdict(ending),
    )
    generation = roles.causal_lm.generation_config
    if generation is not None:  # so that generate() stops where the responses were taught to
        generation.eos_token_id = list(ready.chat.end_token_ids)
        generation.pad_token_id = ready.chat.pad_token_id
    folder = ready.folder / FINAL if export is None else export.folder
    with Working(f"writing {folder}"):
        write_final(folder, roles, role, ready.tokenizer, manifest, head, below, more)
    if stands_on_random_weights(folder):
        say(
            f"{folder} is an adapter on random weights (model.from_config): the stages here make "
            "them again, other programs cannot; sft.finetune=full writes whole weights"
        )
    say(f"{settings.stage} {'finished' if export is None else 'exported'}: {folder}")
    return folder
