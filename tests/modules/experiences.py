"""What PPO learns from on the tiny models, and what one update of it does."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rlhf.core.records import Experience, UpdateStats
from lightning_rlhf.models.config import POLICY, VALUE
from lightning_rlhf.modules.ppo import TRAINING, PPOModule

from .conftest import grads, prompts, within_fit

Make = Callable[..., PPOModule]
HEAD = f"heads.{VALUE}."
ADAPTER = f".{POLICY}."


def on_policy(module: PPOModule, rows: int = 8) -> Experience:
    """What the first iteration learns from."""
    batch = prompts(rows).to(module.device)
    rollout = module.collector.roll_out(batch, module.generator(TRAINING, 0))
    return module.make_experience(rollout)


def off_policy(module: PPOModule, rows: int = 8) -> Experience:
    """The same, as if the policy and the critic had moved on: both clips have work to do."""
    experience = on_policy(module, rows)
    generator = torch.Generator().manual_seed(9)
    mask = experience.response_mask

    def noise() -> Tensor:
        return torch.where(mask, 0.3 * torch.randn(mask.shape, generator=generator), 0)

    return replace(
        experience, old_logprobs=experience.old_logprobs + noise(),
        old_values=experience.old_values + noise(), returns=experience.returns + noise(),
    )  # fmt: skip


def named(module: PPOModule, *parts: str) -> set[str]:
    return {n for n, _ in module.named_parameters() if any(part in n for part in parts)}


def nothing_to_gain(module: PPOModule) -> Tensor:
    return torch.zeros_like(off_policy(module).advantages)


def updated(module: PPOModule, experience: Experience) -> tuple[UpdateStats, dict[str, Tensor]]:
    """Facts and gradients of one update."""
    stats = within_fit(module, lambda: update(module, experience))
    return stats, grads(module)


def update(module: PPOModule, minibatch: Experience) -> UpdateStats:
    """One optimizer step at the module's own KL coefficient."""
    return module.update(minibatch)


def learn(
    module: PPOModule, experience: Experience, generator: torch.Generator
) -> tuple[UpdateStats, ...]:
    """All updates of an iteration, whose minibatches the generator draws."""
    return tuple(map(module.update, module.minibatches(experience, generator)))
