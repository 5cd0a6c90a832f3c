"""Scores of a rollout: the reference's log-probabilities and the reward source's number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.types import Prompts, Rollout
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.roles import POLICY, REFERENCE, REWARD, VALUE, Roles
from lightning_rlhf.rollout.generate import generate
from lightning_rlhf.rollout.score import (
    by_length,
    padding_share,
    response_hidden,
    response_logprobs,
    score,
)

TEMPERATURE = 0.7


@pytest.fixture
def rollout(roles: Roles, prompts: Prompts) -> Rollout:
    with roles.acting(POLICY):
        return generate(
            roles, prompts, value=roles.heads[VALUE], max_response_tokens=12,
            temperature=TEMPERATURE, end_token_ids=(1, 2, 3, 4, 5, 6),
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip


def index_of(rollout: Rollout) -> Tensor:
    return rollout.index.float()


@torch.no_grad()
def test_the_references_log_probabilities_are_its_log_softmax(
    roles: Roles, rollout: Rollout
) -> None:
    scores = score(
        roles, rollout, index_of, temperature=TEMPERATURE, batch_size=4, over_vocabulary=False
    )
    assert scores.ref_logprobs.shape == rollout.logprobs.shape
    with roles.acting(REFERENCE):
        for i in range(len(rollout)):
            tokens = rollout.tokens[i][rollout.mask[i]]
            n = int(rollout.response_mask[i].sum())
            logits = roles.causal_lm(tokens[None]).logits[0] / TEMPERATURE
            naive = [
                logits[t - 1, tokens[t]] - logits[t - 1].logsumexp(0)
                for t in range(len(tokens) - n, len(tokens))
            ]
            torch.testing.assert_close(
                scores.ref_logprobs[i, :n], torch.stack(naive), atol=1e-5, rtol=0
            )
            assert not scores.ref_logprobs[i, n:].any()
    # The policy says otherwise, so that the reference was really asked.
    assert (scores.ref_logprobs - rollout.logprobs).abs().max() > 0.01


def test_the_split_into_batches_changes_nothing(roles: Roles, rollout: Rollout) -> None:
    whole = score(
        roles,
        rollout,
        index_of,
        temperature=TEMPERATURE,
        batch_size=len(rollout),
        over_vocabulary=False,
    )
    for batch_size in (1, 4, 100):
        parts = score(
            roles,
            rollout,
            index_of,
            temperature=TEMPERATURE,
            batch_size=batch_size,
            over_vocabulary=False,
        )
        torch.testing.assert_close(parts.ref_logprobs, whole.ref_logprobs, atol=1e-5, rtol=0)
        assert parts.score.tolist() == rollout.index.tolist()


def test_the_reward_source_is_given_batches_of_the_size_asked_for(
    roles: Roles, rollout: Rollout
) -> None:
    sizes = []

    def reward(part: Rollout) -> Tensor:
        sizes.append(len(part))
        assert part.tokens.shape[1] == rollout.tokens.shape[1]
        return part.index * 0.5

    scores = score(
        roles, rollout, reward, temperature=TEMPERATURE, batch_size=4, over_vocabulary=False
    )
    assert sizes == [4, 2]
    assert scores.score.tolist() == (rollout.index * 0.5).tolist()


def test_scoring_leaves_role_and_gradients_alone(roles: Roles, rollout: Rollout) -> None:
    roles.heads[REWARD] = ScalarHead.random(32, torch.Generator().manual_seed(0))
    roles.assign(REWARD)
    roles.play(POLICY)
    with torch.no_grad():
        before = roles.hidden(rollout.tokens)
    scores = score(
        roles,
        rollout,
        lambda part: roles.reward(part.tokens, part.mask),
        temperature=TEMPERATURE,
        batch_size=4,
        over_vocabulary=False,
    )
    assert not scores.score.requires_grad
    assert not scores.ref_logprobs.requires_grad
    with torch.no_grad():
        assert torch.equal(roles.hidden(rollout.tokens), before)


def test_log_probabilities_of_an_update_carry_gradients_to_the_policy(
    roles: Roles, rollout: Rollout
) -> None:
    """The same functions in PPO's update: the ratio is 1 before the first step, and has slope."""
    roles.play(POLICY)
    hidden = response_hidden(roles, rollout)
    logprobs, entropy = response_logprobs(roles, hidden, rollout, TEMPERATURE)
    ratio = (logprobs - rollout.logprobs[rollout.response_mask]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-5, rtol=0)
    assert entropy.shape == logprobs.shape
    ratio.sum().backward()
    for name, parameter in roles.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


def test_rows_go_from_the_shortest_to_the_longest_and_alike_ones_keep_their_order() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    assert by_length(mask).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize(("batch_size", "share"), [(1, 0.0), (2, 2 / 10), (4, 4 / 12)])
def test_share_of_padding_by_hand(batch_size: int, share: float) -> None:
    """Lengths 2, 3, 3, 4 are read but for their last token: 1, 2, 2, 3, as wide as the longest."""
    lengths = torch.tensor([4, 2, 3, 3])
    mask = torch.arange(6) >= 6 - lengths[:, None]
    assert float(padding_share(mask, batch_size)) == pytest.approx(share)
