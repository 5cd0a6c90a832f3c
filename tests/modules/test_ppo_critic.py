"""A critic apart from the policy: its values, its gradients, and when it is trained alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_rlhf.core.records import Experience
from lightning_rlhf.models.config import CRITIC, POLICY, REFERENCE, REWARD
from lightning_rlhf.modules.ppo import TRAINING, PPOModule

from ..matrix import matrix
from .conftest import Outputs, by_architecture, changed, close, fit, parameters, prompts
from .experiences import ADAPTER, HEAD, Make, named, off_policy, on_policy, updated

KINDS = ("adapter", "model")


def critic_names(module: PPOModule) -> set[str]:
    return named(module, HEAD, f".{CRITIC}.", "critic_roles.")


@contextmanager
def as_critic(module: PPOModule, kind: str) -> Iterator[Any]:
    """The language model whose hidden states the critic reads."""
    if kind == "model":
        assert module.critic.roles is not module.roles
        yield module.critic.roles.causal_lm
        return
    with module.roles.use_role(CRITIC):
        yield module.roles.causal_lm


@torch.no_grad()
def slow_values(module: PPOModule, experience: Experience, kind: str) -> Tensor:
    """Row by row without padding, in one pass, token by token; 0 on padding."""
    found = torch.zeros_like(experience.old_values)
    head = module.critic.roles.heads["value"].linear
    with as_critic(module, kind) as model:
        for row in range(len(experience)):
            tokens = experience.tokens[row][experience.mask[row]]
            hidden = model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
            length = int(experience.response_mask[row].sum())
            for t in range(length):
                state = hidden[len(tokens) - length + t - 1]
                found[row, t] = state @ head.weight[0] + head.bias[0]
    return found


@by_architecture
@pytest.mark.parametrize("kind", KINDS)
def test_values_at_sampling_are_those_of_the_critic_asked_again(
    make_ppo: Make, architecture: str, kind: str
) -> None:
    module = make_ppo(architecture, critic=kind)
    experience = on_policy(module)
    close(experience.old_values, slow_values(module, experience, kind), atol=1e-5)
    with torch.no_grad():
        again = module.critic.values(experience)
    close(again, experience.old_values[experience.response_mask], atol=1e-5)
    # The policy's own hidden states would have said something else.
    shared = make_ppo(architecture, critic="head")
    rollout = shared.collector.roll_out(prompts(), shared.generator(TRAINING, 0))
    assert torch.equal(rollout.tokens, experience.tokens)
    assert (rollout.values - experience.old_values).abs().max() > 1e-3


@pytest.mark.parametrize("kind", matrix(["head", *KINDS], "head", "adapter"))
def test_the_policy_s_gradient_does_not_know_the_value_loss(make_ppo: Make, kind: str) -> None:
    """Nor the critic's the policy's loss; on a shared trunk the first is not so."""
    found = {}
    for vf_coef, gain in ((0.5, 1.0), (3.0, 1.0), (0.5, 0.0)):
        module = make_ppo(critic=kind, vf_coef=vf_coef)
        experience = off_policy(module)
        experience = replace(experience, advantages=gain * experience.advantages)
        found[vf_coef, gain] = updated(module, experience)[1]
    policy, critic = named(module, ADAPTER), critic_names(module)

    def equal(names: set[str], one: tuple[float, float], other: tuple[float, float]) -> bool:
        return all(torch.equal(found[one][n], found[other][n]) for n in names)

    assert equal(policy, (0.5, 1.0), (3.0, 1.0)) == (kind != "head")
    assert equal(critic, (0.5, 1.0), (0.5, 0.0))
    assert not equal(critic, (0.5, 1.0), (3.0, 1.0))
    assert not equal(policy, (0.5, 1.0), (0.5, 0.0))


TRAINED = (
    ("qwen3", "adapter", "lora"), ("qwen3_5", "head", "lora"), ("qwen3", "head", "lora"),
    ("qwen3_5", "model", "lora"), ("qwen3", "head", "full"), ("qwen3_5", "adapter", "full"),
)  # fmt: skip


@pytest.mark.parametrize(("architecture", "kind", "finetune"), matrix(TRAINED, *TRAINED[2:]))
def test_iterations_touch_nothing_but_policy_and_critic(
    make_ppo: Make, architecture: str, kind: str, finetune: str
) -> None:
    module, outputs = make_ppo(architecture, critic=kind, finetune=finetune), Outputs()
    before, policy, frozen = parameters(module), module.roles.probe(POLICY), module.roles.reference
    probes = {role: frozen.probe(role) for role in (REFERENCE, REWARD)}
    trainer = fit(module, [prompts(seed=seed) for seed in range(2)], [outputs])
    own = ADAPTER if finetune == "lora" else "roles.model."
    expected = named(module, own) | critic_names(module)
    assert changed(before, parameters(module)) == expected
    assert set(module.state_dict()) == expected
    for role in (REFERENCE, REWARD):
        assert torch.equal(frozen.probe(role), probes[role])
    assert not torch.allclose(module.roles.probe(POLICY), policy, atol=1e-3)
    # 2 epochs over 8 rows in minibatches of 4 are 4 optimizer steps an iteration.
    assert (module.iteration, trainer.global_step) == (2, 8)
    for step in outputs.steps:
        assert len(step.updates) == 4
        assert step.kl_coef == module.config.kl_coef
        first = step.updates[0]
        assert first.approx_kl.abs() <= 1e-10
        assert (first.ratio_mean - 1).abs() <= 1e-5
        assert first.clip_fraction == first.value_clip_fraction == 0
        assert step.updates[-1].approx_kl > 1e-7


class Moves(Callback):
    """Names of the parameters that each iteration moved."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.before = parameters(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.found.append(changed(self.before, parameters(pl_module)))


@pytest.mark.parametrize("kind", ["head", *KINDS])
def test_in_the_warm_up_the_critic_learns_alone(make_ppo: Make, kind: str) -> None:
    module, moves, outputs = make_ppo(critic=kind, critic_warmup=2), Moves(), Outputs()
    fit(module, [prompts(seed=seed) for seed in range(3)], [moves, outputs])
    policy, critic = named(module, ADAPTER), critic_names(module)
    assert moves.found == [critic, critic, policy | critic]
    for step in outputs.steps[:2]:
        assert all(stats.approx_kl.abs() <= 1e-10 for stats in step.updates)


def test_the_warm_up_counts_the_iterations_of_all_resumes(make_ppo: Make) -> None:
    module, moves = make_ppo(critic_warmup=2), Moves()
    module.iteration = 1
    fit(module, [prompts(seed=seed) for seed in range(2)], [moves])
    assert moves.found == [critic_names(module), named(module, ADAPTER, HEAD)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_apart_is_trained_at_its_own_rate(make_ppo: Make, kind: str) -> None:
    module = make_ppo(critic=kind, value_lr_factor=4.0, lr=1e-3)
    optimizer = module.configure_optimizers()["optimizer"]
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {n: rates[id(p)] for n, p in module.named_parameters() if id(p) in rates}
    expected = dict.fromkeys(named(module, ADAPTER), 1e-3)
    assert found == expected | dict.fromkeys(critic_names(module), 4e-3)
