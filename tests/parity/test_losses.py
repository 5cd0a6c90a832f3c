"""Losses and their gradients against the micro-batches of TRL's trainer."""

import pytest
import torch
from trl.trainer.utils import selective_log_softmax

from lightning_rlhf.core.experience import minibatches
from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.core.losses import policy_loss, token_weights, value_loss

from .conftest import close
from .ours import experience_of, masked_mean
from .trl_iteration import (
    ACCUMULATION,
    BATCH,
    RESPONSE_LENGTH,
    VOCABULARY,
    Iteration,
    trl_iteration,
)

epochs = pytest.mark.parametrize("epoch", [0, 3])


def masks(trl: Iteration, part: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = part["micro_batch_inds"]
    return trl.mask[rows], trl.mask_p1[rows]


@epochs
def test_policy_loss_and_its_gradient(epoch: int) -> None:
    trl = trl_iteration()
    for part in trl.microbatches[epoch]:
        mask, _ = masks(trl, part)
        logprobs = part["new_logprobs"].clone().requires_grad_()
        ours = policy_loss(
            logprobs, part["mb_logprobs"], part["mb_advantage"], clip_range_high=None,
            dual_clip=None, clip_range=trl.batch["args"].cliprange,
        )  # fmt: skip
        close(ours, part["pg_loss_max"])
        loss = masked_mean(ours, mask)
        close(loss, part["pg_loss"])
        loss.backward()
        close(logprobs.grad, part["d_new_logprobs"])


@epochs
def test_value_loss_and_its_gradient(epoch: int) -> None:
    """On TRL's positions, which are one more for each response that ended early."""
    trl = trl_iteration()
    for part in trl.microbatches[epoch]:
        _, mask_p1 = masks(trl, part)
        values = part["vpred"].clone().requires_grad_()
        clip = trl.batch["args"].cliprange_value
        ours = value_loss(values, part["mb_values"], part["mb_return"], clip_range_vf=clip)
        close(ours, 0.5 * part["vf_loss_max"])
        loss = masked_mean(ours, mask_p1)
        close(loss, part["vf_loss"])
        (trl.batch["args"].vf_coef * loss).backward()
        close(values.grad, part["d_vpred"])


def test_clipping_was_at_work() -> None:
    trl = trl_iteration()
    clip = trl.batch["args"].cliprange
    ratio, advantage = trl.epoch(1, "ratio")[trl.mask], trl.epoch(1, "mb_advantage")[trl.mask]
    for sign in (1, -1):
        assert ((advantage * sign > 0) & (ratio > 1 + clip)).any()
        assert ((advantage * sign > 0) & (ratio < 1 - clip)).any()
    assert (trl.epoch(1, "vf_losses2") > trl.epoch(1, "vf_losses1"))[trl.mask].any()


@epochs
def test_value_loss_differs_by_the_position_after_the_response(epoch: int) -> None:
    """TRL's mean is over N + E positions, ours over N tokens.

    N tokens of mean loss m, and E positions after responses that ended early, of mean loss e:
    TRL (N m + E e) / (N + E), ours m; the difference is (e - m) E / (N + E).
    """
    trl = trl_iteration()
    after = trl.mask_p1 & ~trl.mask
    assert after.sum() == trl.ended_early.sum() > 0
    each = value_loss(
        trl.epoch(epoch, "vpred"), trl.epoch(epoch, "mb_values"), trl.epoch(epoch, "mb_return"),
        clip_range_vf=trl.batch["args"].cliprange_value,
    )  # fmt: skip
    theirs = 0.5 * masked_mean(trl.epoch(epoch, "vf_loss_max"), trl.mask_p1)
    ours = masked_mean(each, trl.mask)
    share = after.sum() / trl.mask_p1.sum()
    close(theirs - ours, share * (masked_mean(each, after) - ours))


@epochs
def test_mean_of_microbatch_means_differs_from_the_mean_over_tokens(epoch: int) -> None:
    """TRL weighs K micro-batches alike, ours weighs tokens alike.

    Where micro-batch k has n_k of N tokens and mean loss m_k, TRL takes sum m_k / K and ours
    sum m_k n_k / N; the difference is sum (1 / K - n_k / N) m_k.
    """
    trl = trl_iteration()
    parts = trl.microbatches[epoch]
    weights = token_weights(trl.mask, "token_mean", max_response_tokens=RESPONSE_LENGTH)
    ours = (weights.double() * trl.epoch(epoch, "pg_loss_max")).sum()
    means = torch.stack([part["pg_loss"] for part in parts])
    tokens = torch.stack([masks(trl, part)[0].sum() for part in parts])
    assert len(set(tokens.tolist())) > 1
    expected = ((1 / ACCUMULATION - tokens / tokens.sum()) * means).sum()
    close(means.mean() - ours, expected, rtol=1e-6, atol=1e-7)  # our weights are fp32
    assert expected.abs() > 1e-4


@pytest.mark.parametrize("minibatch_count", [1, 2, 4])
def test_optimizer_steps(minibatch_count: int) -> None:
    """TRL takes one step an epoch whatever num_mini_batches is: it accumulates over all of them.

    Its Accelerator gets gradient_accumulation_steps, which makes the batch, and not the
    micro-batches of a minibatch. Ours takes one step a minibatch.
    """
    trl = trl_iteration(num_mini_batches=minibatch_count)
    generator = torch.Generator().manual_seed(0)
    ours = minibatches(experience_of(trl), 4, BATCH // minibatch_count, generator)
    assert len(list(ours)) == 4 * minibatch_count
    assert trl.optimizer_steps == 4


def test_optimizer_steps_on_the_last_batch_of_the_data() -> None:
    """There TRL takes one step a micro-batch: accelerate ends accumulation with the data."""
    assert trl_iteration(rows=BATCH).optimizer_steps == 4 * ACCUMULATION
    assert trl_iteration(rows=2 * BATCH).optimizer_steps == 4


def test_token_logprobs() -> None:
    """Of the same logits; ours computes in fp32."""
    trl = trl_iteration()
    logits, responses = trl.epoch(1, "logits"), trl.epoch(1, "mb_responses")
    ours, _ = token_logprobs(
        logits.flatten(0, 1), responses.flatten(), lambda x: x, temperature=1.0,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    theirs = selective_log_softmax(logits, responses)
    close(ours.double(), theirs.flatten(), rtol=1e-6, atol=1e-6)
    close(torch.where(trl.mask, theirs, 1.0), trl.epoch(1, "new_logprobs"))


def test_the_gradient_is_not_clipped() -> None:
    """A bound a million times smaller changes not one digit of what TRL learns."""
    usual, bound = trl_iteration(), trl_iteration(max_grad_norm=1e-6)
    for epoch in range(4):
        theirs = bound.epoch(epoch, "new_logprobs")
        assert torch.equal(theirs, usual.epoch(epoch, "new_logprobs"))
    assert not torch.equal(usual.epoch(0, "new_logprobs"), usual.epoch(3, "new_logprobs"))
