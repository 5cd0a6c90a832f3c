"""The stand-in itself: what it refuses and what it counts."""

from __future__ import annotations

import gc

import pytest
import torch

from .device import NAME, Device, register

pytestmark = pytest.mark.usefixtures("device")


def test_operands_of_mixed_devices_are_refused(device: Device) -> None:
    here = torch.ones(3, device=NAME)
    with pytest.raises(RuntimeError, match="mixed devices"):
        here + torch.ones(3)
    with pytest.raises(RuntimeError, match="mixed devices"):
        here[torch.tensor([0, 1])]
    assert (here + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number may come from the CPU


def test_what_the_processor_waits_for_is_counted(device: Device) -> None:
    x = torch.arange(4.0).to(NAME)
    with device.counted() as found:
        x.sum().item()
        bool(x[0] > 1)
        x[x > 1]
        x.nonzero()
        x.cpu()
        torch.tensor([1.0, 2.0], device=NAME)
    assert found.synchronisations == {
        "item": 2, "boolean index": 1, "nonzero": 1, "copy to the host": 1, "copy from the host": 1,
    }  # fmt: skip
    with device.counted() as found:
        x[x > 1] = 0.0  # becomes masked_fill
        x.new_zeros(3).index_select(0, torch.arange(2, device=NAME))
        torch.where(x > 0, x, 0).sum()
        torch.arange(3).to(NAME, non_blocking=True)
    assert found.synchronisations.total() == 0
    assert found.operations[torch.ops.aten.index_select.default] == 1


def test_a_gradient_is_computed_on_the_device(device: Device) -> None:
    layer = torch.nn.Linear(3, 2)
    weight = layer.weight
    layer.to(NAME)
    assert layer.weight is weight
    x = torch.ones(5, 3, device=NAME)
    for _ in range(2):
        layer(x).sum().backward()
    assert weight.grad.cpu().tolist() == [[10.0] * 3] * 2
    with torch.autocast(NAME, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32


def test_bytes_count_as_long_as_a_tensor_holds_them(device: Device) -> None:
    gc.collect()
    before = device.bytes_alive
    x = torch.zeros(100, device=NAME)
    view = x[:10]
    assert device.bytes_alive - before == 400  # a view has no memory of its own
    del x
    assert device.bytes_alive - before == 400
    del view
    assert device.bytes_alive == before
    assert device.peak >= before + 400


def test_float64_is_refused_on_demand() -> None:
    register()
    with Device(float64=False):
        x = torch.ones(2, device=NAME)
        with pytest.raises(TypeError, match="float64"):
            x.double()
    with Device():
        assert torch.ones(2, device=NAME).double().dtype == torch.float64


def test_the_memory_runs_out_on_demand() -> None:
    register()
    with Device(room=1000) as device:
        x = torch.zeros(200, device=NAME)
        with pytest.raises(torch.OutOfMemoryError):
            x + x
        assert x.sum().item() == 0
        device.room, device.fails_in = None, 2
        y = x + 1
        with pytest.raises(torch.OutOfMemoryError, match="as demanded"):
            y + 1
        assert (y + 1).sum().item() == 400


def test_an_error_of_a_backward_pass_is_raised_after_it(device: Device) -> None:
    layer = torch.nn.Linear(3, 2).to(NAME)
    loss = layer(torch.ones(5, 3, device=NAME)).exp().sum()
    device.fails_in = 3
    loss.backward()
    with pytest.raises(torch.OutOfMemoryError, match="as demanded"):
        loss.detach()
    assert loss.detach().ndim == 0
