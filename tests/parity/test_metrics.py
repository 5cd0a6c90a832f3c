"""What is logged, against the metrics of an iteration of TRL's trainer.

TRL averages over all B * T positions, ours over the N of them that are tokens: s = N / (B * T).
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_rlhf.callbacks.metrics import rollout_metrics
from lightning_rlhf.core.kl import k2, k3

from .conftest import close, number
from .ours import entropies, experience_of, masked_mean, update_facts
from .trl_iteration import PENALTY, Iteration, trl_iteration

EPOCHS = range(4)


def share_of_tokens(trl: Iteration) -> Tensor:
    share = trl.mask.double().mean()
    assert 0.3 < share < 0.9
    return share


def our_facts(trl: Iteration) -> dict[str, Tensor]:
    """What we report, mean over epochs, of the same advantages, returns, ratios and values."""
    experience = replace(
        experience_of(trl),
        advantages=trl.batch["advantages"],
        returns=torch.where(trl.mask, trl.batch["returns"], 0),
    )
    each = [update_facts(trl, experience, epoch) for epoch in EPOCHS]
    return {name: torch.stack([facts[name] for facts in each]).mean() for name in each[0]}


def metric(trl: Iteration, name: str) -> Tensor:
    return number(trl.metrics[name])


def test_kl_score_and_return_of_a_response() -> None:
    trl = trl_iteration()
    ours = rollout_metrics(experience_of(trl))
    assert ours["kl_divergence"] == pytest.approx(trl.metrics["objective/kl"], rel=1e-6)
    theirs = trl.metrics["objective/rlhf_reward"]
    assert ours["rollout/shaped_return"] == pytest.approx(theirs, rel=1e-6)


def test_mean_score_differs_by_the_penalty() -> None:
    """objective/scores is after the penalty for a missing end token, reward_mean before it."""
    trl = trl_iteration()
    ours = rollout_metrics(experience_of(trl))
    unended = (~trl.batch["contain_eos_token"]).double().mean().item()
    difference = trl.metrics["objective/scores"] - ours["reward_mean"]
    assert difference == pytest.approx(-PENALTY * unended, rel=1e-6)


def test_sampled_entropy_leaves_out_the_sentinel() -> None:
    """objective/entropy is minus the log-probability of a response; without a mask, each position
    of padding would take 1 nat off."""
    trl = trl_iteration()
    ours = -trl.rollout().logprobs.sum(dim=1).mean()
    theirs = metric(trl, "objective/entropy")
    close(theirs, ours, rtol=1e-6)
    unmasked = -trl.batch["logprobs"].double().sum(dim=1).mean()
    close(ours - unmasked, (~trl.mask).double().sum(dim=1).mean(), rtol=1e-6)


def test_approx_kl_differs_by_the_padding_and_the_estimator() -> None:
    """TRL: s times the mean of k2 over tokens; ours: the mean of k3 over tokens."""
    trl = trl_iteration()
    share = share_of_tokens(trl)
    of_tokens = {
        estimator: torch.stack(
            [
                masked_mean(
                    estimator(trl.batch["logprobs"].double(), trl.epoch(epoch, "new_logprobs")),
                    trl.mask,
                )
                for epoch in EPOCHS
            ]
        ).mean()
        for estimator in (k2, k3)
    }
    theirs, ours = metric(trl, "policy/approxkl_avg"), our_facts(trl)["approx_kl"]
    close(theirs, share * of_tokens[k2])
    close(ours, of_tokens[k3])
    close(theirs - ours, share * of_tokens[k2] - of_tokens[k3])


def test_ratio_differs_by_the_padding() -> None:
    """A ratio is 1 on padding: TRL - ours = (1 - s) (1 - ours)."""
    trl = trl_iteration()
    share, ours = share_of_tokens(trl), our_facts(trl)["ratio_mean"]
    close(metric(trl, "val/ratio") - ours, (1 - share) * (1 - ours))


def test_entropy_differs_by_the_padding() -> None:
    """TRL averages in what the policy would sample after a response has ended.

    H of tokens and H' of padding: TRL s H + (1 - s) H', ours H.
    """
    trl = trl_iteration()
    share, ours = share_of_tokens(trl), our_facts(trl)["entropy"]
    each = torch.stack(
        [entropies(trl.epoch(epoch, "logits").flatten(0, 1)).double() for epoch in EPOCHS]
    ).mean(dim=0)
    of_padding = masked_mean(each.view_as(trl.mask), ~trl.mask)
    difference = metric(trl, "policy/entropy_avg") - ours
    close(difference, (1 - share) * (of_padding - ours), rtol=1e-6, atol=1e-6)
    assert difference.abs() > 1e-3


def test_clip_fraction_differs_by_the_ratios_that_clipping_does_not_hold() -> None:
    """TRL: the clipped term is the larger. Ours: the ratio is outside the range, on either side.

    A ratio below the range of a good token, or above it of a bad one, is outside and not clipped.
    TRL's number is a mean of micro-batch means, so both are taken micro-batch by micro-batch.
    """
    trl = trl_iteration()
    clip = trl.batch["args"].cliprange
    outside, unheld = [], []
    for parts in trl.microbatches:
        for part in parts:
            mask = trl.mask[part["micro_batch_inds"]]
            ratio, advantage = part["ratio"], part["mb_advantage"]
            low, high = ratio < 1 - clip, ratio > 1 + clip
            outside.append(masked_mean((low | high).double(), mask))
            unheld.append(
                masked_mean(((low & (advantage > 0)) | (high & (advantage < 0))).double(), mask)
            )
    theirs = metric(trl, "policy/clipfrac_avg")
    close(torch.stack(outside).mean() - theirs, torch.stack(unheld).mean(), rtol=1e-6)
    assert torch.stack(unheld).mean() > 0.01


def test_policy_loss_of_an_update_differs_by_microbatches() -> None:
    """PPOModule's own sum, and TRL's mean of K means: sum (1 / K - n_k / N) m_k."""
    trl = trl_iteration()
    expected = []
    for parts in trl.microbatches:
        means = torch.stack([part["pg_loss"] for part in parts])
        tokens = torch.stack([trl.mask[part["micro_batch_inds"]].sum() for part in parts])
        expected.append(((1 / len(parts) - tokens / tokens.sum()) * means).sum())
    difference = metric(trl, "loss/policy_avg") - our_facts(trl)["policy_loss"]
    close(difference, torch.stack(expected).mean(), rtol=1e-6, atol=1e-7)  # our weights are fp32


@pytest.mark.parametrize("minibatch_count", [2, 4])
def test_trls_metrics_shrink_with_the_number_of_minibatches(minibatch_count: int) -> None:
    """Its tables have a cell for each micro-batch of the batch in each minibatch; most stay 0.

    The means are over all cells. A ratio is 1 in the first epoch, where nothing has changed yet:
    TRL logs 1 / num_mini_batches. Ours has no empty cells.
    """
    trl = trl_iteration(num_mini_batches=minibatch_count, num_ppo_epochs=1)
    whole = trl_iteration(num_mini_batches=1, num_ppo_epochs=1)
    close(metric(trl, "val/ratio"), number(1 / minibatch_count), rtol=1e-6)
    close(metric(whole, "val/ratio"), number(1.0), rtol=1e-6)
    for name in ("loss/policy_avg", "loss/value_avg", "policy/entropy_avg"):
        close(metric(trl, name), metric(whole, name) / minibatch_count, rtol=1e-6)
