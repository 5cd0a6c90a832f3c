"""Scores of a rollout: the reference's log-probabilities and the reward source's number."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import DecodedResponses, Prompts, Rollout, Scores
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards.weighted import LearnedReward, Reward
from lightning_rlhf.rollout.collector import Collector, as_responses, decode_responses
from lightning_rlhf.rollout.score import (
    annotate,
    padding_share,
    policy_outputs,
    response_hidden,
    score,
)

from ..core.configs import ppo_config
from .conftest import sample

TEMPERATURE = 0.7


@pytest.fixture(params=[1, 12])
def rollout(request: pytest.FixtureRequest, roles: Roles, prompts: Prompts) -> Rollout:
    with roles.use_role(POLICY):
        sampled = sample(roles, prompts, max_response_tokens=request.param, temperature=TEMPERATURE)
    return Rollout(**vars(sampled))


INDEX = Reward.of(lambda decoded: decoded.rollout.index.float())


def scored(roles: Roles, rollout: Rollout, batch_size: int = 4, reward: Reward = INDEX) -> Scores:
    return score(
        roles, decoded(rollout), reward, temperature=TEMPERATURE, batch_size=batch_size,
        over_vocabulary=False,
    )  # fmt: skip


def decoded(rollout: Rollout) -> DecodedResponses:
    """With text that is not used."""
    row = {"prompt": "", "messages": []}
    return DecodedResponses(
        rollout=rollout, rows=[row] * len(rollout), responses=[""] * len(rollout), decode=str
    )


@torch.no_grad()
def test_the_references_log_probabilities_are_its_log_softmax(
    roles: Roles, rollout: Rollout
) -> None:
    scores = scored(roles, rollout)
    assert scores.ref_logprobs.shape == rollout.logprobs.shape
    with roles.use_role(REFERENCE):
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


@pytest.mark.parametrize(
    ("kl_estimator", "kl_in", "read"),
    [("full", "reward", True), ("full", "loss", False), ("k1", "reward", False)],
)
def test_the_whole_vocabulary_is_read_for_a_kl_over_it_in_the_reward_alone(
    roles: Roles, prompts: Prompts, kl_estimator: str, kl_in: str, *, read: bool
) -> None:
    with roles.use_role(POLICY):
        few = Rollout(**vars(sample(roles, prompts, max_response_tokens=2)))
    chat: Any = SimpleNamespace(end_token_ids=(1,), tokenizer=None)
    collector = Collector(
        roles=roles, reward=INDEX, config=ppo_config(kl_estimator=kl_estimator, kl_in=kl_in),
        critic=None, chat=chat, prompts={}, microbatch=rows(), sampler=object(),
    )  # fmt: skip
    assert (collector.score(decoded(few)).vocabulary_kl is not None) == read


def test_a_step_has_the_reward_of_the_response_that_it_would_end(
    roles: Roles, rollout: Rollout
) -> None:
    """A token is a character; the separator is the first token that the policy drew."""
    roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, torch.Generator().manual_seed(0))
    roles.assign(REWARD)
    texts = ["".join(map(chr, row)) for row in decoded(rollout).tokens]
    read = replace(decoded(rollout), responses=texts, decode=lambda ids: "".join(map(chr, ids)))
    steps = LearnedReward(roles.rewards, 0.5, 2.0, 0.0, rows(), step_separator=texts[0][0])
    for i, parts in enumerate(steps(read)):
        stops = [n for n, sign in enumerate(texts[i], 1) if sign == texts[0][0]]
        assert [end for end, _ in parts] == sorted({*stops, len(texts[i])})
        row = rollout.tokens[i][rollout.mask[i]]
        for end, found in parts:
            cut = row[None, : len(row) - len(texts[i]) + end]
            alone = roles.reward(cut, torch.ones_like(cut, dtype=torch.bool)).item()
            assert found == pytest.approx((alone - 0.5) / 2.0, abs=1e-5)


def test_the_split_into_batches_changes_nothing(roles: Roles, rollout: Rollout) -> None:
    whole = scored(roles, rollout, len(rollout))
    for batch_size in (1, 4):
        parts = scored(roles, rollout, batch_size)
        torch.testing.assert_close(parts.ref_logprobs, whole.ref_logprobs, atol=1e-5, rtol=0)
        assert parts.score.tolist() == rollout.index.tolist()


@pytest.mark.parametrize("ent_coef", [0.0, 0.01])
def test_the_entropy_has_a_gradient_where_the_loss_counts_it(
    roles: Roles, rollout: Rollout, ent_coef: float
) -> None:
    roles.set_role(POLICY)
    batch: Any = rollout
    hidden = response_hidden(roles, batch)
    outputs = policy_outputs(roles, hidden, batch, ppo_config(ent_coef=ent_coef))
    assert outputs.entropy.requires_grad == (ent_coef > 0)
    assert outputs.logprobs.requires_grad


@pytest.mark.parametrize(("batch_size", "share"), [(1, 0.0), (2, 2 / 10), (4, 4 / 12)])
def test_share_of_padding_by_hand(batch_size: int, share: float) -> None:
    """Lengths 2, 3, 3, 4 are read but for their last token: 1, 2, 2, 3, as wide as the longest."""
    lengths = torch.tensor([4, 2, 3, 3])
    mask = torch.arange(6) >= 6 - lengths[:, None]
    assert float(padding_share(mask, batch_size)) == pytest.approx(share)


def rows() -> MicrobatchSize:
    return MicrobatchSize("the number of rows annotated at a time", 6)


def test_what_a_server_measured_is_computed_again(roles: Roles, prompts: Prompts) -> None:
    """Its weights may round otherwise; here its log-probabilities are off by a whole nat."""
    roles.set_role(POLICY)
    exact = sample(roles, prompts, temperature=0.7)
    off = replace(exact, logprobs=torch.where(exact.response_mask, exact.logprobs - 1, 0))
    again = annotate(
        off, roles, None, is_exact=False, temperature=0.7, policy_rows=rows(), batch_size=2
    )
    torch.testing.assert_close(again.logprobs, exact.logprobs, atol=2e-5, rtol=0)
    taken = annotate(
        off, roles, None, is_exact=True, temperature=0.7, policy_rows=rows(), batch_size=2
    )
    assert torch.equal(taken.logprobs, off.logprobs)


def test_a_response_comes_with_the_row_of_its_prompt() -> None:
    responses = as_responses([[1], [1], [1]], [[2, 3], [4], [5]], pad_id=0)
    responses = replace(responses, index=torch.tensor([2, 0, 2]))
    data = [{"prompt": name} for name in ("first", "second", "third")]
    chat: Any = SimpleNamespace(decode_response=lambda tokens: " ".join(map(str, tokens)))
    decoded = decode_responses(responses, data, chat)
    assert [row["prompt"] for row in decoded.rows] == ["third", "first", "third"]
    assert decoded.responses == ["2 3", "4", "5"]
