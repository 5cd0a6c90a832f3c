"""The terms of a micro-batch and the weights of its tokens by hand; micro-batches add up."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.losses import (
    PolicyOutputs,
    policy_loss,
    ppo_terms,
    sum_terms,
    token_weights,
)
from lightning_rlhf.core.masking import masked_sum
from lightning_rlhf.core.ppo_config import Reduction
from lightning_rlhf.core.records import Experience, PPOTerms

from .conftest import F, Ragged, T, close, drawn, ragged

MASK = torch.tensor([[True, True], [True, False]])


def experience() -> Experience:
    """Two responses of 2 and 1 tokens behind prompts of 1; NaN on padding."""
    nan = math.nan
    zeros = torch.zeros(2, 2)
    return Experience(
        tokens=torch.zeros(2, 3, dtype=torch.long),
        mask=torch.tensor([[True, True, True], [True, True, False]]), response_mask=MASK,
        old_logprobs=torch.tensor([[-1.0, -2.0], [-1.0, nan]]).double(),
        old_values=torch.tensor([[0.0, 1.0], [2.0, nan]]).double(),
        ref_logprobs=torch.tensor([[-1.5, -2.0], [-1.0, nan]]).double(), kl=zeros, rewards=zeros,
        advantages=torch.tensor([[1.0, -1.0], [2.0, nan]]).double(),
        returns=torch.tensor([[1.0, 1.0], [0.0, nan]]).double(), component_scores=torch.zeros(2, 1),
        score=torch.zeros(2), ended=torch.ones(2, dtype=torch.bool), index=torch.arange(2),
    )  # fmt: skip


def config(**changes: Any) -> Any:
    keys: dict[str, Any] = {
        "clip_range": 0.2, "clip_range_high": None, "dual_clip": None, "clip_range_vf": 0.5,
        "ent_coef": 0.1, "vf_coef": 0.5, "kl_in": "loss", "kl_estimator": "k2",
    }  # fmt: skip
    return SimpleNamespace(**keys | changes)


LOG = math.log
OUTPUTS = PolicyOutputs(
    logprobs=torch.tensor([-1.0 + LOG(1.5), -2.0 + LOG(1.1), -1.0 + LOG(0.5)]).double(),
    entropy=torch.tensor([1.0, 2.0, 3.0]).double(),
    vocabulary_kl=torch.tensor([0.3, 0.6, 0.9]).double(),
)
VALUES = torch.tensor([1.0, 1.25, 1.0]).double()
WEIGHTS = torch.tensor([[0.25, 0.25], [0.5, 0.0]]).double()


def terms(config: Any, *, policy: PolicyOutputs | None = OUTPUTS, values: Tensor | None = VALUES,
          kl_coef: float = 2.0) -> PPOTerms:  # fmt: skip
    return ppo_terms(experience(), WEIGHTS, MASK.sum(), config, kl_coef=kl_coef,
                     ent_coef=config.ent_coef, policy=policy,
                     policy_losses=losses(policy, experience(), config), values=values)  # fmt: skip


def losses(policy: PolicyOutputs | None, batch: Experience, config: Any) -> Tensor | None:
    """The clipped loss of each token, as `PPOModule.policy_losses`."""
    mask = batch.response_mask
    return None if policy is None else policy_loss(
        policy.logprobs, batch.old_logprobs[mask], batch.advantages[mask],
        clip_range=config.clip_range, clip_range_high=config.clip_range_high,
        dual_clip=config.dual_clip,
    )  # fmt: skip


def check(found: PPOTerms, **expected: float) -> None:
    for name, number in expected.items():
        assert getattr(found, name).item() == pytest.approx(number, abs=1e-7), name


def test_every_term_by_hand() -> None:
    # Ratios 1.5, 1.1, 0.5 with advantages 1, -1, 2:
    #   -min(1.5, 1.2) = -1.2;  max(1.1, 1.1) = 1.1;  max(-1, -1.6) = -1
    # k2 to the reference: (log 1.5 + 0.5)^2 / 2, (log 1.1)^2 / 2, (log 0.5)^2 / 2
    # Values 1, 1.25, 1 of old 0, 1, 2 and returns 1, 1, 0:
    #   (1 - 1)^2 = 0 but clipped to 0.5 it is 0.25;  0.0625;  1, clipped to 1.5 it is 2.25; halved
    kl = [(LOG(1.5) + 0.5) ** 2 / 2, LOG(1.1) ** 2 / 2, LOG(0.5) ** 2 / 2]
    policy, value = 0.25 * -1.2 + 0.25 * 1.1 + 0.5 * -1, 0.25 * 0.125 + 0.25 * 0.03125 + 0.5 * 1.125
    kl_loss, entropy = 0.25 * kl[0] + 0.25 * kl[1] + 0.5 * kl[2], 0.25 * 1 + 0.25 * 2 + 0.5 * 3
    check(
        terms(config()),
        policy_loss=policy, kl_loss=kl_loss, value_loss=value,
        loss=policy + 2.0 * kl_loss + 0.5 * value - 0.1 * entropy,
        entropy=6 / 3, clip_fraction=2 / 3, value_clip_fraction=2 / 3,
        ratio_mean=(1.5 + 1.1 + 0.5) / 3, ratio_max=1.5,
        approx_kl=(0.5 - LOG(1.5) + 0.1 - LOG(1.1) - 0.5 - LOG(0.5)) / 3,
    )  # fmt: skip


@pytest.mark.parametrize(("changes", "kl_loss"), [
    ({"kl_in": "reward"}, 0.0),
    ({"kl_estimator": "full"}, 0.25 * 0.3 + 0.25 * 0.6 + 0.5 * 0.9),
])  # fmt: skip
def test_the_coefficient_is_that_of_the_argument(changes: dict[str, Any], kl_loss: float) -> None:
    cheap, dear = (terms(config(**changes), kl_coef=coef) for coef in (0.0, 3.0))
    check(dear, kl_loss=kl_loss, loss=cheap.loss.item() + 3.0 * kl_loss)


def test_policy_and_critic_apart_add_up_to_both_together() -> None:
    both = terms(config())
    apart = sum_terms([terms(config(), values=None), terms(config(), policy=None)])
    for field in fields(PPOTerms):
        found, expected = getattr(apart, field.name), getattr(both, field.name)
        torch.testing.assert_close(found.double(), expected.double())


def test_only_the_loss_has_a_gradient() -> None:
    logprobs, values = OUTPUTS.logprobs.clone().requires_grad_(), VALUES.clone().requires_grad_()
    found = terms(config(), policy=replace(OUTPUTS, logprobs=logprobs), values=values)
    assert [f.name for f in fields(PPOTerms) if getattr(found, f.name).requires_grad] == ["loss"]


@pytest.mark.parametrize(("reduction", "entropy"), [
    ("token_mean", (1 + 2 + 3) / 3),
    ("sequence_mean", ((1 + 2) / 2 + 3) / 2),
    ("constant", (1 + 2 + 3) / (2 * 4)),
])  # fmt: skip
@pytest.mark.parametrize("ent_coef", [0.0, 0.1])
def test_what_the_loss_is_the_sum_of(reduction: Any, entropy: float, ent_coef: float) -> None:
    """Entropies 1, 2 and 3 of a response of 2 tokens and one of 1, of at most 4.

    The entropy in the loss is weighted as the losses are; the statistic is the mean over tokens.
    """
    weights = token_weights(MASK, reduction, max_response_tokens=4).double()
    found = ppo_terms(
        experience(), weights, MASK.sum(), config(), kl_coef=2.0, ent_coef=ent_coef, policy=OUTPUTS,
        policy_losses=losses(OUTPUTS, experience(), config()), values=VALUES,
    )  # fmt: skip
    total = found.policy_loss + 2.0 * found.kl_loss + 0.5 * found.value_loss
    check(found, entropy=2.0, loss=total.item() - ent_coef * entropy)
    is_sum_of_fields = abs(found.loss - (total - ent_coef * found.entropy)).item() < 1e-7
    assert is_sum_of_fields == (reduction == "token_mean" or ent_coef == 0)


ROOM = 8  # tokens a response may have; no drawn response is longer
# Weights are fp32: a sum of a few is good to about 1e-7 of it.
FP32 = {"rtol": 1e-6, "atol": 1e-7}
reductions = st.sampled_from(get_args(Reduction))


def weights(mask: Tensor, reduction: Reduction) -> Tensor:
    return token_weights(mask, reduction, max_response_tokens=ROOM)


def slow_mean(losses: Tensor, lengths: tuple[int, ...], reduction: Reduction) -> Tensor:
    """The reduced loss, from the rows of real tokens."""
    rows = [row[:length] for row, length in zip(losses, lengths, strict=True)]
    if reduction == "token_mean":
        return torch.cat(rows).mean()
    if reduction == "sequence_mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / ROOM for row in rows]).mean()


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # Four real tokens; two responses of three and one; room for eight.
        ("token_mean", [[1 / 4, 1 / 4, 1 / 4], [1 / 4, 0, 0]]),
        ("sequence_mean", [[1 / 6, 1 / 6, 1 / 6], [1 / 2, 0, 0]]),
        ("constant", [[1 / 16, 1 / 16, 1 / 16], [1 / 16, 0, 0]]),
    ],
)
def test_weights_by_hand(reduction: Reduction, expected: list[list[float]]) -> None:
    mask = torch.tensor([[T, T, T], [T, F, F]])
    close(weights(mask, reduction), torch.tensor(expected), rtol=1e-6)


@drawn
@given(ragged(), reductions, st.integers(1, 3))
def test_micro_batches_add_up_to_the_loss_of_the_minibatch(
    batch: Ragged, reduction: Reduction, size: int
) -> None:
    losses, mask = batch.normal(0), batch.mask
    parts = zip(
        losses.split(size), mask.split(size), weights(mask, reduction).split(size), strict=True
    )
    found = sum((masked_sum(w * x, m) for x, m, w in parts), torch.zeros((), dtype=torch.float64))
    close(found, slow_mean(losses, batch.lengths, reduction), **FP32)
