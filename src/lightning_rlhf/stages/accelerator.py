"""The device that a run computes on: checked, and printed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from lightning_rlhf.core.errors import ConfigError, first_line
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.stage import Settings
from lightning_rlhf.stages.trainer_section import driver_has_gpu

if TYPE_CHECKING:
    from lightning_rlhf.models.roles import Roles

LINEAR_ATTENTION = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Module -> package with kernels of linear attention; the extra `gpu` holds them."""


def check_accelerator(settings: Settings) -> None:
    """Raise ConfigError where the run asks for a GPU and torch cannot compute on one."""
    if settings.trainer.accelerator != "gpu":
        return
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise ConfigError(
            "trainer.accelerator is 'gpu', but torch finds none; allowed: trainer=cpu"
        )
    try:
        # A sum needs a kernel for this GPU, which not every build of torch has.
        torch.ones(2, device="cuda" if torch.cuda.is_available() else "mps").sum().item()
    except RuntimeError as error:
        raise ConfigError(
            "trainer.accelerator is 'gpu', but torch cannot compute on the GPU it finds "
            f"({first_line(error)}); allowed: trainer=cpu"
        ) from error


def linear_attention_line(roles: Roles) -> str | None:
    """Return what a model with linear attention lacks to be fast on CUDA; None where nothing."""
    kinds = getattr(roles.causal_lm.config, "layer_types", None) or ()
    missing = [name for module, name in LINEAR_ATTENTION.items() if find_spec(module) is None]
    if roles.device.type != "cuda" or "linear_attention" not in kinds or not missing:
        return None
    return (
        f"{roles.causal_lm.config.model_type} is slow: its linear attention is computed by a loop "
        f"of transformers without {' and '.join(missing)}; pip install 'lightning-rlhf[gpu]'"
    )


def print_device(settings: Settings) -> None:
    """Print the device and the precision of the run, and why a GPU is not used if there is one."""
    name, note = "the CPU", ""
    if settings.trainer.accelerator == "gpu":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the GPU"
    elif torch.version.cuda is None and driver_has_gpu():
        note = f"; torch {torch.__version__} is built without CUDA and cannot use the GPU"
    print_line(f"computing on {name}, {settings.trainer.precision}{note}")
