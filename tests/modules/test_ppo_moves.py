"""Which parameters each part of PPO's loss moves, and where to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_rlhf.modules.ppo import PPOModule

from .conftest import grads, within_fit
from .experiences import (
    ADAPTER,
    HEAD,
    Make,
    logprobs_now,
    moved_by,
    named,
    nothing_to_gain,
    off_policy,
    on_policy,
    update,
)


def moved_by_update(module: PPOModule, **fields_: Tensor) -> set[str]:
    return moved_by(module, replace(off_policy(module), **fields_))


def test_the_whole_loss_moves_policy_and_value_head(make_ppo: Make, architecture: str) -> None:
    module = make_ppo(architecture)
    assert moved_by_update(module) == named(module, ADAPTER, HEAD)
    assert set(module.state_dict()) == named(module, ADAPTER, HEAD)


def test_the_value_loss_alone(make_ppo: Make, architecture: str) -> None:
    module = make_ppo(architecture, ent_coef=0.0, vf_coef=1.0)
    moved = moved_by_update(module, advantages=nothing_to_gain(module))
    assert moved == named(module, ADAPTER, HEAD)


def test_a_value_head_at_zero_shields_the_policy(make_ppo: Make) -> None:
    # V = w h + b with w = 0: the slope in h is 0, the slopes in w and b are not.
    module = make_ppo(fresh=True, ent_coef=0.0, vf_coef=1.0)
    assert moved_by_update(module, advantages=nothing_to_gain(module)) == named(module, HEAD)


def test_the_policy_loss_alone(make_ppo: Make, architecture: str) -> None:
    module = make_ppo(architecture, ent_coef=0.0, vf_coef=0.0)
    assert moved_by_update(module) == named(module, ADAPTER)


def test_the_entropy_bonus_alone(make_ppo: Make) -> None:
    module = make_ppo(ent_coef=1.0, vf_coef=0.0)
    assert moved_by_update(module, advantages=nothing_to_gain(module)) == named(module, ADAPTER)


def test_no_loss_no_move(make_ppo: Make) -> None:
    module = make_ppo(ent_coef=0.0, vf_coef=0.0)
    assert moved_by_update(module, advantages=nothing_to_gain(module)) == set()


def test_a_step_raises_what_did_well_and_lowers_what_did_badly(make_ppo: Make) -> None:
    module = make_ppo(ent_coef=0.0, vf_coef=0.0, lr=1e-4)
    experience = on_policy(module)
    mask = experience.response_mask
    good = torch.arange(8)[:, None] < 4
    experience = replace(experience, advantages=torch.where(good, 1.0, -1.0) * mask)

    before = logprobs_now(module, experience)
    within_fit(module, lambda: update(module, experience))
    change = (logprobs_now(module, experience) - before).sum(1)
    assert change[:4].sum() > 1e-3
    assert change[4:].sum() < -1e-3


def test_the_entropy_bonus_raises_entropy(make_ppo: Make) -> None:
    module = make_ppo(ent_coef=1.0, vf_coef=0.0)
    experience = replace(on_policy(module), advantages=nothing_to_gain(module))
    stats = within_fit(module, lambda: [update(module, experience) for _ in range(3)])
    assert stats[0].entropy < stats[1].entropy < stats[2].entropy


def test_the_critic_approaches_its_targets(make_ppo: Make) -> None:
    module = make_ppo(ent_coef=0.0, vf_coef=1.0, clip_range_vf=100.0, lr=1e-3)
    experience = replace(on_policy(module), advantages=nothing_to_gain(module))
    stats = within_fit(module, lambda: [update(module, experience) for _ in range(20)])
    assert stats[-1].value_loss < 0.7 * stats[0].value_loss


def test_a_long_gradient_is_cut(make_ppo: Make) -> None:
    module = make_ppo(max_grad_norm=1e-3)
    experience = off_policy(module)
    stats = within_fit(module, lambda: update(module, experience))
    norm = torch.stack([g.square().sum() for g in grads(module).values()]).sum().sqrt()
    assert stats.grad_norm > 1e-2  # what it was before
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)
