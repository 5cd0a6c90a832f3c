"""One iteration of PPO taken apart, several put through a Trainer, and whether it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.experience import make_experience
from lightning_rlhf.core.types import Experience, Rollout, UpdateStats
from lightning_rlhf.models.roles import POLICY, REFERENCE, REWARD, VALUE
from lightning_rlhf.modules.ppo import EVALUATION, TRAINING, PPOModule
from lightning_rlhf.rollout.score import response_hidden, response_logprobs

from .conftest import (
    VOCABULARY,
    Outputs,
    changed,
    close,
    fit,
    grads,
    parameters,
    prompts,
    same_direction,
    shake,
    within_fit,
)

Make = Callable[..., PPOModule]
HEAD = f"heads.{VALUE}."
ADAPTER = f".{POLICY}."


def on_policy(module: PPOModule, rows: int = 8) -> Experience:
    """What the first iteration learns from."""
    rollout = module.generate(prompts(rows), module.generator(TRAINING, 0))
    return make_experience(rollout, module.score(rollout), module.config)


def off_policy(module: PPOModule, rows: int = 8) -> Experience:
    """The same, as if the policy and the critic had moved on: both clips have work to do."""
    experience = on_policy(module, rows)
    generator = torch.Generator().manual_seed(9)
    mask = experience.response_mask

    def noise() -> Tensor:
        return torch.where(mask, 0.3 * torch.randn(mask.shape, generator=generator), 0)

    return replace(
        experience,
        old_logprobs=experience.old_logprobs + noise(),
        old_values=experience.old_values + noise(),
        returns=experience.returns + noise(),
    )


def slow_update(module: PPOModule, experience: Experience) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and facts in float64 after the model, row by row without padding, token by token."""
    config, roles = module.config, module.roles
    rows: dict[str, list[Tensor]] = {f.name: [] for f in fields(UpdateStats)}
    length = experience.response_mask.shape[1]
    for row in range(len(experience)):
        real = experience.mask[row]
        tokens = experience.tokens[row][real]
        output = roles.causal_lm(input_ids=tokens[None], output_hidden_states=True)
        logits = output.logits[0].double() / config.temperature
        hidden = output.hidden_states[-1][0]
        prompt = int(real[:-length].sum())
        for t in range(int(experience.response_mask[row].sum())):
            table = logits[prompt + t - 1].log_softmax(-1)
            value = roles.heads[VALUE](hidden[prompt + t - 1]).double()
            logprob = table[tokens[prompt + t]]
            old, old_value = experience.old_logprobs[row, t], experience.old_values[row, t]
            advantage, target = experience.advantages[row, t], experience.returns[row, t]
            ratio = (logprob - old).exp()
            bounded = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
            near = value.clamp(old_value - config.clip_range_vf, old_value + config.clip_range_vf)
            policy = -torch.minimum(ratio * advantage, bounded * advantage)
            critic = torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
            entropy = -(table.exp() * table).sum()
            facts = {
                "loss": policy + config.vf_coef * critic - config.ent_coef * entropy,
                "policy_loss": policy,
                "value_loss": critic,
                "entropy": entropy,
                "approx_kl": ratio - 1 - (logprob - old),
                "clip_fraction": (bounded != ratio).double(),
                "value_clip_fraction": (near != value).double(),
                "ratio_mean": ratio,
                "ratio_max": ratio,
            }
            for name, number in facts.items():
                rows[name].append(number)
    means = {name: torch.stack(found).mean() for name, found in rows.items() if found}
    means["ratio_max"] = torch.stack(rows["ratio_max"]).max()
    return means["loss"], means


def test_the_rollouts_of_these_tests_are_worth_testing(make_ppo: Make) -> None:
    """Prompts and responses of several lengths, some ended and some not, both clips at work."""
    module = make_ppo()
    experience = off_policy(module)
    assert len(set(experience.response_mask.sum(1).tolist())) > 2
    assert experience.ended.any()
    assert not experience.ended.all()
    with torch.no_grad():
        _, facts = slow_update(module, experience)
    assert 0.1 < facts["clip_fraction"] < 0.9
    assert 0.1 < facts["value_clip_fraction"] < 0.9


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_the_first_step_the_ratio_is_one(
    make_ppo: Make, architecture: str, temperature: float
) -> None:
    # The same weights say what they said while sampling, once token by token with a cache and
    # once in one pass. Log-probabilities of some nats differ by a few fp32 roundings, d of about
    # 1e-6, and k3 is d^2 / 2: below 1e-11. A real difference of 1e-4 would already give 5e-9.
    module = make_ppo(architecture, temperature=temperature)
    experience = on_policy(module)
    mask = experience.response_mask
    hidden = response_hidden(module.roles, experience)
    logprobs, _ = response_logprobs(module.roles, hidden, experience, temperature)
    ratio = (logprobs - experience.old_logprobs[mask]).exp()
    assert (ratio - 1).abs().max() <= 1e-5
    close(module.roles.heads[VALUE](hidden), experience.old_values[mask], atol=1e-5)

    outputs = Outputs()
    fit(module, [prompts()], [outputs])
    first, *_, last = outputs.steps[0]["updates"]
    assert first.approx_kl.abs() <= 1e-10
    assert (first.ratio_mean - 1).abs() <= 1e-5
    assert (first.ratio_max - 1).abs() <= 1e-5
    assert first.clip_fraction == first.value_clip_fraction == 0
    assert last.approx_kl > 1e-7


def test_a_fresh_policy_is_the_reference(make_ppo: Make, architecture: str) -> None:
    experience = on_policy(make_ppo(architecture, fresh=True))
    assert experience.kl.abs().max() <= 1e-5
    assert torch.equal(experience.old_values, torch.zeros_like(experience.old_values))
    assert on_policy(make_ppo(architecture)).kl.abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_update_is_the_slow_version(make_ppo: Make, architecture: str, temperature: float) -> None:
    settings: dict[str, Any] = {"vf_coef": 0.5, "ent_coef": 0.1, "temperature": temperature}
    slow_module = make_ppo(architecture, **settings)
    experience = off_policy(slow_module)
    loss, expected = slow_update(slow_module, experience)
    loss.backward()
    expected_grads = grads(slow_module)

    module = make_ppo(architecture, **settings)
    stats = within_fit(module, lambda: module.update(experience))
    # Linear attention sums the decay of all tokens before, padding included, and takes differences
    # of such sums: with and without padding it agrees to a digit less.
    same_direction(grads(module), expected_grads, rtol=1e-5 if architecture == "qwen3" else 5e-5)
    norm = torch.stack([g.square().sum() for g in expected_grads.values()]).sum().sqrt()
    close(stats.grad_norm, norm)
    for name, number in expected.items():
        close(getattr(stats, name), number.detach().float())


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_micro_batches_make_the_update_of_the_minibatch(
    make_ppo: Make, architecture: str, microbatch_size: int
) -> None:
    found = []
    for size in (4, microbatch_size):
        module = make_ppo(architecture, microbatch_size=size, vf_coef=0.5, ent_coef=0.1)
        experience = off_policy(module, rows=4)
        stats = within_fit(module, lambda m=module, e=experience: m.update(e))
        found.append((stats, grads(module)))
    (whole, whole_grads), (parts, parts_grads) = found
    same_direction(parts_grads, whole_grads)
    for field in fields(UpdateStats):
        close(getattr(parts, field.name), getattr(whole, field.name))


def test_padding_changes_no_update(make_ppo: Make, architecture: str) -> None:
    def wider(experience: Experience, left: int, right: int) -> Experience:
        """More columns on either side, full of ids that mean nothing and numbers that are none."""
        prompt = experience.tokens.shape[1] - experience.response_mask.shape[1]
        numbers = ("old_logprobs", "old_values", "kl", "rewards", "advantages", "returns")
        nothing = float("nan")
        return replace(
            experience,
            tokens=F.pad(experience.tokens, (left, right), value=prompt),
            mask=F.pad(experience.mask, (left, right), value=False),
            response_mask=F.pad(experience.response_mask, (0, right), value=False),
            **{
                name: F.pad(getattr(experience, name), (0, right), value=nothing)
                for name in numbers
            },
        )

    found = []
    for left, right in ((0, 0), (3, 4)):
        module = make_ppo(architecture)
        experience = wider(off_policy(module), left, right)
        stats = within_fit(module, lambda m=module, e=experience: m.update(e))
        found.append((stats, grads(module)))
    (narrow, narrow_grads), (wide, wide_grads) = found
    same_direction(wide_grads, narrow_grads)
    for field in fields(UpdateStats):
        close(getattr(wide, field.name), getattr(narrow, field.name))


def test_the_order_of_the_rows_changes_no_update(make_ppo: Make) -> None:
    found = []
    for order in (torch.arange(8), torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])):
        module = make_ppo()
        experience = off_policy(module).select(order)
        stats = within_fit(module, lambda m=module, e=experience: m.update(e))
        found.append((stats, grads(module)))
    same_direction(found[1][1], found[0][1])
    for field in fields(UpdateStats):
        close(getattr(found[1][0], field.name), getattr(found[0][0], field.name))


def test_clip_fractions_by_hand(make_ppo: Make) -> None:
    # Old log-probabilities 0.5 below the present ones: ratio e^0.5 = 1.65, outside 1 +- 0.2;
    # 0.1 below: 1.105, inside. Old values 0.3 away are outside 0.2, 0.1 away inside.
    module = make_ppo(whiten_advantages=False)
    experience = on_policy(module)
    mask = experience.response_mask
    first = torch.zeros_like(mask)
    first[:, 0] = True  # one token of each of the 8 responses
    experience = replace(
        experience,
        old_logprobs=experience.old_logprobs - torch.where(first, 0.5, 0.1) * mask,
        old_values=experience.old_values - torch.where(first, 0.1, 0.3) * mask,
    )
    stats = within_fit(module, lambda: module.update(experience))
    tokens = int(mask.sum())
    assert stats.clip_fraction.item() == pytest.approx(8 / tokens, rel=1e-5)
    assert stats.value_clip_fraction.item() == pytest.approx(1 - 8 / tokens, rel=1e-5)
    assert stats.ratio_max.item() == pytest.approx(1.6487213, rel=1e-5)
    mean = (8 * 1.6487213 + (tokens - 8) * 1.1051709) / tokens
    assert stats.ratio_mean.item() == pytest.approx(mean, rel=1e-5)


def moved_by_update(module: PPOModule, **fields_: Tensor) -> set[str]:
    experience = replace(off_policy(module), **fields_)
    before = parameters(module)
    within_fit(module, lambda: module.update(experience))
    return changed(before, parameters(module))


def named(module: PPOModule, *parts: str) -> set[str]:
    return {n for n, _ in module.named_parameters() if any(part in n for part in parts)}


def nothing_to_gain(module: PPOModule) -> Tensor:
    return torch.zeros_like(off_policy(module).advantages)


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

    def logprobs() -> Tensor:
        hidden = response_hidden(module.roles, experience)
        found, _ = response_logprobs(module.roles, hidden, experience, 1.0)
        return torch.zeros(mask.shape).masked_scatter(mask, found.detach()).sum(1)

    before = logprobs()
    within_fit(module, lambda: module.update(experience))
    change = logprobs() - before
    assert change[:4].sum() > 1e-3
    assert change[4:].sum() < -1e-3


def test_the_entropy_bonus_raises_entropy(make_ppo: Make) -> None:
    module = make_ppo(ent_coef=1.0, vf_coef=0.0)
    experience = replace(on_policy(module), advantages=nothing_to_gain(module))
    stats = within_fit(module, lambda: [module.update(experience) for _ in range(3)])
    assert stats[0].entropy < stats[1].entropy < stats[2].entropy


def test_the_critic_approaches_its_targets(make_ppo: Make) -> None:
    module = make_ppo(ent_coef=0.0, vf_coef=1.0, clip_range_vf=100.0, lr=1e-3)
    experience = replace(on_policy(module), advantages=nothing_to_gain(module))
    stats = within_fit(module, lambda: [module.update(experience) for _ in range(20)])
    assert stats[-1].value_loss < 0.7 * stats[0].value_loss


def test_a_long_gradient_is_cut(make_ppo: Make) -> None:
    module = make_ppo(max_grad_norm=1e-3)
    experience = off_policy(module)
    stats = within_fit(module, lambda: module.update(experience))
    norm = torch.stack([g.square().sum() for g in grads(module).values()]).sum().sqrt()
    assert stats.grad_norm > 1e-2  # what it was before
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_iterations_through_a_trainer_touch_nothing_but_policy_and_critic(
    make_ppo: Make, architecture: str
) -> None:
    module = make_ppo(architecture)
    roles, outputs = module.roles, Outputs()
    before = parameters(module)
    probes = {role: roles.probe(role) for role in (REFERENCE, REWARD, POLICY)}
    trainer = fit(module, [prompts(seed=seed) for seed in range(3)], [outputs])
    assert changed(before, parameters(module)) == named(module, ADAPTER, HEAD)
    assert torch.equal(roles.probe(REFERENCE), probes[REFERENCE])
    assert torch.equal(roles.probe(REWARD), probes[REWARD])
    assert not torch.allclose(roles.probe(POLICY), probes[POLICY], atol=1e-3)
    assert module.iteration == 3
    # 2 epochs over 8 rows in minibatches of 4 are 4 optimizer steps an iteration.
    assert [len(step["updates"]) for step in outputs.steps] == [4, 4, 4]
    assert trainer.global_step == 12
    for step in outputs.steps:
        assert isinstance(step["experience"], Experience)
        assert step["kl_coef"] == module.config.kl_coef
        assert set(step["seconds"]) == {"rollout", "score", "update"}


def three_iterations(module: PPOModule, global_seed: int) -> dict[str, Tensor]:
    torch.manual_seed(global_seed)
    fit(module, [prompts(seed=seed) for seed in range(3)])
    return parameters(module)


def test_the_seed_and_nothing_else_decides_the_run(make_ppo: Make, architecture: str) -> None:
    first = three_iterations(make_ppo(architecture, seed=0), global_seed=0)
    again = three_iterations(make_ppo(architecture, seed=0), global_seed=123)
    other = three_iterations(make_ppo(architecture, seed=1), global_seed=0)
    assert not changed(first, again)
    module = make_ppo(architecture)
    assert changed(first, other) == named(module, ADAPTER, HEAD)


def test_random_numbers_are_a_function_of_seed_stream_and_number(make_ppo: Make) -> None:
    modules = [make_ppo(seed=0), make_ppo(seed=1)]

    def draw(seed: int, stream: int, number: int) -> tuple[float, ...]:
        generator = modules[seed].generator(stream, number)
        return tuple(torch.rand(4, generator=generator).tolist())

    keys = [(s, t, n) for s in (0, 1) for t in (TRAINING, EVALUATION) for n in (0, 1)]
    draws = [draw(*key) for key in keys]
    assert len(set(draws)) == len(keys)
    assert [draw(*key) for key in keys] == draws


def test_every_iteration_samples_anew(make_ppo: Make) -> None:
    module, outputs = make_ppo(lr=1e-12), Outputs()
    fit(module, [prompts()] * 2, [outputs])
    first, second = (step["experience"].tokens for step in outputs.steps)
    assert first.shape != second.shape or not torch.equal(first, second)


def test_evaluation_draws_the_same_each_time_and_changes_nothing(make_ppo: Make) -> None:
    module = make_ppo()
    before = parameters(module)
    first = module.validation_step(prompts(), 0)
    module.iteration = 5
    again = module.validation_step(prompts(), 0)
    other = module.validation_step(prompts(), 1)
    assert torch.equal(first["rollout"].tokens, again["rollout"].tokens)
    assert torch.equal(first["scores"].score, again["scores"].score)
    a, b = first["rollout"].tokens, other["rollout"].tokens
    assert a.shape != b.shape or not torch.equal(a, b)
    assert not changed(before, parameters(module))


def test_scores_do_not_depend_on_the_micro_batch(make_ppo: Make, architecture: str) -> None:
    rollout, found = None, []
    for size in (4, 1):
        module = make_ppo(architecture, microbatch_size=size)
        rollout = rollout or module.generate(prompts(), module.generator(TRAINING, 0))
        found.append(module.score(rollout))
    close(found[1].score, found[0].score)
    close(found[1].ref_logprobs, found[0].ref_logprobs)


def test_a_checkpoint_remembers_the_iteration(make_ppo: Make) -> None:
    module = make_ppo()
    checkpoint = {"state_dict": module.state_dict()}
    module.iteration = 7
    module.on_save_checkpoint(checkpoint)
    resumed = make_ppo()
    resumed.on_load_checkpoint(checkpoint)
    assert resumed.iteration == 7


def test_a_checkpoint_of_other_parameters_is_refused(make_ppo: Make) -> None:
    module = make_ppo()
    state = dict(module.state_dict())
    state.pop(next(iter(state)))
    with pytest.raises(CheckpointError, match="lacks 1 of the trained"):
        module.on_load_checkpoint({"state_dict": state, "iteration": 1})


def test_the_schedule_moves_once_an_iteration(make_ppo: Make) -> None:
    module, seen = make_ppo(lr=0.3e-3, lr_schedule="linear", value_lr_factor=10.0), []
    update = module.update

    def spy(minibatch: Experience) -> UpdateStats:
        seen.append({round(group["lr"], 9) for group in module.optimizers().param_groups})
        return update(minibatch)

    module.update = spy
    fit(module, [prompts(seed=seed) for seed in range(3)])
    # 3 iterations of 4 steps at 3/3, 2/3 and 1/3 of the peak; the value head at ten times that.
    assert seen == [{3e-4, 3e-3}] * 4 + [{2e-4, 2e-3}] * 4 + [{1e-4, 1e-3}] * 4


@pytest.mark.parametrize("factor", [0.5, 1.0, 10.0])
def test_policy_and_value_head_are_trained_each_at_its_rate(make_ppo: Make, factor: float) -> None:
    module = make_ppo(value_lr_factor=factor, lr=1e-3)
    optimizer = module.configure_optimizers()["optimizer"]
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {n: rates[id(p)] for n, p in module.named_parameters() if id(p) in rates}
    expected = dict.fromkeys(named(module, ADAPTER), 1e-3)
    expected |= dict.fromkeys(named(module, HEAD), 1e-3 * factor)
    assert found == expected


def share_of_low_tokens(rollout: Rollout) -> Tensor:
    """The share of the response that is among the first quarter of the vocabulary."""
    low = (rollout.responses < VOCABULARY // 4) & rollout.response_mask
    return low.sum(1) / rollout.response_mask.sum(1)


def train(module: PPOModule) -> tuple[Tensor, Tensor]:
    """Mean score, and mean KL summed over a response, of every iteration."""
    outputs = Outputs()
    rows, iterations = module.config.rollout_batch_size, module.config.iterations
    fit(module, [prompts(rows, seed=i) for i in range(iterations)], [outputs])
    experiences = [step["experience"] for step in outputs.steps]
    scores = torch.stack([e.score.mean() for e in experiences])
    return scores, torch.stack([e.kl.sum(1).mean() for e in experiences])


LEARNING: dict[str, Any] = {
    "fresh": True,
    "reward": share_of_low_tokens,
    "rollout_batch_size": 64,
    "minibatch_size": 32,
    "microbatch_size": 32,
    "ppo_epochs": 4,
    "ent_coef": 0.0,
    "missing_eos": "none",
    "lr": 1e-2,
}


@pytest.mark.slow
def test_it_learns_what_is_rewarded(make_ppo: Make, architecture: str) -> None:
    scores, kl = train(make_ppo(architecture, iterations=14, kl_coef=0.0, **LEARNING))
    assert scores[:2].mean() < 0.45  # chance, with many responses ended by a rewarded token
    assert scores[-3:].mean() > 0.7
    assert kl[-3:].mean() > 1


@pytest.mark.slow
def test_the_leash_pulls_back(make_ppo: Make) -> None:
    """With nothing to gain and a price on KL, a policy that has strayed turns to the reference."""
    settings = LEARNING | {
        "fresh": False,
        "reward": lambda rollout: torch.zeros(len(rollout)),
        "lr": 3e-3,
    }
    module = make_ppo(iterations=14, kl_coef=1.0, **settings)
    shake(module.roles, ADAPTER, seed=11, size=0.1)
    _, kl = train(module)
    assert kl[:2].mean() > 1.5
    assert kl[-3:].mean() < 0.75 * kl[:2].mean()
