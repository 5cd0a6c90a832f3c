"""How often the processor waits for the device, and how much it launches."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_rlhf.core.records import row_lengths
from lightning_rlhf.modules.ppo import TRAINING, PPOModule
from lightning_rlhf.rollout.native import INTERVAL

from ..matrix import matrix
from ..modules.conftest import prompts, within_fit
from ..modules.experiences import learn, on_policy
from ..modules.test_supervised import STAGES
from .conftest import Make, on_device
from .device import NAME, Counts, Device

NEVER = (-1,)
"""End tokens that are never sampled."""
BY_TOKEN = {
    ("qwen3", "plain", False): 450, ("qwen3", "fast", False): 234, ("qwen3_5", "fast", False): 288,
    ("qwen3", "plain", True): 546, ("qwen3", "fast", True): 286,
}  # fmt: skip
"""Architecture, kernels, bf16 autocast -> operations that a decoded token of 2 layers launches; the
weights are in fp32."""
BY_MICROBATCH = {("qwen3", "plain"): 1172, ("qwen3", "fast"): 920, ("qwen3_5", "plain"): 1494}
"""The same of a micro-batch of the update: forward, loss and gradient."""
IN_TRANSFORMERS = {"llama": {"item": 1}}
"""Waits of a forward pass inside of transformers, for trunks that take one mask for all layers."""


def ppo(make_ppo: Make, architecture: str, kernels: str, **changes: Any) -> PPOModule:
    module: PPOModule = make_ppo(architecture, **changes)
    module.roles._kernel_choice = kernels
    return module


def sampled(module: PPOModule, device: Device, longest: int) -> Counts:
    sampler = module.collector.sampler
    sampler.params = replace(sampler.params, max_response_tokens=longest, end_token_ids=NEVER)
    batch = prompts(4).to(NAME)
    with device.counted() as found:
        sampler.sample(batch, 1, module.generator(TRAINING, 0), torch.arange(len(batch)))
    return found


@pytest.mark.parametrize(
    ("architecture", "kernels", "autocast"),
    matrix(BY_TOKEN, ("qwen3_5", "fast", False), ("qwen3", "fast", True)),
)
def test_a_decoded_token(
    make_ppo: Make, device: Device, architecture: str, kernels: str, *, autocast: bool
) -> None:
    module = ppo(make_ppo, architecture, kernels).to(NAME)
    with torch.autocast(NAME, torch.bfloat16, enabled=autocast):
        sampled(module, device, 2)  # the fast step is checked once
        few, many = (sampled(module, device, longest) for longest in (2, 2 + INTERVAL))
    assert many.synchronisations - few.synchronisations == {"item": 1}
    operations = many.operations.total() - few.operations.total()
    assert operations / INTERVAL <= BY_TOKEN[architecture, kernels, autocast]


@pytest.mark.parametrize(
    ("architecture", "kernels"),
    matrix([*BY_MICROBATCH, ("llama", "plain")], ("qwen3", "fast"), ("qwen3_5", "plain")),
)
def test_a_micro_batch(make_ppo: Make, device: Device, architecture: str, kernels: str) -> None:
    """One more of them: nothing is read, but for what a trunk of transformers reads itself."""
    module = ppo(make_ppo, architecture, kernels, rollout_batch_size=2, minibatch_size=2)

    def work() -> list[Counts]:
        batch, found = on_policy(module, 2), []
        batch = replace(batch, counts=row_lengths(batch).cpu())
        for rows in (2, 2, 1):
            module.microbatch.rows = rows
            with device.counted() as counts:
                module.update(batch)
            found.append(counts)
        return found[1:]

    one, two = within_fit(module, work, **on_device())
    of_trunk = Counter(IN_TRANSFORMERS.get(architecture, {}))
    assert one.synchronisations - of_trunk == {"copy to the host": 1}
    assert two.synchronisations - one.synchronisations == of_trunk
    operations = two.operations.total() - one.operations.total()
    assert operations <= BY_MICROBATCH.get((architecture, kernels), operations)


@pytest.mark.parametrize("critic", matrix(["head", "model"], "model"))
def test_the_updates_of_an_iteration(make_ppo: Make, device: Device, critic: str) -> None:
    """The lengths are read once; then, once an update, loss, gradient and what limits compare."""
    sizes = {"rollout_batch_size": 4, "minibatch_size": 2, "ppo_epochs": 1}
    module = make_ppo(critic=critic, target_kl=1e9, max_ratio=1e9, **sizes)

    def work() -> Counts:
        experience = on_policy(module, 4)
        with device.counted() as found:
            assert len(learn(module, experience, module.generator(TRAINING, 1))) == 2
        return found

    found = within_fit(module, work, **on_device())
    assert found.synchronisations == {"copy to the host": 1 + 2}


@pytest.mark.parametrize("stage", matrix(STAGES, "dpo"))
def test_the_gradient_of_a_supervised_batch(device: Device, stage: str) -> None:
    """Nothing is read: the masks stay on the CPU."""
    make, data, _ = STAGES[stage]
    module = make()

    def work() -> list[Counts]:
        batch, found = data().to(NAME), []
        for rows in (6, 6, 2):
            module.microbatch.rows = rows
            with device.counted() as counts:
                module.sum_and_clip(module.accumulate(batch, rows)[0][None])
            found.append(counts)
        return found[1:]

    for found in within_fit(module, work, **on_device()):
        assert not found.synchronisations
