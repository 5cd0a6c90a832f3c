"""What one iteration leaves to the next: the KL coefficient, and the moments of all scores."""

import statistics
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.records import DecodedResponses, Experience
from lightning_rlhf.modules.ppo import PPOModule

from .conftest import END, Outputs, close, fit, prompts
from .experiences import Make
from .test_resampling import coarse


def steps(module: PPOModule, first: int = 0, last: int = 3) -> list[dict[str, Any]]:
    outputs = Outputs()
    fit(module, [prompts(seed=seed) for seed in range(first, last)], [outputs])
    return outputs.steps


def last_token(experience: Experience) -> Tensor:
    mask = experience.response_mask
    return torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1


def check_price(found: list[dict[str, Any]], coefs: list[float]) -> None:
    """Each iteration reports its own coefficient, and uses it before the last token."""
    assert [step.kl_coef for step in found] == pytest.approx(coefs, rel=1e-6)
    for step, coef in zip(found, coefs, strict=True):
        experience = step.experience
        before = experience.response_mask & ~last_token(experience)
        close(experience.rewards[before], -coef * experience.kl[before])
        assert experience.kl[before].abs().max() > 1e-3


def test_a_linear_coefficient_ends_where_it_is_set_to_and_a_fixed_one_stays(make_ppo: Make) -> None:
    module = make_ppo(kl_coef=0.3, kl_control="linear", kl_coef_end=0.1, iterations=3)
    check_price(steps(module), [0.3, 0.2, 0.1])
    check_price(steps(make_ppo(kl_coef=0.3), last=2), [0.3, 0.3])


def test_the_entropy_bonus_moves_on_a_line(make_ppo: Make) -> None:
    """From 0, so that the entropy has a gradient although its first weight is 0."""
    changes = {"ent_coef": 0.0, "ent_coef_end": 0.4, "kl_coef": 0.0, "iterations": 2}
    for step, coef in zip(steps(make_ppo(**changes), last=2), (0.0, 0.4), strict=True):
        assert step.ent_coef == pytest.approx(coef)
        for one in step.updates:
            rest = one.policy_loss + 0.1 * one.value_loss
            assert one.loss.item() == pytest.approx((rest - coef * one.entropy).item(), abs=1e-5)


def test_an_adaptive_price_follows_the_kl_a_response(make_ppo: Make) -> None:
    kl = steps(make_ppo(), last=1)[0].experience.kl.sum(1).mean().item()
    module = make_ppo(
        kl_coef=0.1, kl_control="adaptive", kl_target=kl / 1.1, kl_horizon=80.0
    )  # an error of 0.1, of which 8 / 80 counts
    check_price(steps(module, last=2), [0.1, 0.1 * 1.01])


def one_number(decoded: DecodedResponses) -> Tensor:
    """Many different scores, and never the same ones twice."""
    rollout = decoded.rollout
    said = torch.where(rollout.response_mask, rollout.responses, 0)
    return said.float().sum(1) / 10 + 3


@pytest.mark.parametrize("rule", ["running", "running_scale"])
def test_scores_are_normalised_by_all_of_them_so_far(make_ppo: Make, rule: str) -> None:
    module = make_ppo(reward=one_number, score_normalization=rule, kl_coef=0.0, missing_eos="none")
    seen: list[float] = []
    for step in steps(module):
        experience = step.experience
        seen += experience.score.tolist()  # this batch is among them
        shift = statistics.fmean(seen) if rule == "running" else 0.0
        expected = (experience.score - shift) / statistics.pstdev(seen)
        close(experience.rewards.sum(1), expected)
        close(experience.rewards[last_token(experience)], expected)
    assert len(seen) == 24
    assert module.moments.whole.count == 24


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_control": "adaptive", "kl_target": 1e-4, "kl_horizon": 80.0,
         "score_normalization": "running_scale"},
        {"advantage": "grpo", "samples_per_prompt": 2, "resample_groups": 1, "reward": coarse},
        {"advantage": "reinforce", "baseline_decay": 0.3},
    ],
    ids=lambda changes: next(iter(changes.values())),
)  # fmt: skip
def test_a_resumed_run_remembers_both_exactly(make_ppo: Make, changes: dict[str, Any]) -> None:
    settings = {"reward": one_number, **changes}
    unbroken = make_ppo(**settings)
    third = steps(unbroken)[2]

    broken = make_ppo(**settings)
    steps(broken, last=2)
    checkpoint: dict[str, Any] = {"state_dict": broken.state_dict()}
    broken.on_save_checkpoint(checkpoint)
    file = BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed = make_ppo(**settings)
    resumed.load_state_dict(loaded["state_dict"], strict=False)
    resumed.on_load_checkpoint(loaded)
    again = steps(resumed, first=2)[0]

    assert again.kl_coef == third.kl_coef
    assert torch.equal(again.experience.rewards, third.experience.rewards)
    assert torch.equal(again.experience.tokens, third.experience.tokens)
    assert bool(third.replaced) == ("resample_groups" in changes)
    assert resumed.kl_coef == unbroken.kl_coef
    assert resumed.moments == unbroken.moments
    assert torch.equal(again.experience.advantages, third.experience.advantages)
    assert resumed.mean_return == unbroken.mean_return


def test_the_baseline_of_reinforce_is_the_average_of_the_returns_before(make_ppo: Make) -> None:
    """The iteration before weighs twice as much as the one before that."""
    module = make_ppo(advantage="reinforce", baseline_decay=0.5, whiten_advantages="none")
    means: list[float] = []
    for step in steps(module):
        returns, mask = step.experience.returns, step.experience.response_mask
        expected = (means[0] + 2 * means[1]) / 3 if len(means) == 2 else sum(means)
        close(step.experience.advantages, torch.where(mask, returns - expected, 0))
        means.append(returns[:, 0].mean().item())


def test_the_baseline_of_remax_is_the_score_of_the_greedy_response(make_ppo: Make) -> None:
    module = make_ppo(
        advantage="remax", samples_per_prompt=2, reward=one_number, missing_eos="none",
        whiten_advantages="none", fresh=True,
    )  # fmt: skip
    experience = module.make_experience(module.roll_out(prompts(4), module.generator(0, 0)))
    width = experience.tokens.shape[1] - experience.response_mask.shape[1]
    baselines = []
    for tokens, mask in zip(experience.tokens, experience.mask, strict=True):
        prompt, greedy = tokens[:width][mask[:width]].tolist(), list[int]()
        while len(greedy) < 6 and not {*greedy} & {*END}:
            logits = module.roles.causal_lm(torch.tensor([prompt + greedy])).logits[0, -1]
            greedy.append(int(logits.argmax()))
        baselines.append(sum(greedy) / 10 + 3)
    assert len({*baselines}) > 1
    expected = experience.returns - torch.tensor(baselines)[:, None]
    close(experience.advantages, torch.where(experience.response_mask, expected, 0))
