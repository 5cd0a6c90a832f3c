"""The advantages of recipe=online_dpo give the gradient of DPO."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.experience import AdvantageBatch
from lightning_rlhf.core.policy_losses import example_batch, ppo
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.io.user_code import load_function

from ..composing import stage_config

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "online_dpo"
BETA = 0.3
MASK = torch.arange(4) < torch.tensor([[4], [2], [1], [3], [2], [2]])
SCORES = torch.tensor([1.0, 2.0, 0.5, -1.0, 3.0, 3.0], dtype=torch.float64)
"""Of three pairs: the second response is better, the first is, neither is."""


def test_the_gradient_of_the_first_update_is_that_of_dpo() -> None:
    numbers = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logprobs, ref = -numbers.abs() * MASK
    logprobs.requires_grad_()
    log_ratio = logprobs - ref
    rewards = -BETA * log_ratio.detach()
    rewards[torch.arange(6), MASK.sum(dim=1) - 1] += SCORES
    config = stage_config("ppo", PPOConfig, samples_per_prompt=2, kl_coef=BETA, missing_eos="none")
    estimator = load_function(f"{RECIPE / 'pairs.py'}:pairs", "ppo.advantage")
    given = AdvantageBatch(
        rewards=rewards,
        values=torch.zeros_like(rewards),
        mask=MASK,
        component_scores=SCORES[:, None],
        weights=torch.ones(1, dtype=torch.float64),
        baseline=torch.zeros(6),
        config=config,
    )
    found = estimator(given)
    batch = replace(
        example_batch(config), logprobs=logprobs, old_logprobs=logprobs.detach(), ref_logprobs=ref,
        advantages=found.advantages, mask=MASK,
    )  # fmt: skip
    (ours,) = torch.autograd.grad(ppo(batch).losses[MASK].sum(), logprobs)
    h = (log_ratio * MASK).sum(dim=1)
    loss = -logsigmoid(BETA * (h[1] - h[0])) - logsigmoid(BETA * (h[2] - h[3]))
    (theirs,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(ours, theirs / BETA, rtol=1e-12, atol=0)
    assert not ours[4:].any()
    with pytest.raises(ConfigError, match=r"^ppo\.kl_estimator is 'k3'"):
        estimator(replace(given, config=replace(config, kl_estimator="k3")))
