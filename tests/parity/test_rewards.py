"""From scores and log-probabilities to rewards, against an iteration of TRL's trainer."""

import pytest
import torch
from transformers import LlamaForCausalLM

from lightning_rlhf.core.kl import ESTIMATORS, TokenLogprobs
from lightning_rlhf.core.masking import masked_moments, masked_rescale, masked_whiten
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.core.shaping import NO_SCORES, shape_score
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams

from .conftest import close
from .ours import config_like, experience_of, masked_mean
from .test_whitening import spread
from .trl_iteration import (
    BATCH,
    EOS,
    PAD,
    PENALTY,
    POLICY_SEED,
    RESPONSE_LENGTH,
    STOP,
    prompts,
    tiny,
    trl_iteration,
)

estimators = pytest.mark.parametrize("estimator", ["k1", "k3"])


def test_the_batch_has_every_case() -> None:
    trl = trl_iteration()
    ended = trl.batch["contain_eos_token"]
    assert len(set(trl.lengths.tolist())) >= 4
    assert (ended & ~trl.ended_early).any()
    assert (ended & trl.ended_early).any()
    assert (~ended).any()
    assert trl.batch["kl"][trl.mask].abs().min() > 1e-3


@estimators
def test_kl(estimator: str) -> None:
    trl = trl_iteration(kl_estimator=estimator)
    scores, rollout = trl.scores(), trl.rollout()
    p, q = rollout.logprobs, scores.ref_logprobs
    tokens = TokenLogprobs(logprobs=p, old_logprobs=p, ref_logprobs=q)
    ours = ESTIMATORS[estimator](tokens)
    close(ours, trl.batch["kl"])


def test_sentinel_on_padding_is_no_log_probability() -> None:
    """TRL writes 1.0 where we write 0: a difference of 1 nat for each position of padding.

    It cancels in the KL, which is 0 there on both sides.
    """
    trl = trl_iteration()
    padding = ~trl.mask
    for theirs, ours in (
        (trl.batch["logprobs"], trl.rollout().logprobs),
        (trl.batch["ref_logprobs"], trl.scores().ref_logprobs),
    ):
        difference = (theirs - ours).sum(dim=1)
        close(difference, padding.sum(dim=1).double())
    assert not trl.batch["kl"][padding].any()


def test_missing_eos_subtract() -> None:
    trl = trl_iteration()
    ours = shape_score(
        trl.raw_score, trl.batch["contain_eos_token"], trl.lengths, config_like(trl), NO_SCORES
    )
    close(ours, trl.batch["scores"])
    assert (ours != trl.raw_score).any()


def test_missing_eos_replace_differs_by_the_score() -> None:
    # TRL: s - penalty; replace: -penalty.
    trl = trl_iteration()
    ended = trl.batch["contain_eos_token"]
    config = config_like(trl, missing_eos="replace")
    ours = shape_score(trl.raw_score, ended, trl.lengths, config, NO_SCORES)
    close(trl.batch["scores"] - ours, torch.where(ended, 0, trl.raw_score))


def test_another_stop_token_differs_by_the_penalty() -> None:
    """TRL looks for the tokenizer's eos token anywhere, whatever token stops a response.

    Ours asks whether the response was ended. So TRL punishes one that stopped, unless it has an
    eos token too, and lets one pass that ran on after an eos token.
    """
    trl = trl_iteration(stop_token=None, stop_token_id=STOP)
    responses = trl.batch["responses"]
    last = responses.gather(1, trl.lengths[:, None] - 1).squeeze(1)
    stopped = last == STOP
    has_eos = ((responses == EOS) & trl.mask).any(dim=1)
    ours = shape_score(trl.raw_score, stopped, trl.lengths, config_like(trl), NO_SCORES)
    punished, spared = stopped & ~has_eos, ~stopped & has_eos
    assert punished.any()
    assert spared.any()
    close(trl.batch["scores"] - ours, PENALTY * (spared.double() - punished.double()))


def test_without_a_stop_token_every_response_runs_to_full_length() -> None:
    """TRL's default, stop_token=None, keeps what follows an eos token; ours ends there."""
    trl = trl_iteration(stop_token=None)
    assert trl.mask.all()
    after_eos = (trl.batch["responses"] == EOS).cumsum(dim=1).roll(1, dims=1) > 0
    after_eos[:, 0] = False
    assert after_eos.sum() > BATCH

    policy = Roles(tiny(LlamaForCausalLM, POLICY_SEED).eval())
    tokens = torch.tensor(prompts(BATCH))
    mask = tokens != PAD
    params = SamplingParams(
        max_response_tokens=RESPONSE_LENGTH, temperature=0.7, end_token_ids=[EOS]
    )
    rollout = NativeSampler(policy, params).sample(
        Prompts(tokens=tokens.masked_fill(~mask, 0), mask=mask, index=torch.arange(BATCH)), 1,
        torch.Generator().manual_seed(0), torch.arange(BATCH),
    )  # fmt: skip
    is_eos = (rollout.responses == EOS) & rollout.response_mask
    assert torch.equal(is_eos.sum(dim=1), rollout.ended.long())
    last = rollout.response_mask.sum(dim=1) - 1
    assert torch.equal(is_eos.long().argmax(dim=1)[rollout.ended], last[rollout.ended])
    assert 0 < rollout.ended.sum() < BATCH


@estimators
def test_score_is_added_one_position_later(estimator: str) -> None:
    """TRL adds it at the first position after a response, where there is one."""
    trl = trl_iteration(kl_estimator=estimator)
    theirs, ours = trl.batch["rewards"], experience_of(trl).rewards
    score, rows = trl.batch["scores"], torch.arange(BATCH)
    expected = torch.zeros_like(theirs)
    expected[rows, trl.lengths - 1] -= torch.where(trl.ended_early, score, 0)
    after = trl.lengths.clamp(max=theirs.shape[1] - 1)
    expected[rows, after] += torch.where(trl.ended_early, score, 0)
    close(theirs - ours, expected)
    close(theirs.sum(dim=1), ours.sum(dim=1))
    assert trl.ended_early.any()


def test_whitened_rewards_of_one_mask_differ_by_the_variance() -> None:
    trl = trl_iteration(whiten_rewards=True)
    rewards, theirs = trl.whitened[0]
    mean, variance = masked_moments(rewards, trl.mask_p1)
    ours = masked_rescale(rewards, trl.mask_p1)
    factor = spread(variance, int(trl.mask_p1.sum()))
    close((ours - mean)[trl.mask_p1], (theirs - mean)[trl.mask_p1] * factor)
    close(masked_whiten(rewards, trl.mask_p1) + mean * trl.mask_p1, ours)


def test_whitened_rewards_keep_the_mean_of_other_positions() -> None:
    """TRL counts the position after each response that ended early; ours counts its tokens.

    The sum of the rewards is the same, S, so the mean that stays is S / (N + E) in TRL, where N
    are tokens and E responses that ended early, and S / N in ours.
    """
    trl = trl_iteration(whiten_rewards=True)
    theirs = masked_mean(trl.batch["rewards"], trl.mask_p1)
    ours = masked_mean(experience_of(trl).rewards, trl.mask)
    tokens, early = trl.mask.sum(), trl.ended_early.sum()
    assert early > 0
    close(theirs, ours * tokens / (tokens + early))
