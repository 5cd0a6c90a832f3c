"""The scale of a reward: whose samples it is measured on, and what comes out."""

import statistics

import pytest
import torch

from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.rollout.collector import reward_moments, sample_reference, shard
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.rollout.score import annotate

PARAMS = SamplingParams(max_response_tokens=5, temperature=1.0, end_token_ids=[1])


def sampled(roles: Roles, prompts: Prompts) -> list[SampledResponses]:
    return sample_reference(
        roles, shard([(part, 1) for part in prompts.split(4)], ONE, divides=False), PARAMS,
        torch.Generator().manual_seed(3),
    )  # fmt: skip


def test_the_reference_generates(roles: Roles, prompts: Prompts) -> None:
    roles.set_role(POLICY)
    found = sampled(roles, prompts)
    assert [len(rollout) for rollout in found] == [4, 2]
    generator = torch.Generator().manual_seed(3)
    for rollout, part in zip(found, prompts.split(4), strict=True):
        with roles.use_role(REFERENCE):
            expected = NativeSampler(roles, PARAMS).sample(
                part, 1, generator, torch.arange(len(part))
            )
        assert torch.equal(rollout.tokens, expected.tokens)
        assert torch.equal(rollout.logprobs, expected.logprobs)


@pytest.mark.parametrize("roles", ["mamba"], indirect=True)
def test_a_model_without_a_cache_is_sampled_by_the_library(roles: Roles, prompts: Prompts) -> None:
    """Two identical forward passes differ by nothing; one that forgot the prompt by nats."""
    assert not roles.cache_argument
    for responses in sampled(roles, prompts):
        with roles.use_role(REFERENCE):
            rollout = annotate(
                responses, roles, None, is_exact=True, temperature=1.0,
                policy_rows=MicrobatchSize("rows", 2), batch_size=2,
            )  # fmt: skip
        for row, mask, logprobs in zip(rollout.tokens, rollout.mask, rollout.logprobs, strict=True):
            tokens, n = row[mask], int((logprobs != 0).sum())
            with torch.no_grad(), roles.use_role(REFERENCE):
                logits = roles.causal_lm(tokens[None]).logits[0, -n - 1 : -1]
            expected = logits.log_softmax(-1)[torch.arange(n), tokens[-n:]]
            torch.testing.assert_close(logprobs[:n], expected, atol=1e-5, rtol=0)


def test_moments_are_those_of_each_response_alone(roles: Roles, prompts: Prompts) -> None:
    roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, torch.Generator().manual_seed(0))
    roles.assign(REWARD)
    rollouts = sampled(roles, prompts)
    alone = []
    with torch.no_grad():
        for rollout in rollouts:
            for tokens, mask in zip(rollout.tokens, rollout.mask, strict=True):
                row = tokens[mask][None]
                alone.append(float(roles.reward(row, torch.ones_like(row, dtype=torch.bool))))
        rewards = [roles.reward(rollout.tokens, rollout.mask) for rollout in rollouts]
    mean, std = reward_moments(torch.cat(rewards))
    assert abs(mean - statistics.fmean(alone)) < 1e-5
    assert abs(std - statistics.stdev(alone)) < 1e-5
