"""Whether PPO learns what is rewarded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.records import DecodedResponses
from lightning_rlhf.modules.ppo import PPOModule

from .conftest import VOCABULARY, Outputs, fit, prompts, shake
from .experiences import ADAPTER, Make


def share_of_low_tokens(decoded: DecodedResponses) -> Tensor:
    """The share of the response that is among the first quarter of the vocabulary."""
    rollout = decoded.rollout
    low = (rollout.responses < VOCABULARY // 4) & rollout.response_mask
    return low.sum(1) / rollout.response_mask.sum(1)


def train(module: PPOModule) -> tuple[Tensor, Tensor]:
    """Mean score, and mean KL summed over a response, of every iteration."""
    outputs = Outputs()
    rows, iterations = module.config.rollout_batch_size, module.config.iterations
    fit(module, [prompts(rows, seed=i) for i in range(iterations)], [outputs])
    experiences = [step.experience for step in outputs.steps]
    scores = torch.stack([e.score.mean() for e in experiences])
    return scores, torch.stack([e.kl.sum(1).mean() for e in experiences])


LEARNING: dict[str, Any] = {
    "fresh": True,
    "reward": share_of_low_tokens,
    "rollout_batch_size": 64,
    "minibatch_size": 32,
    "microbatch_size": 32,
    "ppo_epochs": 4,
    "ent_coef": 0.0,
    "missing_eos": "none",
    "lr": 1e-2,
}


@pytest.mark.slow
def test_it_learns_what_is_rewarded(make_ppo: Make, architecture: str) -> None:
    scores, kl = train(make_ppo(architecture, iterations=14, kl_coef=0.0, **LEARNING))
    assert scores[:2].mean() < 0.45  # chance, with many responses ended by a rewarded token
    assert scores[-3:].mean() > 0.7
    assert kl[-3:].mean() > 1


@pytest.mark.slow
def test_the_leash_pulls_back(make_ppo: Make) -> None:
    """With nothing to gain and a price on KL, a policy that has strayed turns to the reference."""
    settings = LEARNING | {
        "fresh": False,
        "reward": lambda decoded: torch.zeros(len(decoded)),
        "lr": 3e-3,
    }
    module = make_ppo(iterations=14, kl_coef=1.0, **settings)
    shake(module.roles, ADAPTER, seed=11, size=0.1)
    _, kl = train(module)
    assert kl[:2].mean() > 1.5
    assert kl[-3:].mean() < 0.75 * kl[:2].mean()
