"""A run of one stage: its configuration, folder, models that it starts from, and text format."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.callbacks.loggers import build_loggers, tags_of
from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data import formats, lengths, readers
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Demonstration, Label, Preference, Prompt, Rows
from lightning_rlhf.io import console, storage
from lightning_rlhf.models import build_roles, config, loading
from lightning_rlhf.models.checkpoint import Final, digest
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel import sharding
from lightning_rlhf.parallel.replicas import Replicas, current
from lightning_rlhf.parallel.world import world
from lightning_rlhf.runs import accelerator, folders, objects, stage

R = TypeVar("R", Demonstration, Preference, Prompt, Label)
ALONE = "torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD"
"""Optimizers that compute each weight by itself, and so a part of a sharded one."""
NOUNS = {
    Demonstration: "demonstration",
    Preference: "preference pair",
    Prompt: "prompt",
    Label: "labelled response",
}
"""Class of a row -> noun for it."""


@dataclass(frozen=True)
class Run:
    """A run in one of its processes; built and checked once, then passed as one thing."""

    settings: stage.Settings
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    parents: Mapping[str, Final]
    """Role -> checkpoint that it is loaded from."""
    callbacks: list[Callback]
    """Callbacks of the user's own."""
    loggers: list[Logger]
    """Loggers of the user's own."""
    arguments: Mapping[str, Any]
    """Arguments of lightning.Trainer of the user's own, except callbacks."""
    optimizer: partial[Any]
    """Class of the optimizer, with its arguments."""
    checkpoint: Path | None = None
    """Checkpoint from which training resumes; None for a run that starts."""
    export: folders.Export | None = None
    """Folder to write instead of `final/`, from a checkpoint; None for a run."""
    started: float = field(default_factory=time.perf_counter)
    """Time at which the run started, by time.perf_counter()."""

    @classmethod
    def of(cls, settings: stage.Settings, **given: Any) -> Run:
        """Find the models that the run starts from and load their tokenizer; write nothing.

        given: `checkpoint` or `export` of the run.
        Raises an RLHFError where one is missing, or the user's own objects cannot be used.
        """
        check_trained_weights(settings)
        parents, own = folders.find_parents(settings), objects.own_objects(settings)
        sft = parents[config.SFT].path if config.SFT in parents else None
        tokenizer = loading.load_tokenizer(settings.model, sft)
        chat = ChatFormat(tokenizer, settings.data.chat_template_kwargs)
        return cls(settings, tokenizer, chat, parents, **own, **given)

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return folders.folder_of(self.settings)

    @property
    def final(self) -> Path:
        """Return the path of `final/`, or of the folder to export to."""
        return self.folder / folders.FINAL if self.export is None else self.export.folder

    @property
    def device(self) -> torch.device:
        """Return the device that the run computes on."""
        return accelerator.device_of(self.settings)

    @property
    def replicas(self) -> Replicas:
        """Return the processes of the run."""
        return current(self.device)

    def create(self) -> Path:
        """Make the folder of the run and record what it starts from; return its path.

        Files of a run to be overwritten, or of one that ended before its first step, are deleted.
        Raises ConfigError where it cannot be written.
        """
        settings, folder = self.settings, self.folder
        digests = {role: digest(final.path) for role, final in self.parents.items()}
        texts = {} if settings.resume else {folders.RUN_ID: secrets.token_hex(8)}
        for name, tree in ((folders.PARENTS, digests), (folders.CONFIG, settings.tree)):
            texts[name] = json.dumps(tree, indent=2) + "\n"
        try:
            storage.make_folder(folder)
            storage.delete(folder / folders.DELETED)  # may be left over from a killed process
            is_new = settings.overwrite or (folders.is_unbegun(folder) and not settings.resume)
            if is_new and folders.is_marked(folder):
                folders.clear(folder)
            folders.delete_unfinished(folder)
            (folder / folders.ENDING).unlink(missing_ok=True)
            for name, text in texts.items():
                with storage.written_whole(folder / name) as temporary:
                    temporary.write_text(text)
        except OSError as error:
            raise ConfigError(f"outputs={settings.outputs}: {error.strerror}: {folder}") from error
        return folder

    def open_loggers(self) -> list[Logger]:
        """Return metrics.csv, the configured logger and the user's own, for a claimed folder."""
        settings = self.settings
        about = {
            "name": folders.run_name(settings),
            "group": settings.run if settings.job else None,
            "job_type": settings.stage,
            "tags": tags_of(settings.stage, settings.model.name, settings.job),
            "config": settings.tree,
        }
        return build_loggers(settings.logger, self.folder, about) + self.loggers

    def rows(self, kind: formats.Kind) -> readers.TrainVal[Any]:
        """Return the rows of one kind of data, to train and to validate on."""
        with console.Working("reading the data"):
            return readers.load(kind, self.settings.data, self.settings.seed)

    def tokenised(
        self, rows: readers.TrainVal[R]
    ) -> tuple[Rows[R], lengths.Tokenised[Any], lengths.Tokenised[Any]]:
        """Return the validation rows, the training rows as tokens, and the former as tokens.

        At most data.max_val_rows of the rows that fit are kept for validation. Prints the numbers.
        rows: the data that the stage reads.
        """
        data, what = self.settings.data, NOUNS[type(rows.train.rows[0])]
        with console.Working(f"tokenising the data ({len(rows.train) + len(rows.val):,} rows)"):
            train = lengths.tokenise(rows.train, self.chat, data)
            val = lengths.tokenise(rows.val, self.chat, data)
        held_out = rows.val
        if data.max_val_rows is not None and len(val.examples) > data.max_val_rows:
            fitting = set(val.numbers)
            fits = [i for i, number in enumerate(rows.val.numbers) if number in fitting]
            held_out = readers.draw_rows(rows.val.only(fits), data.max_val_rows, self.settings.seed)
            val = replace(lengths.tokenise(held_out, self.chat, data), dropped=val.dropped)
        lengths.print_lengths(what, rows.train, train)
        lengths.print_lengths(what, held_out, val, to_validate=True)
        return held_out, train, val

    def load_model(self) -> Roles:
        """Return the model that the run starts from, on the CPU: the SFT model, or the base.

        All weights are trainable for full fine-tuning, `finetune=full` of the stage's section; a
        policy then has a frozen model beside it as the reference.
        Raises CheckpointError where it does not fit, ConfigError where its vocabulary does not.
        """
        settings, sft = self.settings, self.parents.get(config.SFT)
        is_full = getattr(settings.config, "finetune", None) == "full"
        load = partial(build_roles.start_from, settings.model, sft, seed=settings.seed)
        with console.Working("loading the model"):
            roles = self.placed(partial(load, trainable=is_full))
            if is_full and isinstance(settings.config, PPOConfig | DPOConfig):
                roles.frozen = self.placed(partial(load, trainable=False))
        build_roles.check_vocabulary(roles, self.tokenizer)
        return roles

    def placed(self, load: Callable[[], Roles]) -> Roles:
        """Return the frozen model that `load` returns; with trainer.strategy=fsdp it is sharded.

        The processes of a machine load it one after another, so that it never holds several.
        """
        replicas, found = self.replicas, list[Roles]()
        if replicas.size == 1 or not self.settings.shards:
            return load()
        processes = sharding.mesh(self.device)

        def load_in_turn(number: int) -> None:
            if world().local_rank == number:
                found.append(load())
                found[0].shard(processes)
                found[0].to(self.device)  # with adapters, which are not sharded

        for number in range(self.settings.trainer.devices):
            replicas.gather(partial(load_in_turn, number))
        return found[0]


def check_trained_weights(settings: stage.Settings) -> None:
    """Raise ConfigError where the stage shards weights, or trains whole ones, that cannot be."""
    kind, kernels = settings.model.quantization, settings.model.kernels
    if settings.shards:
        why = "as trainer.strategy=fsdp shards the weights, which the library's layers read"
        require(kind == "none", "model.quantization", kind, f"none, {why}")
        require(kernels != "fast", "model.kernels", kernels, f"auto, plain, {why}")
        if getattr(settings.config, "finetune", "lora") == "full":
            given = settings.optimizer.get("_target_", ALONE[0])
            why = "as trainer.strategy=fsdp gives an optimizer a part of each weight"
            require(given in ALONE, "optimizer._target_", given, f"{', '.join(ALONE)}, {why}")
    for name, whole, others in (("finetune", "full", "lora"), ("critic", "model", "head, adapter")):
        if kind != "none" and getattr(settings.config, name, None) == whole:
            key = f"{settings.stage}.{name}"
            raise ConfigError(
                f"{key} is '{whole}', which trains whole weights, but model.quantization is "
                f"'{kind}'; allowed: {key}={others}, or model.quantization=none"
            )
