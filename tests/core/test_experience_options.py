"""Each way from scores to rewards and from rewards to advantages, on two responses by hand.

The responses of rollouts.by_hand: two tokens that ended, with log p - log q = (1, -1) and score 3;
one token that ran out of room, with 2 and score 1. The price of KL is 1/2 a nat.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.config import Term
from lightning_rlhf.core.experience import estimate, make_experience, token_rewards
from lightning_rlhf.core.records import Experience
from lightning_rlhf.core.shaping import RunningMoments, ScoreMoments, weighted_sum

from .configs import ppo_config
from .conftest import NAN, close
from .rollouts import by_hand

SEEN = RunningMoments(count=4, mean=1.0, squares=16.0)  # std 2
MOMENTS = ScoreMoments(SEEN, (SEEN,))
E, ROOT2 = math.e, math.sqrt(2)


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def make(**changes: Any) -> Experience:
    rollout, scores = by_hand()
    scores = replace(scores, vocabulary_kl=doubles([0.5, 2.0], [4.0, NAN]))
    neutral = {"whiten_advantages": "none", "gae_lambda": 1.0}
    config = ppo_config(**neutral | changes)
    return make_experience(
        rollout,
        scores,
        config,
        token_rewards(rollout, scores, config, kl_coef=0.5, moments=MOMENTS),
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Half the estimate off each token, and the score on the last: 3, and 1.
        ({"kl_estimator": "k1"}, [[-0.5, 0.5 + 3], [-1 + 1, 0]]),
        # k2 = 1/2 d^2: (1/2, 1/2), (2)
        ({"kl_estimator": "k2"}, [[-0.25, -0.25 + 3], [-1 + 1, 0]]),
        ({"kl_estimator": "mse"}, [[-0.25, -0.25 + 3], [-1 + 1, 0]]),
        # k3 = exp(-d) - 1 + d: (1/e, e - 2), (1/e^2 + 1)
        ({"kl_estimator": "k3"}, [[-1 / E / 2, 1 - E / 2 + 3], [-(E**-2) / 2 - 0.5 + 1, 0]]),
        ({"kl_estimator": "abs"}, [[-0.5, -0.5 + 3], [-1 + 1, 0]]),
        # Of the whole vocabulary, as measured: (1/2, 2), (4)
        ({"kl_estimator": "full"}, [[-0.25, -1 + 3], [-2 + 1, 0]]),
        # In the loss, it is not in the reward too.
        *[({"kl_in": "loss", "kl_estimator": name}, [[0, 3], [1, 0]])
          for name in ("k2", "k3", "abs", "mse", "full")],
        # A quarter a token: 3 - 1/2, 1 - 1/4; and 2 more for the end that is missing.
        ({"length_penalty": 0.25}, [[-0.5, 0.5 + 2.5], [-1 + 0.75, 0]]),
        ({"length_penalty": 0.25, "missing_eos": "subtract", "missing_eos_penalty": 2.0},
         [[-0.5, 0.5 + 2.5], [-1 - 1.25, 0]]),
        ({"score_clip": 2.0}, [[-0.5, 0.5 + 2], [-1 + 1, 0]]),
        # (3 - 1) / 2 = 1 and (1 - 1) / 2 = 0; their scale alone: 3/2 and 1/2.
        ({"score_normalization": "running"}, [[-0.5, 0.5 + 1], [-1 + 0, 0]]),
        ({"score_normalization": "running_scale"}, [[-0.5, 0.5 + 1.5], [-1 + 0.5, 0]]),
        # 3/2 clipped to 5/4, then less the price of two tokens.
        ({"score_normalization": "running_scale", "score_clip": 1.25, "length_penalty": 0.25},
         [[-0.5, 0.5 + 0.75], [-1 + 0.25, 0]]),
    ],
)  # fmt: skip
def test_rewards_by_hand(changes: dict[str, Any], expected: list[list[float]]) -> None:
    found = make(**changes)
    close(found.rewards, doubles(*expected))
    assert found.kl.tolist() == [[1, -1], [2, 0]]  # k1, whatever is priced
    assert found.score.tolist() == [3, 1]


def test_whitened_rewards_by_hand() -> None:
    # KL in the loss leaves rewards (0, 3), (1 - 1): mean 1, deviations (-1, 2), -1, variance 2.
    # Of variance 1 about that mean: (1 - 1/sqrt 2, 1 + sqrt 2), 1 - 1/sqrt 2. Returns are of these.
    found = make(kl_in="loss", kl_estimator="k3", whiten_rewards=True,
                 missing_eos="subtract", missing_eos_penalty=1.0)  # fmt: skip
    low, high = 1 - 1 / ROOT2, 1 + ROOT2
    close(found.rewards, doubles([low, high], [low, 0]), rtol=1e-7)
    close(found.returns, doubles([low + high, high], [low, 0]), rtol=1e-7)
    # less the values (1/2, 1), (2)
    close(found.advantages, doubles([low + high - 0.5, high - 1], [low - 2, 0]), rtol=1e-7)


# Rewards (-1/2, 7/2) and (-2) as in test_experience.py; gamma 1/2 makes the returns
# (-1/2 + 7/4, 7/2) = (5/4, 7/2) and (-2), so that the responses are worth 5/4 and -2.
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # delta = (-1/2 + 1/2 * 1 - 1/2, 7/2 - 1) = (-1/2, 5/2), (-2 - 2); lambda 1/2, so a quarter
        # of the next: -1/2 + 5/8.
        ({"advantage": "gae", "gae_lambda": 0.5}, [[0.125, 2.5], [-4, 0]]),
        ({"advantage": "reinforce++"}, [[1.25, 3.5], [-2, 0]]),
        ({"advantage": "rloo"}, [[3.25, 3.25], [-3.25, 0]]),
        ({"advantage": "dr_grpo"}, [[1.625, 1.625], [-1.625, 0]]),
        # Mean -3/8, deviation 13/8.
        ({"advantage": "grpo"}, [[1.625 / 1.6251, 1.625 / 1.6251], [-1.625 / 1.6251, 0]]),
    ],
)
def test_advantages_by_hand(changes: dict[str, Any], expected: list[list[float]]) -> None:
    rules = {"gamma": 0.5, "samples_per_prompt": 2, "missing_eos": "subtract",
             "missing_eos_penalty": 2.0}  # fmt: skip
    found = make(**rules | changes)
    assert found.rewards.tolist() == [[-0.5, 3.5], [-2, 0]]
    close(found.advantages, doubles(*expected))
    if changes["advantage"] != "gae":
        assert found.returns.tolist() == [[1.25, 3.5], [-2, 0]]


def test_gae_returns_are_unwhitened_advantages_and_values() -> None:
    # As above: (1/8 + 1/2, 5/2 + 1), (-4 + 2).
    found = make(gamma=0.5, gae_lambda=0.5, missing_eos="subtract", missing_eos_penalty=2.0,
                 whiten_advantages="batch")  # fmt: skip
    assert found.returns.tolist() == [[0.625, 3.5], [-2, 0]]


@pytest.mark.parametrize("advantage", ["rloo", "grpo", "dr_grpo", "reinforce++"])
def test_without_a_critic_values_have_no_say(advantage: str) -> None:
    rollout, _ = by_hand()
    config = ppo_config(advantage=advantage, samples_per_prompt=2)
    rewards = doubles([1.0, 2.0], [4.0, 0.0])
    expected = estimate(rewards, rollout, config)
    garbage = replace(rollout, values=torch.full_like(rollout.values, NAN))
    for found, wanted in zip(estimate(rewards, garbage, config), expected, strict=True):
        assert torch.equal(found, wanted)


def test_groups_are_consecutive_rows() -> None:
    # Two prompts, two responses each, of one token: worth (1, 3) and (10, 14).
    rollout, _ = by_hand()
    four = rollout.select(torch.tensor([1, 1, 1, 1]))
    rewards = doubles([1.0, 0.0], [3.0, 0.0], [10.0, 0.0], [14.0, 0.0])
    config = ppo_config(advantage="rloo", samples_per_prompt=2)
    advantages, _ = estimate(rewards, four, config)
    assert advantages.tolist() == [[-2, 0], [2, 0], [-4, 0], [4, 0]]


def test_components_are_normalised_clipped_and_weighted() -> None:
    """Of two responses: a = 3 and -5, standardised by mean 1 and deviation 2 to 1 and -3, clipped
    to 1 and -2; b = 10 and 20 as they are. Paid: 2 * a - 0.1 * b."""
    rollout, scores = by_hand()
    terms = (
        Term(name="a", weight=2.0, normalization="running", clip=2.0),
        Term(name="b", weight=-0.1, normalization="none", clip=None),
    )
    scores = replace(scores, component_scores=doubles([3.0, 10.0], [-5.0, 20.0]))
    config = ppo_config(whiten_advantages="none", missing_eos="none")
    found = make_experience(
        rollout,
        scores,
        config,
        token_rewards(
            rollout,
            scores,
            config,
            kl_coef=0.0,
            terms=terms,
            moments=ScoreMoments(SEEN, (SEEN, SEEN)),
        ),
    )
    close(found.rewards.sum(dim=1), torch.tensor([2 - 1, -4 - 2], dtype=torch.float64))
    # What is reported is without normalisation.
    close(
        weighted_sum(scores.component_scores, terms),
        torch.tensor([6 - 1, -10 - 2], dtype=torch.float64),
    )
    assert torch.equal(found.component_scores, scores.component_scores)


def test_moments_of_components_are_kept_apart() -> None:
    _, scores = by_hand()
    scores = replace(
        scores, component_scores=doubles([3.0, 10.0], [-5.0, 20.0]), score=doubles([1.0, 2.0])[0]
    )
    moments = ScoreMoments.none(2).including(scores)
    assert [part.mean for part in moments.components] == [-1.0, 15.0]
    assert [part.std for part in moments.components] == [4.0, 5.0]
    assert moments.whole.mean == 1.5
