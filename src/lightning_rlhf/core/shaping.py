"""Shaping of one score per response into one reward per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core import ppo_config, records
from lightning_rlhf.core.config import Term


@dataclass(frozen=True)
class RunningMoments:
    """Mean and population variance of all scores so far."""

    count: int
    mean: float
    squares: float
    """Sum of squared deviations from the mean."""

    @property
    def std(self) -> float:
        """Return the standard deviation; 1 while all scores seen are equal."""
        variance = self.squares / self.count if self.count else 0.0
        return math.sqrt(variance) if variance > 0 else 1.0

    def including(self, score: Float[Tensor, " B"]) -> RunningMoments:
        """Return the moments after another batch.

        Source: Chan et al. 1983, eq. 2.1, https://doi.org/10.1080/00031305.1983.10483115
        """
        score = score.cpu().double()  # not every device has float64
        added = len(score)
        mean = score.sum() / added
        squares = float(((score - mean) ** 2).sum())
        count, shift = self.count + added, float(mean) - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + shift * added / count,
            squares=self.squares + squares + shift**2 * self.count * added / count,
        )


NO_SCORES = RunningMoments(count=0, mean=0.0, squares=0.0)


@dataclass(frozen=True)
class ScoreMoments:
    """Moments of the whole score, and of each of its components."""

    whole: RunningMoments
    components: tuple[RunningMoments, ...]

    @classmethod
    def none(cls, components: int) -> ScoreMoments:
        """Return the moments before the first score."""
        return cls(NO_SCORES, (NO_SCORES,) * components)

    def including(self, scores: records.Scores | records.Experience) -> ScoreMoments:
        """Return the moments after another batch."""
        parts = zip(self.components, scores.component_scores.cpu().unbind(dim=1), strict=True)
        components = tuple(moments.including(part) for moments, part in parts)
        return ScoreMoments(self.whole.including(scores.score), components)


AS_IT_IS = (Term(name="reward", weight=1.0, normalization="none", clip=None),)
"""Terms of a reward with one component, whose number is the score."""


def weighted_sum(
    component_scores: Float[Tensor, "B K"], terms: Sequence[Term]
) -> Float[Tensor, " B"]:
    """Return the reported score: sum_k weight_k * part_k, comparable over a whole run."""
    weights = component_scores.new_tensor([term.weight for term in terms])
    return (component_scores * weights).sum(dim=1)


def normalised_sum(
    component_scores: Float[Tensor, "B K"], terms: Sequence[Term], moments: Sequence[RunningMoments]
) -> Float[Tensor, " B"]:
    """Return the score for PPO: sum_k weight_k * clip((part_k - mean_k) / std_k, -clip_k, clip_k).

    The mean and deviation are those of `moments` where the term's normalisation is "running", else
    0 and 1; a clip of None is infinite.
    """
    columns = []
    for term, column, seen in zip(terms, component_scores.unbind(dim=1), moments, strict=True):
        if term.normalization == "running":
            column = (column - seen.mean) / seen.std
        columns.append(column if term.clip is None else column.clamp(-term.clip, term.clip))
    return weighted_sum(torch.stack(columns, dim=1), terms)


def reward_parts(
    token_scores: Float[Tensor, "B K T"],
    ended: Bool[Tensor, " B"],
    terms: Sequence[Term],
    config: ppo_config.PPOConfig,
    moments: ScoreMoments,
) -> Float[Tensor, "B T"]:
    """Return the part of the score for PPO that each token has: sum_k weight_k * part_kt / std_k.

    The deviation std_k is as in `normalised_sum`, and the sum is divided as `shape_score` divides
    the score; neither mean is subtracted. 0 where missing_eos=replace replaces the score.
    """
    stds = [
        seen.std if term.normalization == "running" else 1.0
        for term, seen in zip(terms, moments.components, strict=True)
    ]
    factors = [term.weight / std for term, std in zip(terms, stds, strict=True)]
    parts = (token_scores * token_scores.new_tensor(factors)[:, None]).sum(dim=1)
    if config.score_normalization != "none":
        parts = parts / moments.whole.std
    return torch.where(ended[:, None], parts, 0) if config.missing_eos == "replace" else parts


def apply_missing_eos(
    score: Float[Tensor, " B"],
    ended: Bool[Tensor, " B"],
    rule: ppo_config.MissingEOS,
    penalty: float,
) -> Float[Tensor, " B"]:
    """Return the score after the rule for responses without an end token or stop string.

    "none" keeps it, "subtract" subtracts `penalty`, "replace" replaces it by `-penalty`.
    Source: "replace" as in Stiennon et al. 2020 and Huang et al. 2024, detail 23,
    https://arxiv.org/abs/2403.17031
    """
    match rule:
        case "none":
            return score
        case "subtract":
            return torch.where(ended, score, score - penalty)
        case "replace":
            return torch.where(ended, score, -penalty)


def shape_score(
    score: Float[Tensor, " B"],
    ended: Bool[Tensor, " B"],
    tokens: Int[Tensor, " B"],
    config: ppo_config.PPOConfig,
    moments: RunningMoments,
) -> Float[Tensor, " B"]:
    """Return the score for PPO: normalised, clipped, minus the length penalty, after the end rule.

        s = (score - mean) / std         score_normalization=running; running_scale: score / std
        s = clip(s, -score_clip, score_clip)
        s = s - length_penalty * tokens
        s = s - clip((tokens - overlong_after) / overlong_ramp, 0, 1)          unless it is null

    tokens: number of tokens of each response.
    Source of the running scale: Engstrom et al. 2020, section 2, https://arxiv.org/abs/2005.12729;
    of the soft overlong penalty: Yu et al. 2025, eq. 13, https://arxiv.org/abs/2503.14476
    """
    if config.score_normalization == "running":
        score = (score - moments.mean) / moments.std
    elif config.score_normalization == "running_scale":
        score = score / moments.std
    if config.score_clip is not None:
        score = score.clamp(-config.score_clip, config.score_clip)
    score = score - config.length_penalty * tokens
    if config.overlong_after is not None:
        score = score - ((tokens - config.overlong_after) / config.overlong_ramp).clamp(0, 1)
    return apply_missing_eos(score, ended, config.missing_eos, config.missing_eos_penalty)


def shape_rewards(
    score: Float[Tensor, " B"],
    kl: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    kl_coef: float,
    parts: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return rewards per token: a penalty for leaving the reference, and the score in its parts.

        r_t = -kl_coef * kl_t + part_t + [t is the last real token] * (score - sum_u part_u)

    Without KL they sum to the score, whatever the parts are. kl_coef 0 means no penalty.

    parts: parts of the score, 0 on padding; None leaves the whole score to the last token.
    Returns 0 on padding.
    Source: Ziegler et al. 2019, eq. 2, https://arxiv.org/abs/1909.08593
    """
    parts = torch.zeros_like(kl) if parts is None else parts
    score = score - parts.sum(dim=1)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).amax(dim=1, keepdim=True)
    rewards = -kl_coef * kl + (parts + torch.where(position == last, score[:, None], 0))
    return torch.where(mask, rewards, 0)


def rewards_overflow(experience: records.Experience) -> bool:
    """Return whether the sum of the squared rewards is not finite in fp32.

    Whitening of advantages, the critic's loss and the gradient norm contain such squares. Where the
    KL is as large, the cause is the policy and not the score.
    """
    squares = experience.rewards.float().square().sum()
    return bool(experience.kl.float().square().sum().isfinite() and not squares.isfinite())
