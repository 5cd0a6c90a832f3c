"""Losses of the policy by name: two tokens by hand, and the numbers of other codebases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.losses import importance_factors
from lightning_rlhf.core.policy_losses import (
    POLICY_LOSSES,
    PolicyBatch,
    PolicyLosses,
    example_batch,
    fault_of_loss,
)
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.shaping import NO_SCORES, shape_score
from lightning_rlhf.core.validation import allowed

from .configs import ppo_config
from .conftest import close

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/policy_losses.json").read_text())
LOG = math.log


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def batch_of(
    logprobs: Any, old: Any, advantages: Any, mask: Any, changes: dict[str, Any]
) -> PolicyBatch:
    return PolicyBatch(
        logprobs=double(logprobs).requires_grad_(), old_logprobs=double(old),
        ref_logprobs=double(old), advantages=double(advantages), mask=torch.tensor(mask).bool(),
        config=ppo_config(**changes),
    )  # fmt: skip


def reduced(losses: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """As `token_weights`, in float64."""
    rows, total = mask.sum(dim=1), torch.where(mask, losses, 0)
    if reduction == "token_mean":
        return total.sum() / rows.sum()
    if reduction == "sequence_mean":
        return (total.sum(dim=1) / rows.clamp(min=1)).mean()
    return total.sum() / mask.numel()


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: f"{case['estimator']}-{case['case']}"
)
def test_other_codebases_have_the_same_losses_and_gradients(case: dict[str, Any]) -> None:
    given = GOLDEN["inputs"][case["case"]]
    advantages = given[case["advantages"]]
    if case["advantages"] == "advantages":
        advantages = [[one] * len(given["mask"][0]) for one in advantages]
    batch = batch_of(
        given["logprobs"], given["old_logprobs"], advantages, given["mask"], case["config"]
    )
    found = reduced(POLICY_LOSSES[case["policy_loss"]](batch).losses, batch.mask, case["reduction"])
    found.backward()
    scale = max(1.0, abs(case["loss"]))
    close(found.detach() / scale, double(case["loss"]) / scale, rtol=1e-8, atol=1e-8)
    expected = double(case["grad_logprobs"])
    close(batch.logprobs.grad, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", GOLDEN["importance_mask"], ids=lambda case: case["case"])
def test_other_codebases_leave_out_the_same_responses(case: dict[str, Any]) -> None:
    given = GOLDEN["inputs"][case["case"]]
    changes = {"clip_range": 0.2, "rollout": "vllm", "importance_cap": 1e30,
               "importance_mask": case["bounds"]}  # fmt: skip
    names = "logprobs", "old_logprobs", "advantages_tok", "mask"
    batch = batch_of(*(given[name] for name in names), changes)
    sampled: Any = SimpleNamespace(
        old_logprobs=batch.old_logprobs, sampler_logprobs=double(case["rollout_logprobs"]),
        response_mask=batch.mask,
    )  # fmt: skip
    factors = importance_factors(sampled, batch.config, "ppo")
    assert factors is not None
    found = reduced(POLICY_LOSSES["ppo"](batch).losses * factors, batch.mask, "token_mean")
    found.backward()
    close(found.detach(), double(case["loss"]), rtol=1e-8, atol=1e-8)
    close(batch.logprobs.grad, double(case["grad_logprobs"]), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", GOLDEN["overlong_penalty"], ids=lambda case: str(case["longest"]))
def test_other_codebases_price_long_responses_alike(case: dict[str, Any]) -> None:
    tokens, after = torch.tensor(case["tokens"]), case["longest"] - case["ramp"]
    config = ppo_config(overlong_after=after, overlong_ramp=case["ramp"])
    score = torch.full((5,), 0.5, dtype=torch.float64)
    found = shape_score(score, tokens > 0, tokens, config, NO_SCORES)
    close(found, 0.5 + double(case["penalty"]), rtol=1e-6)  # the division is in fp32


# Two tokens of ratios 2 and 1/2, whose geometric mean is 1: log pi = log 2 - 3 and log 1/2 - 3, of
# -3 at sampling; A = (1, -2), within 0.9 .. 1.4. Then a row of ratio 2 alone, with A = 3.
#   ppo         max(-2, -1.4) = -1.4, flat;  max(2 * 1/2, 2 * 0.9) = 1.8, flat;  -3 * 1.4, flat
#   gspo        s = 1: -1 and 2, each with half of the sum -1 + 2 as slope;  -3 * 1.4, flat
#   gspo_token  the same numbers, slopes -1 and 2
#   cispo       -1.4 log pi, slope -1.4;  0.9 * 2 log pi, slope 1.8;  -1.4 * 3 log pi
#   sapo        tau 1: -4 s(1), slope -8 s(1) s(-1);  tau 2: 4 s(-1), slope 4 s(1) s(-1)
S = 1 / (1 + math.exp(-1))
HAND: dict[str, tuple[list[list[float]], list[list[float]]]] = {
    "ppo": ([[-1.4, 1.8], [-4.2, 0]], [[0, 0], [0, 0]]),
    "gspo": ([[-1, 2], [-4.2, 0]], [[0.5, 0.5], [0, 0]]),
    "gspo_token": ([[-1, 2], [-4.2, 0]], [[-1, 2], [0, 0]]),
    "cispo": ([[-1.4 * (LOG(2) - 3), 1.8 * (-LOG(2) - 3)], [-4.2 * (LOG(2) - 3), 0]],
              [[-1.4, 1.8], [-4.2, 0]]),
    "sapo": ([[-4 * S, 4 * (1 - S)], [-12 * S, 0]],
             [[-8 * S * (1 - S), 4 * S * (1 - S)], [-24 * S * (1 - S), 0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_two_tokens_by_hand(name: str) -> None:
    changes = {"clip_range": 0.1, "clip_range_high": 0.4, "sapo_tau_pos": 1.0, "sapo_tau_neg": 2.0}
    batch = batch_of([[LOG(2) - 3, -LOG(2) - 3], [LOG(2) - 3, 0]], [[-3, -3], [-3, 0]],
                     [[1, -2], [3, 0]], [[1, 1], [1, 0]], changes)  # fmt: skip
    found = POLICY_LOSSES[name](batch)
    losses, slopes = map(double, HAND[name])
    close(torch.where(batch.mask, found.losses, 0), losses)
    torch.where(batch.mask, found.losses, 0).sum().backward()
    close(batch.logprobs.grad, slopes)
    if found.clipped is not None:
        expected = [[name == "ppo", name == "ppo"], [True, False]]
        assert (found.clipped & batch.mask).tolist() == expected


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_ratio_beyond_float32_has_a_finite_gradient(name: str) -> None:
    # e^100 is infinite in float32. A good token so much likelier is clipped and has no slope, but
    # for cispo, whose slope is -A (1 + clip_range).
    batch = batch_of([[-1.0]], [[-101.0]], [[2.0]], [[1]], {"clip_range": 0.2, "dual_clip": None})
    single = {n: x.float() for n, x in vars(batch).items() if n not in ("mask", "config")}
    logprobs = single.pop("logprobs").detach().requires_grad_()
    given = PolicyBatch(logprobs=logprobs, **single, mask=batch.mask, config=batch.config)
    POLICY_LOSSES[name](given).losses.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-2.4 if name == "cispo" else 0.0)


def test_the_names_in_the_configuration_are_those_of_the_table() -> None:
    words = allowed(get_type_hints(PPOConfig, include_extras=True)["policy_loss"])
    own = [name for name in POLICY_LOSSES if ":" not in name]  # the rest are of other tests
    assert words.split(", ")[:-1] == own


@pytest.mark.parametrize(("loss", "fault"), [
    (lambda b: b.logprobs, "which returned Tensor"),
    (lambda b: PolicyLosses(losses=b.logprobs.sum(1)), "whose losses have shape [3] for a batch"),
    (lambda b: PolicyLosses(losses=-b.advantages * b.old_logprobs), "have no gradient"),
    (lambda b: PolicyLosses(losses=(b.logprobs - b.old_logprobs) ** 2), "have no gradient"),
    (lambda b: PolicyLosses(losses=-b.advantages * b.logprobs.clamp(max=0) ** 0.5), "not finite"),
    (lambda b: PolicyLosses(losses=-b.logprobs * b.advantages / b.mask.sum()), "the other rows"),
    (lambda b: PolicyLosses(losses=-b.logprobs * b.advantages), None),
    *((loss, None) for loss in POLICY_LOSSES.values()),
])  # fmt: skip
def test_a_loss_of_the_user_s_is_tried(loss: Any, fault: str | None) -> None:
    found = fault_of_loss(loss, ppo_config(clip_range=1e-6))
    assert found is fault is None or fault in found


def test_the_batch_that_it_is_tried_on_is_as_documented() -> None:
    batch = example_batch(ppo_config())
    for name, tensor in vars(batch).items():
        if name not in ("mask", "config"):
            assert not tensor[~batch.mask].any(), name
    assert (batch.logprobs.detach()[batch.mask] <= 0).all()
