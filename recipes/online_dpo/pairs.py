"""Advantages with which PPO's loop is online DPO."""

import torch

from lightning_rlhf.core.errors import require
from lightning_rlhf.core.experience import AdvantageBatch, Advantages

NEEDED = {
    "samples_per_prompt": 2, "kl_in": "reward", "kl_estimator": "k1", "missing_eos": "none",
    "score_normalization": "none", "score_clip": None, "whiten_rewards": False,
    "length_penalty": 0.0, "overlong_after": None,
}  # fmt: skip
"""Keys of ppo with which a row's rewards are its score less beta times its log-ratio."""


def pairs(batch: AdvantageBatch) -> Advantages:
    """Return the weight of each response in DPO's gradient, over beta; below 0 the rejected one.

        m = beta (h_chosen - h_rejected)     h = log pi(y | x) - log pi_ref(y | x)
        A = +-sigmoid(-m)                    0 for both where neither scores more

    The two responses to a prompt are a pair, of which the one with the larger score is chosen.
    beta is ppo.kl_coef, and beta h the score less the row's rewards. With one update an iteration
    the gradient is that of DPO's loss on the pairs, but for a constant.
    Source: Guo et al. 2024, https://arxiv.org/abs/2402.04792
    """
    for key, value in NEEDED.items():
        require(
            getattr(batch.config, key) == value, f"ppo.{key}", getattr(batch.config, key), value
        )
    score = batch.component_scores @ batch.weights
    beta_h = (score - batch.rewards.sum(dim=1)).view(-1, 2)
    sign = (score.view(-1, 2) - score.view(-1, 2).flip(1)).sign()
    weight = sign * torch.sigmoid(-sign * (beta_h - beta_h.flip(1)))
    return Advantages(advantages=torch.where(batch.mask, weight.view(-1, 1), 0))
