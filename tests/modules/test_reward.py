"""Bradley-Terry on pairs: which weights it reaches, and what it must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core.types import Preferences
from lightning_rlhf.models.roles import POLICY, REFERENCE, REWARD, Roles
from lightning_rlhf.modules.reward import RewardModule

from .conftest import (
    CENTER_COEF,
    VOCABULARY,
    Outputs,
    changed,
    close,
    fit,
    parameters,
    rm_config,
    rm_roles,
    same_direction,
    with_adapter,
)

CHOSEN, REJECTED = (4, 9, 2, 6, 1, 5), (7, 3, 2, 12, 8, 1)  # tokens of each sequence


def pad_to(lengths: tuple[int, ...], width: int, seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        VOCABULARY, (len(lengths), 32), generator=torch.Generator().manual_seed(seed)
    )
    return tokens[:, :width], torch.arange(width) < torch.tensor(lengths)[:, None]


def preferences(chosen_width: int = 9, rejected_width: int = 12) -> Preferences:
    """Six pairs; wider batches hold other ids on the padding, not other pairs."""
    chosen, chosen_mask = pad_to(CHOSEN, chosen_width, seed=0)
    rejected, rejected_mask = pad_to(REJECTED, rejected_width, seed=1)
    return Preferences(
        chosen=chosen, chosen_mask=chosen_mask, rejected=rejected, rejected_mask=rejected_mask
    )


def slow_rewards(roles: Roles, tokens: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Row by row without padding: the head on the last token's last hidden state."""
    found = []
    with roles.acting(REWARD):
        for row, length in enumerate(lengths):
            output = roles.causal_lm(
                input_ids=tokens[row, :length][None], output_hidden_states=True
            )
            linear = roles.heads[REWARD].linear
            found.append(output.hidden_states[-1][0, -1] @ linear.weight[0] + linear.bias[0])
    return torch.stack(found)


def slow_loss(roles: Roles, batch: Preferences) -> Tensor:
    chosen = slow_rewards(roles, batch.chosen, CHOSEN).double()
    rejected = slow_rewards(roles, batch.rejected, REJECTED).double()
    ranking = (1 + (rejected - chosen).exp()).log()
    return (ranking + CENTER_COEF * (chosen + rejected) ** 2).mean()


def test_loss_and_rewards(architecture: str) -> None:
    module = RewardModule(rm_roles(architecture), rm_config())
    outputs, batch = Outputs(), preferences()
    with torch.no_grad():
        loss = slow_loss(module.roles, batch)
        chosen = slow_rewards(module.roles, batch.chosen, CHOSEN)
        rejected = slow_rewards(module.roles, batch.rejected, REJECTED)
        found = module.validation_step(batch, 0)
    close(found["chosen"], chosen)
    close(found["rejected"], rejected)
    fit(module, [batch], [outputs])
    step = outputs.steps[0]
    close(step["loss"].double(), loss)
    # All pairs in their order, though they went through in micro-batches of two.
    close(step["chosen"], chosen)
    close(step["rejected"], rejected)
    assert not step["chosen"].requires_grad


def test_gradient_is_that_of_the_slow_version(architecture: str) -> None:
    module = RewardModule(rm_roles(architecture), rm_config())
    outputs, batch = Outputs(), preferences()
    slow_roles = rm_roles(architecture)
    slow_loss(slow_roles, batch).backward()
    fit(module, [batch], [outputs])
    expected = {
        f"roles.{n}": p.grad for n, p in slow_roles.named_parameters() if p.grad is not None
    }
    # Without centring the bias moves both sides alike and would have no gradient.
    assert expected["roles.heads.reward.linear.bias"].abs() > 0.1
    same_direction(outputs.grads[0], expected)


def test_a_tie_costs_log_2() -> None:
    module = RewardModule(rm_roles("qwen3"), rm_config(center_coef=0.0))
    tokens, mask = pad_to(CHOSEN, 9, seed=0)
    batch = Preferences(chosen=tokens, chosen_mask=mask, rejected=tokens, rejected_mask=mask)
    outputs = Outputs()
    fit(module, [batch], [outputs])
    close(outputs.steps[0]["loss"], torch.tensor(math.log(2)))


@pytest.mark.parametrize("microbatch_size", [1, 2, 3])
def test_micro_batches_give_the_gradient_of_the_batch(
    architecture: str, microbatch_size: int
) -> None:
    found = []
    for size in (6, microbatch_size):
        outputs = Outputs()
        module = RewardModule(rm_roles(architecture), rm_config(microbatch_size=size))
        fit(module, [preferences()], [outputs])
        found.append(outputs)
    whole, parts = found
    same_direction(parts.grads[0], whole.grads[0])
    for name in ("loss", "grad_norm", "chosen", "rejected"):
        close(parts.steps[0][name], whole.steps[0][name])


def test_padding_on_either_side_changes_no_reward(architecture: str) -> None:
    roles = rm_roles(architecture)
    tokens, mask = pad_to(CHOSEN, 9, seed=0)
    with torch.no_grad():
        expected = slow_rewards(roles, tokens, CHOSEN)
        for left, right, garbage in ((0, 0, 0), (0, 5, 3), (5, 0, 9), (3, 4, 63)):
            padded = F.pad(tokens, (left, right), value=garbage)
            padded_mask = F.pad(mask, (left, right), value=False)
            close(roles.reward(padded, padded_mask), expected)
        # A row of its own, without any other beside it.
        for row, length in enumerate(CHOSEN):
            alone = F.pad(tokens[row : row + 1, :length], (4, 0), value=5)
            real = F.pad(mask[row : row + 1, :length], (4, 0), value=False)
            close(roles.reward(alone, real), expected[row : row + 1])


@pytest.mark.parametrize(("chosen_width", "rejected_width"), [(9, 12), (20, 12), (9, 30), (15, 15)])
def test_the_sides_may_be_of_any_width(chosen_width: int, rejected_width: int) -> None:
    module = RewardModule(rm_roles("qwen3"), rm_config())
    with torch.no_grad():
        expected = module.rewards(preferences())
        found = module.rewards(preferences(chosen_width, rejected_width))
    close(found["chosen"], expected["chosen"])
    close(found["rejected"], expected["rejected"])


def test_only_the_reward_adapter_and_its_head_move() -> None:
    roles = rm_roles("qwen3")
    with_adapter(roles, POLICY, seed=5)
    module = RewardModule(roles, rm_config())
    before, reference = parameters(module), roles.probe(REFERENCE)
    fit(module, [preferences()] * 2)
    moved = changed(before, parameters(module))
    adapter = {n for n in before if f".{REWARD}." in n and "lora_" in n}
    # The bias of the head has no say in a difference of two rewards.
    assert moved - {"roles.heads.reward.linear.bias"} == adapter | {
        "roles.heads.reward.linear.weight"
    }
    assert torch.equal(roles.probe(REFERENCE), reference)


def test_the_role_played_before_is_played_afterwards() -> None:
    roles = rm_roles("qwen3")
    with_adapter(roles, POLICY, seed=5)
    policy = roles.probe(POLICY)
    tokens, _ = pad_to(CHOSEN, 9, seed=0)
    hidden = roles.hidden(tokens)
    roles.reward(*pad_to(CHOSEN, 9, seed=0))
    assert torch.equal(roles.hidden(tokens), hidden)
    assert torch.equal(roles.probe(POLICY), policy)
    assert not torch.equal(roles.probe(REWARD), policy)


def test_it_learns_to_tell_the_sides_apart() -> None:
    module, outputs = RewardModule(rm_roles("qwen3"), rm_config(lr=1e-2)), Outputs()
    fit(module, [preferences()] * 30, [outputs])
    first, last = outputs.steps[0], outputs.steps[-1]
    assert last["loss"] < 0.1 < first["loss"]
    assert (last["chosen"] > last["rejected"]).all()
