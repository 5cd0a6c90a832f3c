"""Advantages without a critic: who is compared with whom, and what is trained."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.models.config import VALUE

from .conftest import Outputs, changed, close, fit, parameters, prompts
from .experiences import ADAPTER, Make, named, on_policy

SAMPLES = {"rloo": 4, "grpo": 4, "dr_grpo": 2, "reinforce++": 1}


@pytest.mark.parametrize("advantage", SAMPLES)
def test_it_runs_without_a_critic(make_ppo: Make, architecture: str, advantage: str) -> None:
    samples = SAMPLES[advantage]
    module = make_ppo(architecture, advantage=advantage, samples_per_prompt=samples)
    optimizer, outputs = module.configure_optimizers()["optimizer"], Outputs()
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    policy = named(module, ADAPTER)
    assert {n for n, p in module.named_parameters() if id(p) in trained} == policy
    assert VALUE not in module.roles.heads
    before = parameters(module)
    fit(module, [prompts(8 // samples, seed=seed) for seed in range(2)], [outputs])
    assert changed(before, parameters(module)) == policy
    for step in outputs.steps:
        assert len(step.experience) == 8
        assert not step.experience.old_values.any()
        first, *_, last = step.updates
        assert first.approx_kl.abs() <= 1e-10
        assert (first.ratio_mean - 1).abs() <= 1e-5
        assert last.approx_kl > 1e-7
        assert all(stats.value_loss == 0 for stats in step.updates)


def test_responses_to_one_prompt_stand_in_a_row(make_ppo: Make) -> None:
    module, outputs = make_ppo(advantage="rloo", samples_per_prompt=4), Outputs()
    asked = prompts(2)
    fit(module, [asked], [outputs])
    experience = outputs.steps[0].experience
    assert experience.index.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    width = asked.tokens.shape[1]
    for row in range(8):
        assert torch.equal(experience.tokens[row, :width], asked.tokens[row // 4])
        assert torch.equal(experience.mask[row, :width], asked.mask[row // 4])
    said = {tuple(row[real].tolist()) for row, real in
            zip(experience.responses, experience.response_mask, strict=True)}  # fmt: skip
    assert len(said) > 4  # each is drawn by itself


def test_a_response_is_compared_with_the_others_to_its_prompt(make_ppo: Make) -> None:
    module = make_ppo(advantage="rloo", samples_per_prompt=4, whiten_advantages="none", kl_coef=0.2)
    experience = on_policy(module, rows=8)  # rows 0 to 3 and 4 to 7 are the groups
    paid = experience.rewards.sum(1)  # gamma 1: the whole return
    assert experience.kl.abs().max() > 1e-3
    for i in range(8):
        group = [j for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i]
        expected = paid[i] - sum(paid[j] for j in group) / 3
        real = experience.response_mask[i]
        close(experience.advantages[i], torch.where(real, expected, 0.0))
