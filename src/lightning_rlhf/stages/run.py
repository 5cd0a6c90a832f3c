"""One stage, from checked settings to its `final/` folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch

from lightning_rlhf.core.errors import TrainingError
from lightning_rlhf.stages.advice import advise
from lightning_rlhf.stages.console import quiet_libraries
from lightning_rlhf.stages.launch import check_accelerator, say_device
from lightning_rlhf.stages.processor import denormals_flushed, keep_large_blocks
from lightning_rlhf.stages.stage import Settings

THREADS = torch.get_num_threads()
"""Torch's own choice, before any run of this process changed it."""


def run_in_folder(settings: Settings) -> Path:
    """Run the stage, whose folder is free for it; return the path of its `final/` folder."""
    quiet_libraries()
    check_accelerator(settings)
    say_device(settings)
    with computing(settings), advising():
        return settings.definition.run(settings, settings.config)


@contextmanager
def advising() -> Iterator[None]:
    """Inside, an error that ends a training says what to do about it."""
    try:
        yield
    except TrainingError as error:
        advise(error)
        raise


@contextmanager
def computing(settings: Settings) -> Iterator[None]:
    """Inside, the process rounds and draws as a run of these settings does."""
    torch.set_num_threads(settings.trainer.threads or THREADS)
    if settings.trainer.accelerator == "cpu":
        keep_large_blocks()
    L.seed_everything(settings.seed, verbose=False)
    with denormals_flushed():
        yield
