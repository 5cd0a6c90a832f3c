"""Iterations of PPO through a Trainer: what they change, repeat, keep and learn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.records import DecodedResponses, UpdateStats
from lightning_rlhf.models.config import VALUE
from lightning_rlhf.modules.ppo import TRAINING, PPOModule

from ..matrix import matrix
from .conftest import (
    ARCHITECTURES,
    VOCABULARY,
    Outputs,
    changed,
    fit,
    parameters,
    prompts,
    shake,
    within_fit,
)
from .experiences import ADAPTER, HEAD, Make, named, update


def two_iterations(module: PPOModule, global_seed: int) -> dict[str, Tensor]:
    torch.manual_seed(global_seed)
    fit(module, [prompts(seed=seed) for seed in range(2)])
    return parameters(module)


@pytest.mark.parametrize("architecture", matrix(ARCHITECTURES, "qwen3_5"))
def test_the_seed_and_nothing_else_decides_the_run(make_ppo: Make, architecture: str) -> None:
    first = two_iterations(make_ppo(architecture, seed=0), global_seed=0)
    again = two_iterations(make_ppo(architecture, seed=0), global_seed=123)
    other = two_iterations(make_ppo(architecture, seed=1), global_seed=0)
    assert not changed(first, again)
    module = make_ppo(architecture)
    assert changed(first, other) == named(module, ADAPTER, HEAD)


def test_evaluation_draws_the_same_each_time_and_changes_nothing(make_ppo: Make) -> None:
    module = make_ppo()
    before = parameters(module)
    first = module.validation_step(prompts(), 0)
    module.iteration = 5
    again = module.validation_step(prompts(), 0)
    other = module.validation_step(prompts(), 1)
    assert torch.equal(first.rollout.tokens, again.rollout.tokens)
    assert torch.equal(first.scores.score, again.scores.score)
    a, b = first.rollout.tokens, other.rollout.tokens
    assert a.shape != b.shape or not torch.equal(a, b)
    assert not changed(before, parameters(module))


def test_a_checkpoint_of_other_parameters_is_refused(make_ppo: Make) -> None:
    module = make_ppo()
    state = dict(module.state_dict())
    state.pop(next(iter(state)))
    with pytest.raises(CheckpointError, match="lacks 1 of the trained"):
        module.on_load_checkpoint({"state_dict": state, "iteration": 1})


def test_the_schedule_moves_once_an_iteration(make_ppo: Make) -> None:
    module, seen = make_ppo(lr=0.3e-3, lr_schedule="linear", value_lr_factor=10.0), []
    make_update = module.update

    def spy(*args: Any) -> UpdateStats:
        seen.append({round(group["lr"], 9) for group in module.optimizers().param_groups})
        return make_update(*args)

    module.update = spy
    fit(module, [prompts(seed=seed) for seed in range(3)])
    # 3 iterations of 4 steps at 3/3, 2/3 and 1/3 of the peak; the value head at ten times that.
    assert seen == [{3e-4, 3e-3}] * 4 + [{2e-4, 2e-3}] * 4 + [{1e-4, 1e-3}] * 4


def test_rows_go_through_the_model_in_order_of_their_length(make_ppo: Make) -> None:
    """Two at a time they are then padded least, while they are scored and while they are learned.

    Prompts of 1 to 8 tokens in a shuffled order, and responses of one token.
    """
    module, shapes = make_ppo(max_response_tokens=1, critic="adapter"), []
    shuffled = prompts(width=8)
    shuffled = shuffled.select(torch.tensor([3, 0, 6, 1, 7, 4, 2, 5]))
    sampled = module.collector.sampler.sample(
        shuffled, 1, module.generator(TRAINING, 0), torch.arange(len(shuffled))
    )
    hidden_at = module.roles.hidden_at

    def spy(tokens: Tensor, wanted: Tensor) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return hidden_at(tokens, wanted)

    module.roles.hidden_at = spy
    pairs = [(2, 2), (2, 4), (2, 6), (2, 8)]
    rollout = module.collector.annotate(sampled)
    assert shapes == pairs
    shapes.clear()
    module.collector.score(module.collector.decode(rollout, "train"))
    # The reward, which is read at the last token, and the reference.
    assert shapes == [(n, s + 1) for n, s in pairs] + pairs
    shapes.clear()
    experience = module.make_experience(rollout)
    shapes.clear()
    within_fit(module, lambda: update(module, experience))
    assert shapes == [shape for pair in pairs for shape in (pair, pair)]  # policy and critic


def test_a_trainer_of_more_processes_than_the_modules_replicas_is_refused(make_ppo: Make) -> None:
    module = make_ppo()
    for found, expected in (
        ({"world_size": 2, "max_epochs": 1}, "the Trainer's processes is 2; allowed: 1, that of"),
        ({"world_size": 1, "max_epochs": 2}, "max_epochs of the Trainer is 2; allowed: 1: "),
    ):
        module.trainer = SimpleNamespace(**found)
        with pytest.raises(ConfigError, match=expected):
            module.on_fit_start()


# Without a critic

SAMPLES = {"rloo": 4, "reinforce++": 1}


@pytest.mark.parametrize("advantage", SAMPLES)
def test_it_runs_without_a_critic(make_ppo: Make, advantage: str) -> None:
    samples = SAMPLES[advantage]
    module = make_ppo(advantage=advantage, samples_per_prompt=samples)
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


# Learning


def share_of_low_tokens(decoded: DecodedResponses) -> Tensor:
    """The share of the response that is among the first quarter of the vocabulary."""
    rollout = decoded.rollout
    low = (rollout.responses < VOCABULARY // 4) & rollout.response_mask
    return low.sum(1) / rollout.response_mask.sum(1)


def train(module: PPOModule) -> tuple[Tensor, Tensor]:
    """Mean score, and mean KL summed over a response, of every iteration."""
    outputs = Outputs()
    rows, iterations = module.config.rollout_batch_size, module.config.iterations
    fit(module, [prompts(rows, seed=i) for i in range(iterations)], [outputs])
    experiences = [step.experience for step in outputs.steps]
    scores = torch.stack([e.score.mean() for e in experiences])
    return scores, torch.stack([e.kl.sum(1).mean() for e in experiences])


LEARNING: dict[str, Any] = {
    "fresh": True, "reward": share_of_low_tokens, "rollout_batch_size": 64, "minibatch_size": 32,
    "microbatch_size": 32, "ppo_epochs": 4, "ent_coef": 0.0, "missing_eos": "none", "lr": 1e-2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("architecture", matrix(ARCHITECTURES, "qwen3_5"))
def test_it_learns_what_is_rewarded(make_ppo: Make, architecture: str) -> None:
    scores, kl = train(make_ppo(architecture, iterations=14, kl_coef=0.0, **LEARNING))
    assert scores[:2].mean() < 0.45  # chance, with many responses ended by a rewarded token
    assert scores[-3:].mean() > 0.7
    assert kl[-3:].mean() > 1


@pytest.mark.slow
def test_the_kl_penalty_pulls_back(make_ppo: Make) -> None:
    """With no reward but the KL penalty, a policy that has moved away returns to the reference."""
    settings = LEARNING | {
        "fresh": False, "reward": lambda decoded: torch.zeros(len(decoded)), "lr": 3e-3,
    }  # fmt: skip
    module = make_ppo(iterations=14, kl_coef=1.0, **settings)
    shake(module.roles, ADAPTER, seed=11, size=0.1)
    _, kl = train(module)
    assert kl[:2].mean() > 1.5
    assert kl[-3:].mean() < 0.75 * kl[:2].mean()
