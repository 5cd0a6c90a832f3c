"""Estimators that read more than returns: by hand, and as other codebases; trials of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.experience import ADVANTAGES, AdvantageBatch, Advantages
from lightning_rlhf.core.kl import ESTIMATORS, TokenLogprobs
from lightning_rlhf.core.policy_losses import fault_of_advantage, fault_of_kl

from .configs import ppo_config
from .conftest import close

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/advantages.json").read_text())


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def batch_of(mask: Any, changes: dict[str, Any], **given: Any) -> AdvantageBatch:
    mask = torch.tensor(mask).bool()
    zeros, row = torch.zeros(mask.shape).double(), torch.zeros(len(mask)).double()
    plain = {"rewards": zeros, "values": zeros, "baseline": row, "component_scores": row[:, None],
             "weights": double([1.0])}  # fmt: skip
    tensors = plain | {name: double(numbers) for name, numbers in given.items()}
    if tensors["rewards"].dim() == 1:  # of the last token
        last = mask.sum(dim=1, keepdim=True) - 1
        tensors["rewards"] = zeros.scatter(1, last, tensors["rewards"][:, None])
    return AdvantageBatch(**tensors, mask=mask, config=ppo_config(**changes))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["source"])
def test_other_codebases_have_the_same_advantages(case: dict[str, Any]) -> None:
    samples = {"samples_per_prompt": case["samples_per_prompt"], "rollout_batch_size": 8}
    given = dict(case["inputs"])
    batch = batch_of(given.pop("mask"), samples | case["config"], **given)
    found = ADVANTAGES[case["estimator"]](batch)
    if "row_advantages" in case:
        close(found.advantages[:, 0], double(case["row_advantages"]), rtol=1e-8)
        return
    close(found.advantages, double(case["advantages"]), rtol=1e-8)
    returns = batch.returns if found.returns is None else found.returns
    close(returns, double(case["returns"]), rtol=1e-8)


@pytest.mark.parametrize("case", GOLDEN["kl"]["cases"], ids=lambda case: case["estimator"])
def test_other_codebases_have_the_same_kl_and_gradient(case: dict[str, Any]) -> None:
    tensors = {name: double(numbers) for name, numbers in GOLDEN["kl"]["inputs"].items()}
    mask = tensors.pop("mask").bool()
    leaf = tensors["logprobs"].requires_grad_()
    found = ESTIMATORS[case["estimator"]](TokenLogprobs(**tensors))
    close(torch.where(mask, found, 0).detach(), double(case["kl"]), rtol=1e-8)
    torch.where(mask, found, 0).sum().backward()
    close(leaf.grad, double(case["grad_logprobs"]), rtol=1e-8)


def test_the_mean_of_each_estimate_and_its_gradient() -> None:
    # For p = softmax(s): d KL(p || q) / d s_v = p_v (log p_v - log q_v - KL), which k3_weighted has
    # on tokens of another policy too, k2 and k3+ on the policy's own; k3 has d KL(q || p) / d s_v =
    # p_v - q_v there, and k1 nothing.
    p, q, old = (
        torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double().log_softmax(1)
    )
    d = p - q
    forward, backward = p.exp() * (d - (p.exp() * d).sum()), p.exp() - q.exp()
    for name, sampler, expected in (
        ("k3_weighted", old, forward), ("k3_weighted", p, forward), ("k3+", p, forward),
        ("k2", p, forward), ("k3", p, backward), ("k1", p, torch.zeros(6).double()),
    ):  # fmt: skip
        leaf = p.clone().requires_grad_()
        logprobs = leaf.log_softmax(0)
        tokens = TokenLogprobs(logprobs=logprobs, old_logprobs=sampler, ref_logprobs=q)
        found = (sampler.exp() * ESTIMATORS[name](tokens)).sum()
        if name != "k2":  # which is biased
            close(found.detach(), (p.exp() * d).sum())
        found.backward()
        close(leaf.grad, expected)


MASK = [[1, 1, 1, 1], [1, 1, 0, 0]]
# One reward of 1 at the last token, values of 1/2: delta = 0 .. 0, 1/2. Lengths 4 and 2 give
# lambda 1 - 1/(4 alpha) and 1 - 1/(2 alpha): 3/4 and 1/2 at alpha 1.
VAPO = [
    (1.0, None, [[27 / 128, 9 / 32, 3 / 8, 1 / 2], [1 / 4, 1 / 2, 0, 0]], None),
    (1e-9, 1.0, [[0, 0, 0, 0.5], [0, 0.5, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]]),
    (1e9, 0.0, [[0.5] * 4, [0.5, 0.5, 0, 0]], [[0.5, 0.5, 0.5, 1], [0.5, 1, 0, 0]]),
]


@pytest.mark.parametrize(("alpha", "critic", "advantages", "returns"), VAPO)
def test_lambdas_by_length_and_for_the_critic(
    alpha: float, critic: float | None, advantages: Any, returns: Any
) -> None:
    changes = {"gae_lambda_alpha": alpha, "gae_lambda_critic": critic, "gamma": 1.0}
    values = double(MASK) / 2
    found = ADVANTAGES["gae"](batch_of(MASK, changes, rewards=[1, 1], values=values.tolist()))
    close(found.advantages, double(advantages), atol=1e-7)
    expected = double(advantages) + values if returns is None else double(returns)
    close(found.returns, expected, atol=1e-7)


def test_components_are_standardised_before_they_are_added() -> None:
    # Groups of two, whose deviation is |difference| / sqrt(2), so that a difference becomes +- r,
    # r = 1/sqrt(2), however large it is, but for the 1e-4. Weights 1 and 1/2: S = r (1.5, -1.5,
    # 0.5, -0.5), deviation over the 4 responses r sqrt(5 / 3).
    scores = [[1e6, 1e7], [0, 0], [1e6, 0], [0, 1e7]]
    changes = {"samples_per_prompt": 2, "kl_in": "loss", "kl_estimator": "k3"}
    given = {"component_scores": scores, "weights": [1.0, 0.5]}
    batch = batch_of([[1, 1], [1, 0]] * 2, changes | {"advantage": "gdpo"}, **given)
    found = ADVANTAGES["gdpo"](batch).advantages
    whole = double([1.5, -1.5, 0.5, -0.5]) / (5 / 3) ** 0.5
    close(found, torch.where(batch.mask, whole[:, None], 0), rtol=2e-4)


def test_returns_above_a_baseline() -> None:
    # Rewards to go at gamma 1/2: (1/4, 1/2, 1), minus 1/4; and (-2), minus 1.
    batch = batch_of([[1, 1, 1], [1, 0, 0]], {"gamma": 0.5}, rewards=[1, -2], baseline=[0.25, 1])
    for name in ("remax", "reinforce", "reinforce++"):
        found = ADVANTAGES[name](batch)
        assert found.advantages.tolist() == [[0, 0.25, 0.75], [-3, 0, 0]]


@pytest.mark.parametrize(("estimator", "changes", "fault"), [
    (lambda b: b.rewards, {}, "which returned Tensor"),
    (lambda b: Advantages(advantages=b.rewards), {}, "returned no returns for the critic"),
    (lambda b: Advantages(advantages=b.returns[:, :1]), {"vf_coef": 0.0}, "have shape [4, 1]"),
    (lambda b: Advantages(advantages=b.returns / b.returns[:2, 0].std()),  # a group all alike
     {"vf_coef": 0.0}, "are not finite"),
    (lambda b: Advantages(advantages=b.returns.requires_grad_()), {"vf_coef": 0.0}, "a gradient"),
    (lambda b: Advantages(advantages=b.returns), {"vf_coef": 0.0}, None),
    *((one, {"samples_per_prompt": 4}, None) for one in ADVANTAGES.values()
      if one is not ADVANTAGES["gae"]),
    (ADVANTAGES["gae"], {"vf_coef": 0.1}, None),
])  # fmt: skip
def test_an_advantage_of_the_user_s_is_tried(
    estimator: Any, changes: dict[str, Any], fault: str | None
) -> None:
    plain = {"advantage": "a.py:f", "samples_per_prompt": 2, "vf_coef": 0.0 if changes else 0.1}
    found = fault_of_advantage(estimator, ppo_config(**plain | changes))
    assert found is fault is None or fault in found


@pytest.mark.parametrize(("estimator", "where", "fault"), [
    (lambda t: 1.0, "reward", "which returned float"),
    (lambda t: t.logprobs.sum(), "reward", "whose estimates have shape [] for a batch of [3, 4]"),
    (lambda t: t.ref_logprobs, "loss", "whose estimates have no gradient in logprobs"),
    (lambda t: t.ref_logprobs, "reward", None),
    (lambda t: t.logprobs ** 0.5, "reward", "whose estimates are not finite"),
    (ESTIMATORS["k3_weighted"], "loss", None),
])  # fmt: skip
def test_an_estimator_of_the_user_s_is_tried(estimator: Any, where: str, fault: str | None) -> None:
    found = fault_of_kl(estimator, ppo_config(kl_in=where, kl_estimator="a.py:k"))
    assert found is fault is None or fault in found
