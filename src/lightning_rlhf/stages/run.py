"""Runs one stage, from checked settings to its `final/` folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import lightning as L
import torch

from lightning_rlhf.core.errors import TrainingError, naming_own_keys, require
from lightning_rlhf.parallel.world import world
from lightning_rlhf.stages.accelerator import check_accelerator, print_device
from lightning_rlhf.stages.advice import advise
from lightning_rlhf.stages.console import quiet_libraries
from lightning_rlhf.stages.preflight.preflight import preflight
from lightning_rlhf.stages.prepare import Training
from lightning_rlhf.stages.processor import denormals_flushed, keep_large_blocks
from lightning_rlhf.stages.stage import Settings

THREADS = torch.get_num_threads()
"""Torch's default number of threads, before any run of this process changed it."""


def run_in_folder(settings: Settings) -> Path:
    """Run the stage in a folder that is already locked; return the path of `final/`."""
    quiet_libraries()
    check_accelerator(settings)
    with computing(settings), advising(settings):
        print_device(settings)
        final = settings.definition.run(settings, settings.config)
        is_folder = isinstance(final, Path) and final.is_dir()
        require(is_folder, f"what the function `run` of stage={settings.stage} returned", final,
                "the path of the folder that it wrote")  # fmt: skip
        return final


def check_in_memory(settings: Settings) -> None:
    """Prepare the stage and check it as a run does before its first update; write nothing."""
    quiet_libraries()
    check_accelerator(settings)
    prepare = settings.definition.prepare
    assert prepare is not None
    with computing(settings), advising(settings):
        print_device(settings)
        training: Training = prepare(settings, settings.config)
        preflight(training.ready, training.module, training.data)


@contextmanager
def advising(settings: Settings) -> Iterator[None]:
    """Add advice to a TrainingError raised inside; errors name the keys of the stage's section."""
    try:
        with naming_own_keys(settings.stage, {f.name for f in fields(settings.definition.config)}):
            yield
    except TrainingError as error:
        advise(error, settings.stage)
        raise


@contextmanager
def computing(settings: Settings) -> Iterator[None]:
    """Set the process up to round and draw random numbers as a run of these settings does."""
    trainer = settings.trainer
    sharing = trainer.devices if world().size > 1 else 1  # processes on this machine
    torch.set_num_threads(trainer.threads or max(1, THREADS // sharing))
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    if trainer.accelerator == "cpu":
        keep_large_blocks()
    L.seed_everything(settings.seed, verbose=False)
    with denormals_flushed():
        yield
