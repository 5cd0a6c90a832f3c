"""The device that a run computes on: checked, and printed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from lightning_rlhf.core.errors import ConfigError, first_line
from lightning_rlhf.core.wording import counted
from lightning_rlhf.models.quantization import check_quantization
from lightning_rlhf.parallel.world import world
from lightning_rlhf.rewards.config import ModelConfig
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.stage import Settings, reward_key
from lightning_rlhf.stages.trainer_section import driver_has_gpu

if TYPE_CHECKING:
    from lightning_rlhf.models.roles import Roles

LINEAR_ATTENTION = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Module -> package with kernels of linear attention; the extra `gpu` holds them."""


def check_accelerator(settings: Settings) -> None:
    """Raise ConfigError where the run asks for a device, or for weights on it, that fail here."""
    check_gpu(settings)
    device = device_of(settings)
    check_quantization(settings.model.quantization, "model.quantization", device)
    for name, component in settings.reward.items() if settings.definition.reads_reward else ():
        if isinstance(component, ModelConfig):
            own = torch.device(component.device) if component.device else device
            key = f"{reward_key(settings, name)}.quantization"
            check_quantization(component.quantization, key, own)


def device_of(settings: Settings) -> torch.device:
    """Return the device that this process of the run computes on."""
    if settings.trainer.accelerator == "cpu":
        return torch.device("cpu")
    if (place := world()).size > 1:
        return torch.device("cuda", place.local_rank)
    return torch.device("cuda" if torch.cuda.is_available() else "mps")


def check_gpu(settings: Settings) -> None:
    """Raise ConfigError where the run asks for a GPU and torch cannot compute on one."""
    if settings.trainer.accelerator != "gpu":
        return
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise ConfigError(
            f"trainer.accelerator is 'gpu', but torch finds none ({build_of_torch()}); allowed: "
            "trainer=cpu"
        )
    try:
        # A sum needs a kernel for this GPU, which not every build of torch has.
        torch.ones(2, device="cuda" if torch.cuda.is_available() else "mps").sum().item()
    except RuntimeError as error:
        raise ConfigError(
            "trainer.accelerator is 'gpu', but torch cannot compute on the GPU it finds "
            f"({first_line(error)}); allowed: trainer=cpu"
        ) from error


def check_devices(settings: Settings) -> None:
    """Raise ConfigError where this machine has fewer GPUs than processes of the run."""
    trainer, found = settings.trainer, torch.cuda.device_count()
    usable = found or int(torch.backends.mps.is_available())
    if trainer.accelerator == "gpu" and trainer.devices > max(1, found):
        raise ConfigError(
            f"trainer.devices is {trainer.devices}, but torch finds {counted(found, 'CUDA GPU')} "
            f"on this machine{'' if usable else f' ({build_of_torch()})'}; allowed: "
            f"{f'at most {usable}, or ' if usable else ''}trainer=cpu"
        )


def build_of_torch() -> str:
    """Return which version of torch is installed, and for which CUDA it is built."""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"torch {torch.__version__} is built {built}"


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
        note = f"; {build_of_torch()} and cannot use the GPU"
    size = world().size
    threads = f" of {counted(torch.get_num_threads(), 'thread')} each" if name == "the CPU" else ""
    processes = f" in {size} processes{threads}" if size > 1 else ""
    print_line(f"computing on {name}{processes}, {settings.trainer.precision}{note}")
