"""Memory that runs out in the middle of a phase: half of the rows, and the same numbers."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.rollout.collector import Collector
from lightning_rlhf.rollout.decode_state import GROWTH, roomy_cache
from lightning_rlhf.rollout.score import Critic

from ..modules.conftest import language_model, prompts
from .conftest import Make, on_device
from .device import NAME, Device
from .test_stages import SHORT, SUPERVISED, close, trained

PHASES: dict[str, tuple[type, str, int, dict[str, Any]]] = {
    "annotation": (Collector, "annotate", 100, {"rollout": "hf"}),
    "values": (Critic, "all_values", 100, {"critic": "model"}),
    "scoring": (Collector, "score", 100, {}),
    "update": (PPOModule, "learn", 900, {}),
}
"""Phase -> the method that begins it, the operation of it at which the memory runs out once, and
the configuration that has the phase."""


def failing(device: Device, method: Any, operation: int) -> Any:
    """The method, in whose first call the memory runs out at an operation."""
    calls: list[int] = []

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls:
            device.fails_in = operation
        calls.append(operation)
        return method(self, *args, **kwargs)

    return called


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_of_ppo(make_ppo: Make, device: Device, phase: str) -> None:
    owner, name, operation, changes = PHASES[phase]
    changes = SHORT | changes
    expected, module = trained(make_ppo(**changes), prompts(4)), make_ppo(**changes)
    with (
        patch.object(owner, name, failing(device, getattr(owner, name), operation)),
        pytest.warns(UserWarning, match="out of memory"),
    ):
        found = trained(module, prompts(4), **on_device())
    assert device.fails_in is None
    sizes = {"annotation": module.collector.annotation_rows.rows}
    before = {"annotation": 4}.get(phase, 2)
    assert sizes.get(phase, module.guard.microbatch.rows) == before // 2
    close(found.experience, expected.experience)
    close(found.updates[0], expected.updates[0])


@pytest.mark.parametrize("stage", SUPERVISED)
def test_each_supervised_stage(device: Device, stage: str) -> None:
    """An update, and an evaluation after it."""
    make, data = SUPERVISED[stage]
    expected, module = trained(make(), data()), make()
    with (
        patch.object(type(module), "gradient", failing(device, type(module).gradient, 500)),
        pytest.warns(UserWarning, match="out of memory"),
    ):
        found = trained(module, data(), **on_device())
    assert module.guard.microbatch.rows == 1
    for name in ("loss", "grad_norm"):
        of_both = (getattr(step, name).cpu() for step in (found, expected))
        torch.testing.assert_close(*of_both, rtol=1e-5, atol=1e-6)
    module = make().to(NAME)
    batch = data().to(NAME)
    with torch.no_grad():
        whole = module.validation_step(batch, 0)
        device.fails_in = 300
        with pytest.warns(UserWarning, match="out of memory"):
            halved = module.validation_step(batch, 0)
    close(halved, whole, atol=1e-5)


def test_what_a_failed_pass_held_is_free_again(device: Device) -> None:
    """The second attempt begins with the memory of the first."""
    gc.collect()
    device.room, seen = device.bytes_alive + 6000, []

    def work(rows: int) -> float:
        seen.append(device.bytes_alive)
        x = torch.ones(rows, 1000, device=NAME, requires_grad=True)  # 4,000 bytes a row
        return x.sum().item()

    with pytest.warns(UserWarning, match="rows is 1 from now on"):
        assert MicrobatchSize("rows", 4).fitting(work) == 1000
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_a_cache_takes_memory_as_it_grows(device: Device) -> None:
    """Room for a few more tokens, and not for the longest response; a full one at the end."""
    config = language_model("qwen3").config
    cache, longest = roomy_cache(config, 200), 200
    one = torch.zeros(2, 1, 1, 16, device=NAME)
    row = 2 * 16 * 4 * 2  # rows, head size, bytes, keys and values
    cache.layers[0].update(one, one)
    gc.collect()
    before = device.bytes_alive
    assert cache.layers[0].rooms[0].shape[2] == 1 + GROWTH
    for _ in range(longest - 1):
        keys, _ = cache.layers[0].update(one, one)
    assert keys.shape[2] == longest
    del keys
    gc.collect()
    assert device.bytes_alive - before == row * (longest - 1 - GROWTH)
