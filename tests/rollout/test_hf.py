"""Sampling by the library: the same record, from the same distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import Prompts, Rollout
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.sampler import HFSampler, SamplingParams
from lightning_rlhf.rollout.score import Critic, annotate

END = (1, 2, 3, 4, 5, 6)


def roll_out(roles: Roles, prompts: Prompts, **changes: Any) -> Rollout:
    """Sampled and annotated."""
    settings: dict[str, Any] = {"max_response_tokens": 24, "temperature": 0.7, "end_token_ids": END}
    params, rows = SamplingParams(**(settings | changes)), MicrobatchSize("rows", 500)
    options = {"is_exact": True, "temperature": params.temperature, "policy_rows": rows}
    with roles.use_role(POLICY):
        generator = torch.Generator().manual_seed(3)
        sampled = HFSampler(roles, params).sample(prompts, 1, generator)
        assert sampled.logprobs is None
        return annotate(sampled, roles, Critic(roles, POLICY), batch_size=2, **options)


def test_tokens_come_as_often_as_the_softmax_at_this_temperature_says(
    roles: Roles, make_prompts: Callable[..., Prompts]
) -> None:
    """Within five standard deviations of a count, whatever the model's own settings say."""
    roles.causal_lm.generation_config.top_k = 2
    roles.causal_lm.generation_config.repetition_penalty = 3.0
    n, temperature = 4000, 2
    prompts = make_prompts([7, 8, 9]).repeat(n)
    rollout = roll_out(roles, prompts, max_response_tokens=1, temperature=temperature)
    with torch.no_grad(), roles.use_role(POLICY):
        hidden = roles.hidden(torch.tensor([[7, 8, 9]]))[0, -1]
        p = torch.softmax(roles.head(hidden) / temperature, dim=-1)
    found = torch.bincount(rollout.responses[:, 0], minlength=61)
    assert ((found - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt() + 1).all()
    torch.testing.assert_close(
        rollout.logprobs[:, 0], p.log()[rollout.responses[:, 0]], atol=1e-5, rtol=0
    )
    assert roles.causal_lm.generation_config.top_k == 2


class Even(StoppingCriteria):
    """Stops behind an even token. Prompts, which are not its business, hold some too."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 2 == 0


@pytest.mark.parametrize("roles", ["qwen3"], indirect=True)
def test_what_stops_a_response_ends_it(roles: Roles, prompts: Prompts) -> None:
    rollout = roll_out(roles, prompts, stop=Even(), end_token_ids=(1,))
    for said, real in zip(rollout.responses, rollout.response_mask, strict=True):
        tokens = said[real].tolist()
        assert all(token % 2 for token in tokens[:-1])
        assert tokens[-1] % 2 == 0 or tokens[-1] == 1
    assert rollout.ended.all()
