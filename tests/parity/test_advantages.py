"""Advantages and returns against an iteration of TRL's trainer."""

from typing import Any

import pytest
import torch

from lightning_rlhf.core.experience import gae
from lightning_rlhf.core.masking import masked_moments

from .conftest import close
from .ours import experience_of
from .test_whitening import spread
from .trl_iteration import Iteration, trl_iteration

every_discount = pytest.mark.parametrize(
    "settings", [{}, {"gamma": 0.9, "lam": 0.8}, {"gamma": 1.0, "lam": 1.0}]
)


@every_discount
def test_gae_of_trls_own_rewards(settings: dict[str, Any]) -> None:
    """Ours with the position after a response as a real one, as TRL counts it."""
    trl = trl_iteration(**settings)
    args = trl.batch["args"]
    advantages, returns = gae(
        trl.batch["rewards"], trl.batch["values"], trl.mask_p1, gamma=args.gamma,
        gae_lambda=args.lam,
    )  # fmt: skip
    close(advantages, trl.advantages)
    close(returns, trl.batch["returns"])


def added_later(trl: Iteration) -> torch.Tensor:
    """What TRL's advantages have over ours, because it adds the score one position later.

    With V_L the critic's word on the position after the response, and s the score,

        A_{L-1}:  TRL   r + gamma V_L - V_{L-1} + gamma lambda (s - V_L)
                  ours  r + s - V_{L-1}

    the difference is gamma (1 - lambda) V_L - (1 - gamma lambda) s, which for gamma 1 is
    (1 - lambda) (V_L - s); k tokens earlier it is (gamma lambda)^k of that. 0 where the response
    fills all room.
    """
    args, lengths, width = trl.batch["args"], trl.lengths, trl.mask.shape[1]
    after = lengths.clamp(max=width - 1)[:, None]
    value, score = trl.batch["values"].gather(1, after), trl.batch["scores"][:, None]
    both = args.gamma * args.lam
    at_last = args.gamma * (1 - args.lam) * value - (1 - both) * score
    tokens_left = (lengths[:, None] - 1 - torch.arange(width)).clamp(min=0)
    return torch.where(trl.mask & trl.ended_early[:, None], at_last * both**tokens_left, 0)


def test_with_k3_too() -> None:
    trl = trl_iteration(gamma=1.0, lam=1.0, kl_estimator="k3")
    ours = experience_of(trl, whiten_advantages="none")
    close(ours.advantages, torch.where(trl.mask, trl.advantages, 0))


@every_discount
def test_advantages_differ_by_where_the_score_is_added(settings: dict[str, Any]) -> None:
    trl = trl_iteration(**settings)
    ours = experience_of(trl, whiten_advantages="none")
    expected = added_later(trl)
    for theirs, found in ((trl.advantages, ours.advantages), (trl.batch["returns"], ours.returns)):
        close(torch.where(trl.mask, theirs, 0) - found, expected)
    assert bool(expected.any()) == (trl.batch["args"].lam < 1)


def test_with_gamma_and_lambda_1_only_the_variance_differs() -> None:
    """From log-probabilities, values and scores to whitened advantages: every step at once."""
    trl = trl_iteration(gamma=1.0, lam=1.0)
    ours = experience_of(trl, whiten_advantages="batch")
    close(ours.returns, torch.where(trl.mask, trl.batch["returns"], 0))
    _, variance = masked_moments(trl.advantages, trl.mask)
    factor = spread(variance, int(trl.mask.sum()))
    close(ours.advantages, trl.batch["advantages"] * factor)
