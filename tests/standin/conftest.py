"""Stages on the stand-in device: the Trainer's arguments for it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from ..modules.conftest import make_ppo as make_ppo
from ..modules.conftest import reward_adapters as reward_adapters
from .device import NAME, Device, register


class StandInAccelerator(CPUAccelerator):
    """Lightning's view of the device, whose checks are those of the CPU but for its type."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == NAME


def on_device() -> dict[str, Any]:
    """Return arguments of lightning.Trainer for the stand-in."""
    return {"strategy": SingleDeviceStrategy(torch.device(NAME, 0), StandInAccelerator())}


@pytest.fixture
def device() -> Iterator[Device]:
    """The stand-in device, present during the test."""
    register()
    with Device() as found:
        yield found


Make = Callable[..., Any]
