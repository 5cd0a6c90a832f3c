"""Losses of policy, critic and pairs: by hand, and the sign and size of the gradient."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.losses import (
    bradley_terry_loss,
    centering_loss,
    kto_loss,
    policy_loss,
    preference_loss,
    value_loss,
)

from .configs import dpo_config
from .conftest import close, drawn

sizes_and_seeds = st.tuples(st.integers(1, 20), st.integers(0, 2**20))


def draw(size_and_seed: tuple[int, int], count: int) -> Tensor:
    size, seed = size_and_seed
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


# clip_range_vf 1/2 about an old value of 7, from which all numbers are counted. The slope in V is
# V - R where the plain error is the larger, else 0.
@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (0.25, 1, 9 / 32, -0.75),  # inside: 1/2 (3/4)^2
        (2, 3, 25 / 8, 0.0),  # went up too far, the target is further: 1/2 (1/2 - 3)^2
        (-2, -3, 25 / 8, 0.0),  # the same, downwards
        (2, 0, 2.0, 2.0),  # went up too far and past the target: pulled back, 1/2 2^2
        (2, -1, 9 / 2, 3.0),
        (0, 0, 0.0, 0.0),
    ],
)
def test_value_loss_by_hand(value: float, target: float, loss: float, slope: float) -> None:
    values = leaf(7 + value)
    old, returns = leaf(7.0).detach(), leaf(7 + target).detach()
    found = value_loss(values, old, returns, clip_range_vf=0.5)
    close(found, torch.tensor([loss], dtype=torch.float64))
    found.sum().backward()
    close(values.grad, torch.tensor([slope], dtype=torch.float64))


def test_without_a_clip_the_old_value_has_no_say() -> None:
    # (1/2 3^2, 1/2 (-1)^2), slope V - R.
    values = leaf(2.0, -3.0)
    returns, old = leaf(-1.0, -2.0).detach(), leaf(math.nan, 50.0).detach()
    loss = value_loss(values, old, returns, clip_range_vf=None)
    assert loss.tolist() == [4.5, 0.5]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3, -1]


def test_centering_by_hand() -> None:
    # (1 + 2)^2 = 9, (1 - 1)^2 = 0, (-3 + 1)^2 = 4; slope 2 (chosen + rejected) on either side.
    chosen = torch.tensor([1.0, 1.0, -3.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([2.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    loss = centering_loss(chosen, rejected)
    assert loss.tolist() == [9, 0, 4]
    loss.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == rejected.grad.tolist() == [6, 0, -4]


# sigmoid(ln 3) = 3/4: a pair that leads by ln 3 wins with probability 3/4, one behind by it with
# 1/4. A margin is taken off the lead. With one label in ten believed to be wrong the loss is
# 0.9 ln 4/3 + 0.1 ln 4, its slope sigmoid(d) - 0.9 = -0.15; else 0.9 ln 4 + 0.1 ln 4/3, 1/4 - 0.9.
WON, LOST = math.log(4 / 3), math.log(4)


@pytest.mark.parametrize(
    ("leads", "margin", "smoothing", "losses", "slopes"),
    [
        ((math.log(3), -math.log(3)), (0, 0), 0.0, (WON, LOST), (-1 / 4, -3 / 4)),
        ((math.log(3) + 0.5, 0), (0.5, math.log(3)), 0.0, (WON, LOST), (-1 / 4, -3 / 4)),
        ((math.log(3), -math.log(3)), (0, 0), 0.1,
         (0.9 * WON + 0.1 * LOST, 0.9 * LOST + 0.1 * WON), (-0.15, -0.65)),
        ((3, 0), (3, 0), 0.3, (math.log(2), math.log(2)), (-0.2, -0.2)),
    ],
)  # fmt: skip
def test_bradley_terry_by_hand(
    leads: tuple[float, ...], margin: tuple[float, ...], smoothing: float,
    losses: tuple[float, ...], slopes: tuple[float, ...],
) -> None:  # fmt: skip
    chosen, rejected = leaf(5 + leads[0], 2 + leads[1]), leaf(5, 2)
    loss = bradley_terry_loss(
        chosen, rejected, margin=leaf(*margin).detach(), label_smoothing=smoothing
    )
    close(loss, leaf(*losses).detach())
    loss.sum().backward()
    close(chosen.grad, leaf(*slopes).detach())
    close(rejected.grad, -leaf(*slopes).detach())


def test_bradley_terry_far_from_a_tie_stays_finite() -> None:
    # -log sigmoid(-1000) = 1000 and -log sigmoid(1000) = 0 to every digit a float has.
    chosen, rejected = torch.tensor([0.0, 1000.0]), torch.tensor([1000.0, 0.0])
    assert bradley_terry_loss(chosen, rejected).tolist() == [1000, 0]


# beta = 2 and gamma = ln 2 at probabilities of 1/2 and 1/4: h = ln 2, and the odds are 1 and 1/3.
@pytest.mark.parametrize(
    ("loss_type", "loss", "tie", "slopes"),
    [
        ("sigmoid", math.log(5 / 4), math.log(2), (-2 / 5, 2 / 5)),  # sigmoid(2 ln 2) = 4/5
        ("sigmoid_norm", math.log(5 / 4), math.log(2), (-2 / 5, 2 / 5)),
        ("cpo", math.log(5 / 4), math.log(2), (-2 / 5, 2 / 5)),
        # The target is 1/4, the slope 2 (h - 1/4).
        ("ipo", (math.log(2) - 1 / 4) ** 2, 1 / 16,
         (2 * math.log(2) - 1 / 2, 1 / 2 - 2 * math.log(2))),
        # sigmoid(2 ln 2 - ln 2) = 2/3, and sigmoid(-ln 2) = 1/3 at a tie.
        ("simpo", math.log(3 / 2), math.log(3), (-2 / 3, 2 / 3)),
        # sigmoid(ln 3) = 3/4; the slope is -2 / 4 times 1 / (1 - p), which is 2 and 4/3.
        ("orpo", 2 * math.log(4 / 3), 2 * math.log(2), (-1.0, 2 / 3)),
    ],
)  # fmt: skip
def test_preference_losses_by_hand(
    loss_type: str, loss: float, tie: float, slopes: tuple[float, float]
) -> None:
    chosen, rejected = leaf(-math.log(2), -1.0), leaf(-math.log(4), -1.0)
    settings = {"loss_type": loss_type, "beta": 2.0, "simpo_gamma": math.log(2)}
    found = preference_loss(chosen, rejected, dpo_config(**settings))
    close(found, leaf(loss, tie).detach())
    found[0].backward()
    close(torch.stack([chosen.grad[0], rejected.grad[0]]), leaf(*slopes).detach())
    # Wrong labels: the other side of a pair is the chosen one.
    wrong = preference_loss(rejected, chosen, dpo_config(**settings))
    smoothed = preference_loss(chosen, rejected, dpo_config(**settings, label_smoothing=0.25))
    close(smoothed, 0.75 * found + 0.25 * wrong)


def test_orpo_stays_finite_where_a_response_is_certain() -> None:
    chosen, rejected = leaf(0.0, -1e-9), leaf(-1.0, 0.0)
    preference_loss(chosen, rejected, dpo_config(loss_type="orpo")).sum().backward()
    assert torch.stack([chosen.grad, rejected.grad]).isfinite().all()


def test_kto_by_hand() -> None:
    """beta = 2, kl = 1/2, and beta (ratio - kl) is ln 3 or 0: sigmoid is 3/4 or 1/2.

    The slope of the loss of a good response is -weight beta sigmoid (1 - sigmoid)."""
    config = dpo_config(loss_type="kto", beta=2.0, desirable_weight=1.5, undesirable_weight=0.5)
    ratios, labels = leaf(*[0.5 + math.log(3) / 2] * 2, 0.5), torch.tensor([True, False, True])
    found = kto_loss(ratios, labels, leaf(0.5).detach(), config)
    close(found, leaf(1.5 / 4, 0.5 * 3 / 4, 1.5 / 2).detach())
    found.sum().backward()
    close(ratios.grad, leaf(-1.5 * 2 * 3 / 16, 0.5 * 2 * 3 / 16, -1.5 * 2 / 4).detach())


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "preference_losses.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["inputs"])
@pytest.mark.parametrize("name", GOLDEN["losses"])
def test_preference_losses_and_their_gradients_are_those_of_others(name: str, case: str) -> None:
    expected, inputs = GOLDEN["losses"][name]["cases"][case], GOLDEN["inputs"][case]
    numbers = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in inputs.items()}
    config = dpo_config(loss_type=name.partition(",")[0], **expected["keys"])
    leaves, read, tokens = {}, {}, {}
    for side in ("chosen", "rejected"):
        mask, logprobs = numbers[f"{side}_mask"], numbers[f"policy_{side}_token_logps"]
        leaves[side] = logprobs.clone().requires_grad_()
        reference = numbers[f"ref_{side}_token_logps"] if config.has_reference else 0.0
        summed = ((leaves[side] - reference) * mask).sum(dim=1)
        tokens[side] = mask.sum(dim=1)
        read[side] = summed if config.sums else summed / tokens[side]
    if config.loss_type == "kto":
        kl = (numbers["policy_kl_logps"] - numbers["ref_kl_logps"]).mean().clamp(min=0)
        labels = torch.arange(2 * len(read["chosen"])) < len(read["chosen"])
        found = kto_loss(torch.cat([*read.values()]), labels, kl, config).mean()
    else:
        found = preference_loss(read["chosen"], read["rejected"], config).mean()
    if "nll" in expected:  # the SFT term, with sft_coef=1
        mask = numbers["chosen_mask"]
        found = found - (leaves["chosen"] * mask).sum() / tokens["chosen"].sum()
    close(found, torch.tensor(expected["loss"], dtype=torch.float64), rtol=1e-8)
    found.backward()
    for side, one in leaves.items():
        gradient = torch.tensor(expected[f"grad_{side}"], dtype=torch.float64)
        close(one.grad, gradient, rtol=1e-8)


@drawn
@given(sizes_and_seeds, st.floats(0.05, 2), st.floats(0, 0.49))
def test_preference_losses_and_their_gradients(
    drawn_: tuple[int, int], beta: float, smoothing: float
) -> None:
    """d loss / d chosen is -beta ((1 - e) sigmoid(-beta h) - e sigmoid(beta h)), and of ipo
    2 (h - (1 - 2 e) / (2 beta)): wrong labels bring its aim nearer to 0."""
    sides = 3 * draw(drawn_, 2)
    h, aim = sides[0] - sides[1], 1 / (2 * beta)
    win, lose = 1 / (1 + (-beta * h).exp()), 1 / (1 + (beta * h).exp())
    for loss_type, loss, slope in (
        ("sigmoid", -(1 - smoothing) * win.log() - smoothing * lose.log(),
         -beta * ((1 - smoothing) * lose - smoothing * win)),
        ("ipo", (1 - smoothing) * (h - aim) ** 2 + smoothing * (h + aim) ** 2,
         2 * (h - (1 - 2 * smoothing) * aim)),
    ):  # fmt: skip
        chosen, rejected = (side.clone().requires_grad_() for side in sides)
        config = dpo_config(loss_type=loss_type, beta=beta, label_smoothing=smoothing)
        found = preference_loss(chosen, rejected, config)
        close(found, loss, atol=1e-10)
        found.sum().backward()
        close(chosen.grad, slope, atol=1e-10)
        close(rejected.grad, -slope, atol=1e-10)


# The loss is max(-A r, -A clip(r)), its slope in the log-probability -A r where the first is the
# larger, else 0.
SYMMETRIC = (0.2, None, None)  # the ratio is kept within 0.8 .. 1.2
HIGHER = (0.2, 0.5, None)  # 0.8 .. 1.5
DUAL = (0.2, None, 3.0)  # and where A < 0 the loss is at most 3 |A|


@pytest.mark.parametrize(
    ("rule", "advantage", "ratio", "loss", "slope"),
    [
        (SYMMETRIC, 2, 1.5, -2.4, 0.0),  # good and already much likelier: nothing more to gain
        (SYMMETRIC, 2, 0.5, -1.0, -1.0),  # good and less likely than before: pulled back up
        (SYMMETRIC, -2, 1.5, 3.0, 3.0),  # bad and much likelier: pushed down
        (SYMMETRIC, -2, 0.5, 1.6, 0.0),  # bad and already much less likely: nothing more to gain
        (SYMMETRIC, 2, 1.0, -2.0, -2.0),  # an iteration's first step: the plain policy gradient
        (SYMMETRIC, -2, 1.0, 2.0, 2.0),
        (SYMMETRIC, -2, 9.0, 18.0, 18.0),  # no bound on this side
        (HIGHER, 2, 1.4, -2.8, -2.8),  # good and likelier: goes on where 1.2 would have stopped it
        (HIGHER, 2, 1.6, -3.0, 0.0),
        (HIGHER, -2, 0.7, 1.6, 0.0),  # the lower end stays where it was
        (DUAL, -2, 2.9, 5.8, 5.8),
        (DUAL, -2, 3.5, 6.0, 0.0),  # bad and far likelier: no longer listened to
        (DUAL, 2, 3.5, -2.4, 0.0),  # good tokens do not meet it
    ],
)
def test_policy_loss_by_hand(
    rule: tuple[float, float | None, float | None], advantage: float, ratio: float, loss: float,
    slope: float,
) -> None:  # fmt: skip
    clip_range, high, dual_clip = rule
    old, logprobs = leaf(-1.25).detach(), leaf(-1.25 + math.log(ratio))
    found = policy_loss(
        logprobs, old, leaf(advantage).detach(), clip_range=clip_range, clip_range_high=high,
        dual_clip=dual_clip,
    )  # fmt: skip
    close(found, torch.full_like(old, loss))
    found.sum().backward()
    close(logprobs.grad, torch.full_like(old, slope))
