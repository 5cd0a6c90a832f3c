"""What of the configuration reaches the loss: denominators, whitening and clips, by hand."""

from dataclasses import fields, replace

import pytest
import torch

from lightning_rlhf.core.records import Experience, UpdateStats

from .conftest import close, fit, prompts, same_direction
from .experiences import Make, off_policy, on_policy, updated

REDUCTIONS = ("token_mean", "sequence_mean", "constant")


@pytest.mark.parametrize(
    ("loss", "reduction", "microbatch_size"),
    [
        *zip(("ppo", "sapo", "cispo"), REDUCTIONS, (1, 2, 1), strict=True),
        ("gspo", REDUCTIONS[1], 1),
    ],
)
def test_the_split_into_micro_batches_changes_no_gradient(
    make_ppo: Make, loss: str, reduction: str, microbatch_size: int
) -> None:
    found = []
    for size in (4, microbatch_size):
        module = make_ppo(
            microbatch_size=size, policy_loss=loss, loss_reduction=reduction, vf_coef=0.5,
            ent_coef=0.1, kl_in="loss", kl_estimator="k3",
        )  # fmt: skip
        found.append(updated(module, off_policy(module, rows=4)))
    (whole, whole_grads), (parts, parts_grads) = found
    same_direction(parts_grads, whole_grads)
    for field in fields(UpdateStats):
        close(getattr(parts, field.name), getattr(whole, field.name))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_responses_by_hand(make_ppo: Make, reduction: str) -> None:
    # On policy the ratio is 1, and every token's policy loss its negated advantage, 2 in one
    # response and -1 in the other. A fresh critic says 0: half of the squared return 1 and 3.
    module = make_ppo(
        fresh=True, loss_reduction=reduction, vf_coef=0.25, ent_coef=0.0, max_response_tokens=6
    )
    experience = on_policy(module)
    counts = experience.response_mask.sum(1).tolist()
    rows = torch.tensor([counts.index(min(counts)), counts.index(max(counts))])
    short, long = min(counts), max(counts)
    assert short < long
    experience = experience.select(rows)
    mask = experience.response_mask
    experience = replace(
        experience,
        advantages=torch.tensor([[-2.0], [1.0]]) * mask,
        returns=torch.tensor([[1.0], [3.0]]) * mask,
    )
    stats, _ = updated(module, experience)

    def reduced(a: float, b: float) -> float:
        """Of numbers that are the same for all tokens of a response."""
        if reduction == "token_mean":
            return (short * a + long * b) / (short + long)
        if reduction == "sequence_mean":
            return (a + b) / 2
        return (short * a + long * b) / (2 * 6)

    policy, value = reduced(2.0, -1.0), reduced(0.5, 4.5)
    assert stats.policy_loss.item() == pytest.approx(policy, abs=1e-5)
    assert stats.value_loss.item() == pytest.approx(value, abs=1e-5)
    assert stats.loss.item() == pytest.approx(policy + 0.25 * value, abs=1e-5)
    assert stats.ratio_mean.item() == pytest.approx(1.0, abs=1e-5)  # a mean over tokens always


@pytest.mark.parametrize("rule", ["none", "batch", "minibatch"])
def test_whitening_is_over_what_it_says(make_ppo: Make, rule: str) -> None:
    module = make_ppo(whiten_advantages=rule, minibatch_size=4)
    seen: list[Experience] = []
    update = module.update
    module.update = lambda minibatch, *args: (seen.append(minibatch), update(minibatch, *args))[1]
    fit(module, [prompts()])

    def is_white(parts: list[Experience]) -> bool:
        tokens = torch.cat([part.advantages[part.response_mask] for part in parts]).double()
        variance, mean = torch.var_mean(tokens, correction=0)
        return abs(mean) < 1e-5 and abs(variance - 1) < 1e-4

    assert len(seen) == 4
    assert [is_white([part]) for part in seen] == [rule == "minibatch"] * 4
    # The two epochs: what is white in both halves is white as a whole.
    assert [is_white(seen[:2]), is_white(seen[2:])] == [rule != "none"] * 2
    for part in seen:
        assert not part.advantages[~part.response_mask].any()
