"""From a rollout and its scores to rewards and advantages: two responses by hand, and any shape."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.config import Term
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Experience
from lightning_rlhf.core.shaping import ScoreMoments, weighted_sum

from .configs import ppo_config
from .conftest import NAN, F, Ragged, T, close, drawn, pad, ragged
from .rollouts import SEEN, by_hand, drawn_rollout, make

COMPUTED = ("kl", "rewards", "advantages", "returns")


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
        length_penalty=draw(st.sampled_from([0.0, 0.25])), gamma=draw(st.sampled_from([1.0, 0.9])),
        whiten_rewards=draw(flag), whiten_advantages="batch" if draw(flag) else "none",
    )  # fmt: skip


def pairs(batch: Ragged) -> Ragged:
    """Twice the rows, so that they can be groups of two."""
    return replace(batch, lengths=batch.lengths * 2)


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_by_hand_without_whitening() -> None:
    # kl_coef 1/2, gamma 1, lambda 1, a missing end costs 2 of the score.
    #   kl:      (-1 + 2, -2 + 1) = (1, -1);  (-1 + 3, padding) = (2, 0)
    #   rewards: (-1/2, 1/2 + 3) = (-1/2, 7/2);  (-1 + (1 - 2), 0) = (-2, 0)
    #   returns: (-1/2 + 7/2, 7/2) = (3, 7/2);  (-2, 0)
    #   advantages: returns - values = (5/2, 5/2);  (-4, 0)
    # The configuration's kl_coef is where a run starts, not the coefficient of this iteration.
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
    found = by_rules(whiten_advantages="batch", missing_eos="subtract", missing_eos_penalty=2.0)
    close(found.advantages, doubles([1 / ROOT2] * 2, [-ROOT2, 0]), rtol=1e-8)
    assert found.returns.tolist() == [[3, 3.5], [-2, 0]]


@drawn
@given(ragged(), st.integers(1, 3), st.sampled_from([NAN, float("inf"), 5.0]), drawn_rules())
def test_padding_changes_nothing(
    batch: Ragged, columns: int, filler: float, config: PPOConfig
) -> None:
    rollout, scores = drawn_rollout(pairs(batch))
    wide = replace(
        rollout, tokens=pad(rollout.tokens, columns, 3), mask=pad(rollout.mask, columns, F),
        response_mask=pad(rollout.response_mask, columns, F),
        logprobs=pad(rollout.logprobs, columns, filler),
        values=pad(rollout.values, columns, filler),
    )  # fmt: skip
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


E, ROOT2 = math.e, math.sqrt(2)


def by_rules(**changes: Any) -> Experience:
    rollout, scores = by_hand()
    scores = replace(scores, vocabulary_kl=doubles([0.5, 2.0], [4.0, NAN]))
    neutral = {"whiten_advantages": "none", "gae_lambda": 1.0}
    config = ppo_config(**neutral | changes)
    return make(rollout, scores, config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Half the estimate off each token, and the score on the last: 3, and 1.
        ({"kl_estimator": "k1"}, [[-0.5, 0.5 + 3], [-1 + 1, 0]]),
        # k3 = exp(-d) - 1 + d: (1/e, e - 2), (1/e^2 + 1)
        ({"kl_estimator": "k3"}, [[-1 / E / 2, 1 - E / 2 + 3], [-(E**-2) / 2 - 0.5 + 1, 0]]),
        # Of the whole vocabulary, as measured: (1/2, 2), (4)
        ({"kl_estimator": "full"}, [[-0.25, -1 + 3], [-2 + 1, 0]]),
        # In the loss, it is not in the reward too.
        ({"kl_in": "loss", "kl_estimator": "k2"}, [[0, 3], [1, 0]]),
        ({"kl_in": "loss", "kl_estimator": "full"}, [[0, 3], [1, 0]]),
        # A quarter a token: 3 - 1/2, 1 - 1/4; and 2 more for the end that is missing.
        ({"length_penalty": 0.25, "missing_eos": "subtract", "missing_eos_penalty": 2.0},
         [[-0.5, 0.5 + 2.5], [-1 - 1.25, 0]]),
        # (3 - 1) / 2 = 1 and (1 - 1) / 2 = 0; their scale alone: 3/2 and 1/2.
        ({"score_normalization": "running"}, [[-0.5, 0.5 + 1], [-1 + 0, 0]]),
        # 3/2 clipped to 5/4, then less the penalty of two tokens.
        ({"score_normalization": "running_scale", "score_clip": 1.25, "length_penalty": 0.25},
         [[-0.5, 0.5 + 0.75], [-1 + 0.25, 0]]),
    ],
)  # fmt: skip
def test_rewards_by_hand(changes: dict[str, Any], expected: list[list[float]]) -> None:
    found = by_rules(**changes)
    close(found.rewards, doubles(*expected))
    assert found.kl.tolist() == [[1, -1], [2, 0]]  # k1, whatever the rewards use
    assert found.score.tolist() == [3, 1]


def test_whitened_rewards_by_hand() -> None:
    # KL in the loss leaves rewards (0, 3), (1 - 1): mean 1, deviations (-1, 2), -1, variance 2.
    # Of variance 1 about that mean: (1 - 1/sqrt 2, 1 + sqrt 2), 1 - 1/sqrt 2. Returns are of these.
    found = by_rules(kl_in="loss", kl_estimator="k3", whiten_rewards=True,
                 missing_eos="subtract", missing_eos_penalty=1.0)  # fmt: skip
    low, high = 1 - 1 / ROOT2, 1 + ROOT2
    close(found.rewards, doubles([low, high], [low, 0]), rtol=1e-7)
    close(found.returns, doubles([low + high, high], [low, 0]), rtol=1e-7)
    # less the values (1/2, 1), (2)
    close(found.advantages, doubles([low + high - 0.5, high - 1], [low - 2, 0]), rtol=1e-7)


@pytest.mark.parametrize(
    ("weight", "changes", "expected"),
    [
        # Of the scores 3 and 1 the first tokens have 2 and 1/2. Two tokens and one cost a quarter
        # each; an end that is missing 4 more, or in place of the whole score.
        (1, {"length_penalty": 0.25, "missing_eos": "subtract"}, [[2, 1 - 0.5 - 4], [0.75, 0]]),
        (1, {"missing_eos": "replace"}, [[0, -4], [1, 0]]),
        # Halves; the mean 1 is subtracted from the whole alone.
        (1, {"score_normalization": "running_scale"}, [[1, 0.5], [0.5, 0]]),
        (1, {"score_normalization": "running"}, [[1, 0.5 - 0.5], [0, 0]]),
        # 2 * (3 - 1) / 2 and 2 * (1 - 1) / 2, of which 2 * 2 / 2 is the first token's.
        (2, {}, [[2, 0], [0, 0]]),
    ],
)
def test_tokens_have_their_parts_of_the_score(
    weight: float, changes: dict[str, Any], expected: list[list[float]]
) -> None:
    rule: Any = "running" if weight == 2 else "none"
    terms = (Term(name="a", weight=weight, normalization=rule, clip=None),)
    rollout, scores = by_hand()
    rollout = replace(rollout, ended=torch.tensor([F, T]))
    scores = replace(scores, token_scores=doubles([2.0, 0.0], [0.5, 0.0])[:, None])
    rules = {"kl_in": "loss", "kl_estimator": "k2", "whiten_advantages": "none", "gamma": 0.5}
    rules |= {"missing_eos": "none", "missing_eos_penalty": 4.0, "gae_lambda": 0.5}
    found = make(rollout, scores, ppo_config(**rules | changes), terms=terms)
    assert found.rewards.tolist() == expected
    # Values (1/2, 1) and 2: delta = (r_1 + 1/2 * 1 - 1/2, r_2 - 1), and a quarter of the next.
    (first, second), (only, _) = expected
    assert found.advantages.tolist() == [[first + (second - 1) / 4, second - 1], [only - 2, 0]]


GRPO = 1.625 / (1.625 * ROOT2 + 1e-4)


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
        # Mean -3/8, deviations of 13/8 from it, whose squares sum to 2 (13/8)^2: over 2 - 1.
        ({"advantage": "grpo"}, [[GRPO, GRPO], [-GRPO, 0]]),
    ],
)
def test_advantages_by_hand(changes: dict[str, Any], expected: list[list[float]]) -> None:
    rules = {"gamma": 0.5, "samples_per_prompt": 2, "missing_eos": "subtract",
             "missing_eos_penalty": 2.0}  # fmt: skip
    found = by_rules(**rules | changes)
    assert found.rewards.tolist() == [[-0.5, 3.5], [-2, 0]]
    close(found.advantages, doubles(*expected))
    if changes["advantage"] != "gae":
        assert found.returns.tolist() == [[1.25, 3.5], [-2, 0]]


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
    moments = ScoreMoments(SEEN, (SEEN, SEEN))
    found = make(rollout, scores, config, 0.0, moments=moments, terms=terms)
    close(found.rewards.sum(dim=1), torch.tensor([2 - 1, -4 - 2], dtype=torch.float64))
    # What is reported is without normalisation.
    close(
        weighted_sum(scores.component_scores, terms),
        torch.tensor([6 - 1, -10 - 2], dtype=torch.float64),
    )
    assert torch.equal(found.component_scores, scores.component_scores)
    moments = ScoreMoments.none(2).including(replace(scores, score=doubles([1.0, 2.0])[0]))
    assert [part.mean for part in moments.components] == [-1.0, 15.0]
    assert [part.std for part in moments.components] == [4.0, 5.0]
    assert moments.whole.mean == 1.5
