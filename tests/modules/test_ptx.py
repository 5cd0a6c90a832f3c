"""Demonstrations in the updates of PPO: their loss, gradient, order and operations."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.data.lengths import DemonstrationTokens
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import PTX

from .conftest import VOCABULARY, by_architecture, close, grads, same_direction, within_fit
from .experiences import Make, learn, off_policy, on_policy, update

COEF = 0.7


def examples() -> list[DemonstrationTokens]:
    """Six of uneven length; in the last, two tokens of the prompt are targets as well."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    lengths = ((3, 4), (1, 8), (5, 1), (2, 2), (6, 3))
    found = [DemonstrationTokens(tokens(prompt), tokens(response)) for prompt, response in lengths]
    return [*found, DemonstrationTokens(tokens(6), tokens(2), [2, 3])]


def with_ptx(make_ppo: Make, architecture: str = "qwen3", **changes: Any) -> PPOModule:
    """A module that learns from the demonstrations too; one without a coefficient does not."""
    module = make_ppo(architecture, ptx_coef=COEF, **changes)
    module.ptx = PTX(examples(), module.config, pad_id=0, seed=0)
    return module


def slow_nll(module: PPOModule, chosen: list[DemonstrationTokens]) -> tuple[Tensor, int]:
    """Sum of -log p and number of the targets, row by row without padding, token by token."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for example in chosen:
        row = [*example.prompt, *example.response]
        logits = module.roles.causal_lm(input_ids=torch.tensor([row])).logits[0].double()
        learned = example.learned
        for t in (*learned, *range(len(example.prompt), len(row))):
            total = total - logits[t - 1].log_softmax(-1)[row[t]]
            count += 1
    return total, count


@by_architecture
def test_the_gradient_is_that_of_ppo_plus_that_of_the_demonstrations(
    make_ppo: Make, architecture: str
) -> None:
    # d loss = d PPO + 0.7 / N * d (sum over the N targets of -log p), by a slow version of each.
    plain = make_ppo(architecture, spread=0.1)
    stats = within_fit(plain, lambda: update(plain, off_policy(plain)))
    expected = grads(plain)

    slow = with_ptx(make_ppo, architecture, spread=0.1)
    assert slow.ptx is not None
    rows = slow.ptx.schedule.batch(0)
    nll, count = slow_nll(slow, [examples()[row] for row in rows])
    (COEF * nll / count).backward()
    for name, gradient in grads(slow).items():
        expected[name] = expected[name] + gradient

    module = with_ptx(make_ppo, architecture, spread=0.1)
    found = within_fit(module, lambda: update(module, off_policy(module)))
    same_direction(grads(module), expected)
    close(found.ptx_loss.double(), nll.detach() / count)
    close(found.loss.double(), stats.loss.double() + COEF * nll.detach() / count)
    assert (stats.ptx_loss, found.policy_loss) == (0.0, stats.policy_loss)
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    close(found.grad_norm, norm)


def test_each_update_has_a_batch_of_its_own_and_all_demonstrations_come_in_turn(
    make_ppo: Make,
) -> None:
    """6 demonstrations in batches of 4: three batches are two passes, each with all of them."""
    module = with_ptx(make_ppo)  # 2 epochs of 2 minibatches: 4 updates in an iteration
    ptx = module.ptx
    assert ptx is not None
    rows = [row for number in range(3) for row in ptx.schedule.batch(number)]
    assert sorted(rows[:6]) == sorted(rows[6:]) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(ptx.batch(1, 3).tokens, ptx.batch(1, 3).tokens)
    other = PTX(examples(), module.config, pad_id=0, seed=1)
    assert [*map(other.schedule.batch, range(6))] != [*map(ptx.schedule.batch, range(6))]

    taken: list[tuple[int, int]] = []
    batch = ptx.batch

    def spy(iteration: int, number: int) -> Any:
        taken.append((iteration, number))
        return batch(iteration, number)

    module.iteration = 1
    with patch.object(ptx, "batch", spy):
        experience = on_policy(module)
        updates = within_fit(module, lambda: learn(module, experience, torch.Generator()))
    assert taken == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert len({float(u.ptx_loss) for u in updates}) == 4
    assert [ptx.batch(1, n).tokens.tolist() for n in range(2)] == [
        ptx.batch(0, 4 + n).tokens.tolist() for n in range(2)
    ]


def test_a_checkpoint_of_other_demonstrations_is_refused(make_ppo: Make) -> None:
    module = with_ptx(make_ppo)
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    module.on_load_checkpoint(checkpoint)
    assert module.ptx is not None
    first, *others = module.ptx.examples
    edited = [replace(first, response=[*first.response, 1]), *others]
    module.ptx = PTX(edited, module.config, pad_id=0, seed=0)
    with pytest.raises(CheckpointError, match=r"demonstrations of ppo\.ptx_coef are others now"):
        module.on_load_checkpoint(checkpoint)
