"""Every stage on a device that is not the CPU: the same numbers, and no float64."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.records import Record

from ..matrix import matrix
from ..modules.conftest import Outputs, fit, parameters, prompts
from ..modules.test_supervised import STAGES
from .conftest import Make, on_device
from .device import Device, register

SHORT = {
    "rollout_batch_size": 4, "minibatch_size": 4, "microbatch_size": 4, "ppo_epochs": 1,
    "max_response_tokens": 4,
}  # fmt: skip
NO_CRITIC = {"advantage": "grpo", "samples_per_prompt": 2, "whiten_advantages": "none"}
PPO: dict[str, dict[str, Any]] = {
    "head": {"critic": "head", "target_kl": 10.0, "max_ratio": 10.0, "microbatch_size": 2},
    "adapter": {"critic": "adapter", "whiten_advantages": "minibatch"},
    "model": {"critic": "model", "score_normalization": "running"},
    "none": NO_CRITIC,
    "hf": {"rollout": "hf"},
}


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    """The device without float64."""
    register()
    with Device(float64=False) as found:
        yield found


def numbers(record: Any) -> dict[str, Tensor]:
    """Tensors of a record, on the CPU."""
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: x.cpu() for name, x in found.items() if isinstance(x, Tensor)}


def close(found: Any, expected: Any, atol: float = 1e-6) -> None:
    """Every tensor of a record is that of the other, real tokens and masks exactly.

    atol: of log-probabilities and losses; differences and norms of them may have ten times as much.
    """
    found, expected = numbers(found), numbers(expected)
    assert found.keys() == expected.keys()
    for record in (found, expected):
        if "tokens" in record and "mask" in record:
            record["tokens"] = torch.where(record["mask"], record["tokens"], 0)
    for name, x in found.items():
        allowed = atol if name.endswith(("logprobs", "loss")) else 10 * atol
        torch.testing.assert_close(
            x, expected[name], rtol=1e-5, atol=allowed, msg=lambda fault, n=name: f"{n}: {fault}"
        )


def trained(module: L.LightningModule, batch: Record, **where: Any) -> Any:
    """Result of one training step."""
    outputs = Outputs()
    fit(module, [batch], [outputs], **where)
    return outputs.steps[0]


@pytest.mark.parametrize("kind", matrix(PPO, "adapter", "hf"))
def test_ppo(make_ppo: Make, kind: str) -> None:
    changes = SHORT | PPO[kind]
    rows = 4 // changes.get("samples_per_prompt", 1)
    modules = [make_ppo(**changes) for _ in range(2)]
    expected = trained(modules[0], prompts(rows))
    found = trained(modules[1], prompts(rows), **on_device())
    close(found.experience, expected.experience)
    assert len(found.updates) == len(expected.updates) == 1
    close(found.updates[0], expected.updates[0])
    for name, weight in parameters(modules[1]).items():
        # Adam divides by the size of a gradient, of which rounding may be all there is.
        expected_weight = modules[0].get_parameter(name).detach()
        assert (weight.cpu() - expected_weight).abs().max() < 2.1e-2, name


@pytest.mark.parametrize("stage", matrix(STAGES, "sft", "kto"))
def test_supervised_stages(stage: str) -> None:
    make, data, _ = STAGES[stage]
    found, expected = trained(make(), data(), **on_device()), trained(make(), data())
    for name in ("loss", "grad_norm"):
        x, y = getattr(found, name).cpu(), getattr(expected, name)
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
