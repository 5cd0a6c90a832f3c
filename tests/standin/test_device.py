"""The stand-in itself: what it refuses and what it counts."""

import pytest
import torch

from .device import NAME, Device


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
    with pytest.raises(RuntimeError, match="mixed devices"):
        x[torch.tensor([0, 1])]
