"""One update of PPO against a slow version of it, and what must not change it."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.records import Experience, PPOTerms, UpdateStats
from lightning_rlhf.kernels import decoder, layers, patch
from lightning_rlhf.kernels.layers import FastLayer
from lightning_rlhf.kernels.patch import Kernels
from lightning_rlhf.models.config import VALUE
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.rollout.score import response_hidden, response_logprobs

from .conftest import Outputs, close, fit, grads, prompts, same_direction, within_fit
from .experiences import Make, off_policy, on_policy, update, updated


def slow_update(module: PPOModule, experience: Experience) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and facts in float64 after the model, row by row without padding, token by token."""
    config, model = module.config, module.roles
    rows: dict[str, list[Tensor]] = {f.name: [] for f in fields(UpdateStats)}
    length = experience.response_mask.shape[1]
    for row in range(len(experience)):
        real = experience.mask[row]
        tokens = experience.tokens[row][real]
        output = model.causal_lm(input_ids=tokens[None], output_hidden_states=True)
        logits = output.logits[0].double() / config.temperature
        hidden = output.hidden_states[-1][0]
        prompt = int(real[:-length].sum())
        for t in range(int(experience.response_mask[row].sum())):
            table = logits[prompt + t - 1].log_softmax(-1)
            value = model.heads[VALUE](hidden[prompt + t - 1])[0].double()
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
                "policy_loss": policy, "value_loss": critic, "entropy": entropy,
                "approx_kl": ratio - 1 - (logprob - old),
                "clip_fraction": (bounded != ratio).double(),
                "value_clip_fraction": (near != value).double(), "ratio_mean": ratio,
                "ratio_max": ratio,
            }  # fmt: skip
            for name, number in facts.items():
                rows[name].append(number)
    means = {name: torch.stack(found).mean() for name, found in rows.items() if found}
    means["ratio_max"] = torch.stack(rows["ratio_max"]).max()
    return means["loss"], means


def test_before_the_first_step_the_ratio_is_one(make_ppo: Make, architecture: str) -> None:
    # The same weights say what they said while sampling, once token by token with a cache and
    # once in one pass. Log-probabilities of some nats differ by a few fp32 roundings, d of about
    # 1e-6, and k3 is d^2 / 2: below 1e-11. A real difference of 1e-4 would already give 5e-9.
    module = make_ppo(architecture, temperature=0.7, spread=0.1)
    experience = on_policy(module)
    mask = experience.response_mask
    hidden = response_hidden(module.roles, experience)
    logprobs, _ = response_logprobs(module.roles, hidden, experience, 0.7)
    ratio = (logprobs - experience.old_logprobs[mask]).exp()
    assert (ratio - 1).abs().max() <= 1e-5
    close(module.roles.heads[VALUE](hidden)[:, 0], experience.old_values[mask], atol=1e-5)

    outputs = Outputs()
    fit(module, [prompts()], [outputs])
    first, *_, last = outputs.steps[0].updates
    assert first.approx_kl.abs() <= 1e-10
    assert (first.ratio_mean - 1).abs() <= 1e-5
    assert (first.ratio_max - 1).abs() <= 1e-5
    assert first.clip_fraction == first.value_clip_fraction == 0
    assert last.approx_kl > 1e-7


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_a_fresh_policy_is_the_reference(make_ppo: Make, architecture: str, finetune: str) -> None:
    experience = on_policy(make_ppo(architecture, fresh=True, finetune=finetune))
    assert experience.kl.abs().max() <= 1e-5
    assert torch.equal(experience.old_values, torch.zeros_like(experience.old_values))
    assert on_policy(make_ppo(architecture, finetune=finetune)).kl.abs().max() > 1e-3


def test_update_is_the_slow_version(
    make_ppo: Make, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"vf_coef": 0.5, "ent_coef": 0.1, "temperature": 0.7}
    with monkeypatch.context() as all_by_the_libraries:
        plain = Kernels("plain", "for the slow version")
        all_by_the_libraries.setattr(patch, "use_kernels", lambda choice, model: plain)
        slow_module = make_ppo(architecture, spread=0.1, **settings)
    assert not any(isinstance(module, FastLayer) for module in slow_module.roles.modules())
    experience = off_policy(slow_module)
    # Prompts and responses of several lengths, some ended and some not, and both clips at work.
    lengths = experience.response_mask.sum(1).tolist()
    assert not experience.mask[:, 0].all()
    assert 1 == min(lengths) < len(set(lengths)) > 2
    assert 0 < experience.ended.sum() < 8
    loss, expected = slow_update(slow_module, experience)
    assert 0.1 < expected["clip_fraction"] < 0.9
    assert 0.1 < expected["value_clip_fraction"] < 0.9
    loss.backward()
    expected_grads = grads(slow_module)

    monkeypatch.setattr(decoder, "MULTIPLE", 2)  # so few tokens would be rounded up to all
    monkeypatch.setattr(layers, "ROWS", 2)
    module = make_ppo(architecture, spread=0.1, **settings)
    positions: dict[str, int] = {"given": 0, "computed": 0}

    def count(name: str) -> Any:
        def hook(_: Any, args: tuple[Tensor, ...]) -> None:
            positions[name] += args[0].shape[:-1].numel()

        return hook

    first = module.roles.causal_lm.base_model.layers[0]
    first.register_forward_pre_hook(count("given"))
    first.mlp.register_forward_pre_hook(count("computed"))
    stats = within_fit(module, lambda: update(module, experience))
    assert 0 < positions["computed"] < positions["given"]
    same_direction(grads(module), expected_grads)
    norm = torch.stack([g.square().sum() for g in expected_grads.values()]).sum().sqrt()
    close(stats.grad_norm, norm)
    for name, number in expected.items():
        close(getattr(stats, name), number.detach().float())


def test_padding_and_the_order_of_rows_change_no_update(make_ppo: Make, architecture: str) -> None:
    def wider(experience: Experience, left: int, right: int) -> Experience:
        """More columns on either side, full of ids that mean nothing and numbers that are none."""
        prompt = experience.tokens.shape[1] - experience.response_mask.shape[1]
        numbers = {
            f.name: F.pad(x, (0, right), value=math.nan)
            for f in fields(experience)
            if (x := getattr(experience, f.name)) is not None and x.dtype == torch.float32
            and x.shape == experience.kl.shape
        }  # fmt: skip
        return replace(
            experience, tokens=F.pad(experience.tokens, (left, right), value=prompt),
            mask=F.pad(experience.mask, (left, right), value=False),
            response_mask=F.pad(experience.response_mask, (0, right), value=False), **numbers,
        )  # fmt: skip

    found, order = [], torch.arange(8)
    for left, right in ((0, 0), (3, 4)):
        module = make_ppo(architecture)
        found.append(updated(module, wider(off_policy(module), left, right).select(order)))
        order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    (narrow, narrow_grads), (wide, wide_grads) = found
    same_direction(wide_grads, narrow_grads)
    for field in fields(UpdateStats):
        close(getattr(wide, field.name), getattr(narrow, field.name))


def test_a_long_gradient_is_cut(make_ppo: Make) -> None:
    module = make_ppo(max_grad_norm=1e-3)
    experience = off_policy(module)
    stats = within_fit(module, lambda: update(module, experience))
    norm = torch.stack([g.square().sum() for g in grads(module).values()]).sum().sqrt()
    assert stats.grad_norm > 1e-2  # what it was before
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("spoil", "found"), [
    (lambda terms: None, "None"),
    (lambda terms: replace(terms, loss=terms.loss.detach()), "PPOTerms(loss="),
])  # fmt: skip
def test_a_subclass_without_a_loss_is_named(make_ppo: Make, spoil: Any, found: str) -> None:
    class Spoiled(PPOModule):
        def loss_terms(self, *args: Any, **outputs: Any) -> PPOTerms:
            terms: PPOTerms = spoil(super().loss_terms(*args, **outputs))
            return terms

    module = make_ppo("qwen3")
    module.__class__ = Spoiled
    with pytest.raises(ConfigError) as caught:
        updated(module, off_policy(module))
    assert str(caught.value).startswith(f"Spoiled.loss_terms() returned {found}")
