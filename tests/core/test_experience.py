"""From a rollout and its scores to rewards and advantages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.experience import make_experience, token_rewards
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Experience, Rollout, Scores
from lightning_rlhf.core.shaping import RunningMoments, ScoreMoments

from .configs import ppo_config
from .conftest import NAN, F, Ragged, close, drawn, pad, ragged
from .rollouts import by_hand, drawn_rollout

COMPUTED = ("kl", "rewards", "advantages", "returns")
SEEN = RunningMoments(count=4, mean=1.0, squares=16.0)  # std 2
MOMENTS = ScoreMoments(SEEN, (SEEN,))


@st.composite
def drawn_rules(draw: st.DrawFn, whiten: bool = True) -> PPOConfig:
    """Any way from scores to advantages, for groups of two."""
    flag = st.booleans() if whiten else st.just(False)
    return ppo_config(
        samples_per_prompt=2,
        advantage=draw(st.sampled_from(["gae", "rloo", "grpo", "dr_grpo", "reinforce++"])),
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3", "abs", "mse", "full"])),
        score_normalization=draw(st.sampled_from(["none", "running", "running_scale"])),
        missing_eos=draw(st.sampled_from(["none", "subtract", "replace"])),
        length_penalty=draw(st.sampled_from([0.0, 0.25])),
        gamma=draw(st.sampled_from([1.0, 0.9])),
        whiten_rewards=draw(flag),
        whiten_advantages="batch" if draw(flag) else "none",
    )


def pairs(batch: Ragged) -> Ragged:
    """Twice the rows, so that they can be groups of two."""
    return replace(batch, lengths=batch.lengths * 2)


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def make(rollout: Rollout, scores: Scores, config: PPOConfig, kl_coef: float = 0.5) -> Experience:
    return make_experience(
        rollout,
        scores,
        config,
        token_rewards(rollout, scores, config, kl_coef=kl_coef, moments=MOMENTS),
    )


def test_by_hand_without_whitening() -> None:
    # kl_coef 1/2, gamma 1, lambda 1, a missing end costs 2 of the score.
    #   kl:      (-1 + 2, -2 + 1) = (1, -1);  (-1 + 3, padding) = (2, 0)
    #   rewards: (-1/2, 1/2 + 3) = (-1/2, 7/2);  (-1 + (1 - 2), 0) = (-2, 0)
    #   returns: (-1/2 + 7/2, 7/2) = (3, 7/2);  (-2, 0)
    #   advantages: returns - values = (5/2, 5/2);  (-4, 0)
    # The configuration's kl_coef is where a run starts, not the price of this iteration.
    rollout, scores = by_hand()
    config = ppo_config(
        kl_coef=9.0, gamma=1.0, gae_lambda=1.0, whiten_advantages="none",
        missing_eos="subtract", missing_eos_penalty=2.0,
    )  # fmt: skip
    experience = make(rollout, scores, config)
    assert experience.kl.tolist() == [[1, -1], [2, 0]]
    assert experience.rewards.tolist() == [[-0.5, 3.5], [-2, 0]]
    assert experience.returns.tolist() == [[3, 3.5], [-2, 0]]
    assert experience.advantages.tolist() == [[2.5, 2.5], [-4, 0]]
    assert experience.score.tolist() == [3, 1]  # as given, before the rule for a missing end
    assert experience.tokens is rollout.tokens
    assert experience.mask is rollout.mask
    assert experience.response_mask is rollout.response_mask
    assert experience.old_logprobs is rollout.logprobs
    assert experience.old_values is rollout.values
    assert experience.ref_logprobs is scores.ref_logprobs
    assert experience.ended is rollout.ended
    assert experience.index is rollout.index


def test_by_hand_with_whitening() -> None:
    # Advantages 5/2, 5/2, -4: mean 1/3, deviations 13/6, 13/6, -13/3,
    # population variance 13^2 (1/36 + 1/36 + 4/36) / 3 = 169/18, deviation 13 / sqrt(18).
    # Whitened: sqrt(18) (1/6, 1/6, -1/3) = (1/sqrt 2, 1/sqrt 2, -sqrt 2). Returns stay.
    config = ppo_config(
        gamma=1.0, gae_lambda=1.0, whiten_advantages="batch",
        missing_eos="subtract", missing_eos_penalty=2.0,
    )  # fmt: skip
    experience = make(*by_hand(), config)
    half = math.sqrt(0.5)
    close(experience.advantages, doubles([half, half], [-2 * half, 0]), rtol=1e-8)
    assert experience.returns.tolist() == [[3, 3.5], [-2, 0]]


@drawn
@given(ragged(), st.floats(0, 2), st.sampled_from(["none", "subtract", "replace"]))
def test_rewards_sum_to_score_minus_price_and_returns_start_there(
    batch: Ragged, kl_coef: float, rule: str
) -> None:
    rollout, scores = drawn_rollout(batch)
    config = ppo_config(missing_eos=rule, missing_eos_penalty=1.5, gamma=1.0, gae_lambda=1.0)
    experience = make(rollout, scores, config, kl_coef)
    worth = {
        "none": scores.score,
        "subtract": scores.score - 1.5 * (~rollout.ended),
        "replace": torch.where(rollout.ended, scores.score, -1.5),
    }[rule]
    kl = torch.stack(
        [
            (rollout.logprobs[i, :n] - scores.ref_logprobs[i, :n]).sum()
            for i, n in enumerate(batch.lengths)
        ]
    )
    close(experience.kl.sum(1), kl)
    close(experience.rewards.sum(1), worth - kl_coef * kl)
    # Undiscounted Monte-Carlo: the return of the first token is the sum of all rewards.
    close(experience.returns[:, 0], experience.rewards.sum(1))


@drawn
@given(ragged(), st.integers(1, 3), st.sampled_from([NAN, float("inf"), 5.0]), drawn_rules())
def test_padding_changes_nothing(
    batch: Ragged, columns: int, filler: float, config: PPOConfig
) -> None:
    rollout, scores = drawn_rollout(pairs(batch))
    wide = replace(
        rollout,
        tokens=pad(rollout.tokens, columns, 3),
        mask=pad(rollout.mask, columns, F),
        response_mask=pad(rollout.response_mask, columns, F),
        logprobs=pad(rollout.logprobs, columns, filler),
        values=pad(rollout.values, columns, filler),
    )
    assert scores.vocabulary_kl is not None
    wide_scores = replace(
        scores,
        ref_logprobs=pad(scores.ref_logprobs, columns, filler),
        vocabulary_kl=pad(scores.vocabulary_kl, columns, filler),
    )
    narrow, found = make(rollout, scores, config), make(wide, wide_scores, config)
    for name in COMPUTED:
        close(getattr(found, name), pad(getattr(narrow, name), columns, 0.0))


@drawn
@given(ragged(), drawn_rules())
def test_the_order_of_the_groups_does_not_matter(batch: Ragged, config: PPOConfig) -> None:
    rollout, scores = drawn_rollout(pairs(batch))
    order = (2 * batch.shuffled_rows()[:, None] + torch.tensor([1, 0])).flatten()
    whole = make(rollout, scores, config).select(order)
    shuffled = make(rollout.select(order), scores.select(order), config)
    for name in COMPUTED:
        close(getattr(shuffled, name), getattr(whole, name))


@drawn
@given(ragged(), st.integers(1, 3), drawn_rules(whiten=False))
def test_unwhitened_parts_are_the_parts_of_the_whole(
    batch: Ragged, groups: int, config: PPOConfig
) -> None:
    rollout, scores = drawn_rollout(pairs(batch))
    whole = make(rollout, scores, config).split(2 * groups)
    parts = zip(rollout.split(2 * groups), scores.split(2 * groups), whole, strict=True)
    for part_rollout, part_scores, expected in parts:
        found = make(part_rollout, part_scores, config)
        for name in COMPUTED:
            close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("whiten_advantages", ["none", "minibatch"])
@pytest.mark.parametrize("changes", [{}, {"advantage": "reinforce++"}])
def test_only_batch_whitens_the_batch(whiten_advantages: str, changes: dict[str, Any]) -> None:
    rollout, scores = by_hand()
    found = make(rollout, scores, ppo_config(whiten_advantages=whiten_advantages, **changes))
    values = 0 if changes else rollout.values
    last = torch.tensor([1, 0])  # where the advantage is the reward less the value, whatever lambda
    expected = (found.rewards - values)[torch.arange(2), last]
    assert torch.equal(found.advantages[torch.arange(2), last], expected)


def test_arguments_are_left_alone() -> None:
    rollout, scores = by_hand()
    config = ppo_config(whiten_rewards=True, score_clip=1.0, missing_eos="replace")
    make_experience(
        rollout,
        scores,
        config,
        token_rewards(rollout, scores, config, kl_coef=0.5, moments=ScoreMoments.none(1)),
    )
    before = by_hand()
    for name in ("logprobs", "values", "response_mask", "ended"):
        assert torch.equal(getattr(rollout, name), getattr(before[0], name))
    for name in ("score", "ref_logprobs"):
        assert torch.equal(getattr(scores, name), getattr(before[1], name))
