"""Limits that forbid an optimizer step: target_kl ends the epochs, max_ratio skips a minibatch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.callbacks.metrics import update_metrics
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.records import Experience, PPOTerms, UpdateStats
from lightning_rlhf.modules.ppo import TRAINING, PPOModule

from .conftest import Outputs, changed, fit, parameters, prompts, within_fit
from .experiences import Make, learn, on_policy, update

State = dict[str, Tensor]


def followed(module: PPOModule, experience: Experience) -> list[tuple[UpdateStats, State]]:
    """Of each minibatch its facts, and the parameters after it."""

    def work() -> list[tuple[UpdateStats, State]]:
        found, update = [], module.update

        def spy(*args: Any) -> UpdateStats:
            stats = update(*args)
            found.append((stats, parameters(module)))
            return stats

        module.update = spy
        learn(module, experience, module.generator(TRAINING, 1))
        return found

    return within_fit(module, work)


def test_the_first_minibatch_above_the_target_is_not_learned_from(make_ppo: Make) -> None:
    # At sampling approx_kl is below 1e-10; a first step of 1e-3 takes it above 1e-7.
    module = make_ppo(target_kl=1e-9, ppo_epochs=3, minibatch_size=4)
    experience, before = on_policy(module), parameters(module)
    (first, after_first), (second, after_second) = followed(module, experience)
    assert (first.stopped.item(), second.stopped.item()) == (0.0, 1.0)
    assert first.approx_kl <= 1e-10
    assert second.approx_kl > 1e-7
    assert changed(before, after_first)
    assert not changed(after_first, after_second)
    metrics = update_metrics([first, second])
    assert (metrics["update/steps"], metrics["update/stopped"]) == (1.0, 1.0)
    assert metrics["update/skipped"] == 0.0


def test_the_epochs_end_in_the_middle_of_one(make_ppo: Make) -> None:
    """The limit lies between the second and the third minibatch's."""
    free = followed(module := make_ppo(ppo_epochs=2, minibatch_size=2), on_policy(module))
    kls = [stats.approx_kl.item() for stats, _ in free]
    assert len(kls) == 8
    limit = (max(kls[:2]) + kls[2]) / 2
    assert kls[2] > limit > max(kls[:2])
    module = make_ppo(ppo_epochs=2, minibatch_size=2, target_kl=limit)
    found = followed(module, on_policy(module))
    assert [stats.stopped.item() for stats, _ in found] == [0.0, 0.0, 1.0]
    assert not changed(found[1][1], found[2][1])
    assert not changed(found[1][1], free[1][1])  # until then as without a limit


def test_every_iteration_begins_anew(make_ppo: Make) -> None:
    module, outputs = make_ppo(target_kl=1e-9), Outputs()
    trainer = fit(module, [prompts(seed=seed) for seed in range(3)], [outputs])
    assert [len(step.updates) for step in outputs.steps] == [2, 2, 2]
    assert trainer.global_step == 3


def marked(experience: Experience) -> Experience:
    """As if the policy has three responses e^3 times as likely, token by token, as at sampling."""
    rows = torch.zeros(8, 1)
    rows[[1, 4, 6]] = 3.0
    return replace(
        experience, old_logprobs=experience.old_logprobs - rows * experience.response_mask
    )


def test_a_minibatch_that_went_too_far_is_skipped_and_the_rest_learned_from(make_ppo: Make) -> None:
    # A micro-learning-rate, so that ratios stay e^3 = 20.1 and 1: minibatches of one response.
    module = make_ppo(max_ratio=5.0, minibatch_size=1, microbatch_size=1, ppo_epochs=1, lr=1e-7)
    experience, state = marked(on_policy(module)), parameters(module)
    found = followed(module, experience)
    assert len(found) == 8
    ratios = [stats.ratio_mean.item() for stats, _ in found]
    assert sorted(ratios) == pytest.approx([1.0] * 5 + [20.0855] * 3, rel=1e-2)
    far = [ratio > 10 for ratio in ratios]
    assert any(far[:-1])  # one is skipped before others are learned from
    for (stats, after), is_far in zip(found, far, strict=True):
        assert stats.skipped.item() == float(is_far)
        assert stats.stopped.item() == 0.0
        assert (not changed(state, after)) == is_far
        state = after
    metrics = update_metrics([stats for stats, _ in found])
    assert (metrics["update/steps"], metrics["update/skipped"]) == (5.0, 3.0)
    assert metrics["update/stopped"] == 0.0


def test_it_is_the_mean_ratio_that_counts(make_ppo: Make) -> None:
    module = make_ppo(max_ratio=15.0, minibatch_size=8)
    experience = marked(on_policy(module))
    stats = within_fit(module, lambda: update(module, experience))
    assert stats.ratio_max > 15
    assert stats.ratio_mean < 15
    assert stats.skipped.item() == 0.0


@pytest.mark.parametrize(
    ("key", "field"), [("target_kl", "approx_kl"), ("max_ratio", "ratio_mean")]
)
def test_a_limit_of_what_was_not_measured_is_refused(make_ppo: Make, key: str, field: str) -> None:
    module = make_ppo(**{key: 1.5})
    whole = module.loss_terms
    module.loss_terms = lambda *args, **given: PPOTerms.of(whole(*args, **given).loss)
    experience = on_policy(module)
    expected = rf"{key} is 1.5, but PPOModule.loss_terms\(\) measured no {field} .* {key}=null"
    with pytest.raises(ConfigError, match=expected):
        within_fit(module, lambda: update(module, experience))
