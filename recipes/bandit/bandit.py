"""PPO on a contextual bandit with known optimum, using the same core as language model training.

A context is a prompt of one token, an arm a response of one token. The reward of arm a in context c
is drawn from N(mean[c, a], 1), and the initial policy, which is also the reference, prefers a bad
arm. The optimal policy has a closed form:

    kl_coef = 0    always the best arm:  KL(policy || reference) = -log reference(best | c)
    kl_coef > 0    policy*(a | c) = reference(a | c) exp(mean[c, a] / kl_coef) / Z(c)

Source of policy*: Korbak et al. 2022, section 2, https://arxiv.org/abs/2205.11275
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightning_rlhf.core.errors import require
from lightning_rlhf.core.experience import make_experience, minibatches, token_rewards, whitened
from lightning_rlhf.core.losses import policy_loss, token_weights, value_loss
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Experience, Rollout, Scores
from lightning_rlhf.core.shaping import ScoreMoments
from lightning_rlhf.modules.optim import lr_factor

MEANS = torch.tensor(  # mean reward of each arm, one row per context
    [
        [0.0, 1.0, 0.2, 0.4, 0.6],
        [1.0, 0.0, 0.4, 0.6, 0.2],
        [0.4, 0.6, 0.0, 0.2, 1.0],
        [0.2, 0.4, 1.0, 0.0, 0.6],
    ]
)
REFERENCE = torch.log_softmax(-1.5 * MEANS, dim=-1)  # the better the arm, the rarer
CLIP_RANGES = (0.05, 0.2, 0.8)
READS = (
    "iterations", "rollout_batch_size", "minibatch_size", "ppo_epochs",
    "score_clip", "whiten_rewards", "kl_coef", "kl_estimator", "whiten_advantages",
    "clip_range_high", "dual_clip", "loss_reduction", "clip_range_vf", "vf_coef",
    "lr", "adam_eps", "lr_schedule", "warmup_fraction",
)  # fmt: skip
"""Keys of the ppo section that are used here; the KL penalty is always in the reward."""


@dataclass(frozen=True)
class Step:
    """Measurements of one iteration of one run, exact expectations under the policy."""

    clip_range: float
    """Clip range of the run."""
    kl_coef: float
    """KL coefficient of the run."""
    iteration: int
    """Number of the iteration, from 1."""
    expected_reward: float
    """Expected reward: mean over contexts of sum_a policy(a | c) mean[c, a]."""
    kl: float
    """KL(policy || reference), mean over contexts, nats."""
    update_size: float
    """KL(policy before || policy after) of this iteration, mean over contexts, nats."""
    best_arm: float
    """Probability of the best arm, mean over contexts."""


@dataclass(frozen=True)
class Claim:
    """A prediction of theory and the measured value."""

    text: str
    """Description of the measured quantity."""
    measured: float
    """Measured value."""
    at_least: float
    """Smallest value that agrees with theory."""
    at_most: float
    """Largest value that agrees with theory."""

    @property
    def holds(self) -> bool:
        """Return True if the measured value is within the bounds."""
        return self.at_least <= self.measured <= self.at_most


def main(config: PPOConfig, seed: int, folder: Path) -> list[Claim]:
    """Train with each clip range, with and without KL penalty; write steps.csv and bandit.png.

    Returns: the claims, with their measured values.
    """
    from picture import draw

    require(config.kl_coef > 0, "ppo.kl_coef", config.kl_coef, "a number and > 0")
    require(config.kl_estimator != "full", "ppo.kl_estimator", "full", "k1, k2, k3, abs, mse")
    steps: list[Step] = []
    policies: dict[tuple[float, float], Tensor] = {}
    for kl_coef in (0.0, config.kl_coef):
        for clip_range in CLIP_RANGES:
            logits = REFERENCE.clone().requires_grad_()
            run = replace(config, clip_range=clip_range, kl_coef=kl_coef)
            steps += train(logits, run, seed)
            policies[clip_range, kl_coef] = torch.log_softmax(logits.detach(), -1)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "steps.csv").open("w", newline="") as file:
        rows = [list(vars(steps[0])), *(vars(step).values() for step in steps)]
        csv.writer(file).writerows(rows)
    optimal_kl = kl(best_policy(config.kl_coef), REFERENCE)
    draw(steps, config.kl_coef, optimal_kl, folder / "bandit.png")
    return claims(steps, policies, config.kl_coef)


def train(logits: Tensor, config: PPOConfig, seed: int) -> Iterator[Step]:
    """Train a table of logits, [contexts, arms], in place and a table of values, by PPO.

    Yields the measurements of each iteration.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.zeros(len(MEANS), requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=config.lr, eps=config.adam_eps)
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, config.iterations, config))
    for iteration in range(1, config.iterations + 1):
        before = torch.log_softmax(logits.detach(), -1)
        rollout, scores = play(before, values.detach(), config.rollout_batch_size, generator)
        rewards = token_rewards(
            rollout, scores, config, kl_coef=config.kl_coef, moments=ScoreMoments.none(1)
        )
        experience = make_experience(rollout, scores, config, rewards)
        sizes = {"ppo_epochs": config.ppo_epochs, "minibatch_size": config.minibatch_size}
        for minibatch in minibatches(experience, generator=generator, **sizes):
            if config.whiten_advantages == "minibatch":
                minibatch = whitened(minibatch)
            optimizer.zero_grad()
            loss(logits, values, minibatch, config).backward()
            optimizer.step()
        schedule.step()
        after = torch.log_softmax(logits.detach(), -1)
        yield Step(
            clip_range=config.clip_range,
            kl_coef=config.kl_coef,
            iteration=iteration,
            expected_reward=float((after.exp() * MEANS).sum(-1).mean()),
            kl=kl(after, REFERENCE),
            update_size=kl(before, after),
            best_arm=float(after.exp()[MEANS == 1].mean()),
        )


def play(
    logprobs: Tensor, values: Tensor, plays: int, generator: torch.Generator
) -> tuple[Rollout, Scores]:
    """Sample `plays` arms in random contexts.

    Returns: rollout and scores, with prompts and responses of one token each.
    """
    context = torch.randint(len(MEANS), (plays,), generator=generator)
    arm = torch.multinomial(logprobs[context].exp(), 1, generator=generator)
    everywhere = torch.ones(plays, 1, dtype=torch.bool)
    rollout = Rollout(
        tokens=torch.cat([context[:, None], arm], dim=1),
        mask=everywhere.expand(-1, 2),
        response_mask=everywhere,
        ended=everywhere[:, 0],
        logprobs=logprobs[context].gather(1, arm),
        values=values[context][:, None],
        index=context,
    )
    noise = torch.randn(plays, generator=generator)
    reward = MEANS[context].gather(1, arm)[:, 0] + noise
    return rollout, Scores(
        component_scores=reward[:, None],
        score=reward,
        ref_logprobs=REFERENCE[context].gather(1, arm),
    )


def loss(logits: Tensor, values: Tensor, minibatch: Experience, config: PPOConfig) -> Tensor:
    """Return the loss of a minibatch, 0-d: the same as in the training of a language model."""
    logprobs = torch.log_softmax(logits[minibatch.index], -1).gather(1, minibatch.responses)
    policy = policy_loss(
        logprobs, minibatch.old_logprobs, minibatch.advantages, clip_range=config.clip_range,
        clip_range_high=config.clip_range_high, dual_clip=config.dual_clip,
    )  # fmt: skip
    value = value_loss(
        values[minibatch.index][:, None], minibatch.old_values, minibatch.returns,
        clip_range_vf=config.clip_range_vf,
    )  # fmt: skip
    weights = token_weights(minibatch.response_mask, config.loss_reduction, max_response_tokens=1)
    return (weights * (policy + config.vf_coef * value)).sum()


def best_policy(kl_coef: float) -> Tensor:
    """Return the log-probabilities of policy*, [contexts, arms]."""
    return torch.log_softmax(REFERENCE + MEANS / kl_coef, -1)


def kl(p: Tensor, q: Tensor) -> float:
    """Return KL(p || q) in nats, mean over contexts; p, q: log-probabilities, [contexts, arms]."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def claims(
    steps: list[Step], policies: dict[tuple[float, float], Tensor], kl_coef: float
) -> list[Claim]:
    """Return the claims that must hold for every seed.

    A policy with a larger objective (reward - kl_coef * KL) than the reference has a KL of at most
    (best reward - reference's reward) / kl_coef.
    """
    optimum = best_policy(kl_coef)
    bound = float((1 - (REFERENCE.exp() * MEANS).sum(-1)).mean()) / kl_coef
    found = []
    for clip_range in CLIP_RANGES:
        free, penalised = (
            [s for s in steps if (s.clip_range, s.kl_coef) == (clip_range, coef)]
            for coef in (0.0, kl_coef)
        )
        gaps = (policies[clip_range, kl_coef].exp() - optimum.exp()).abs().sum(-1)
        found += [
            Claim(f"clip {clip_range:g}, no penalty: best arm's probability",
                  free[-1].best_arm, 0.95, 1.0),
            Claim(f"clip {clip_range:g}, penalty: total variation to policy*",
                  float(gaps.mean()) / 2, 0.0, 0.1),
            Claim(f"clip {clip_range:g}, penalty: largest KL",
                  max(s.kl for s in penalised), 0.0, bound),
            Claim(f"clip {clip_range:g}, penalty: last KL over that of policy*",
                  penalised[-1].kl / kl(optimum, REFERENCE), 0.8, 1.2),
        ]  # fmt: skip
    size = {
        (c, coef): sum(s.update_size for s in steps
                       if (s.clip_range, s.kl_coef) == (c, coef) and s.iteration <= 10)
        for c in CLIP_RANGES for coef in (0.0, kl_coef)
    }  # fmt: skip
    for coef, name in ((0.0, "no penalty"), (kl_coef, "penalty")):
        for small, large in pairwise(CLIP_RANGES):
            text = f"{name}: first ten updates, clip {small:g} over {large:g}"
            found.append(Claim(text, size[small, coef] / size[large, coef], 0.0, 1.0))
    for c in CLIP_RANGES:
        text = f"clip {c:g}: first ten updates, penalty over none"
        found.append(Claim(text, size[c, kl_coef] / size[c, 0.0], 0.0, 1.0))
    return found
