"""Rules over the updates of policy and critic."""

from __future__ import annotations

import math
from statistics import fmean, median, stdev

from lightning_rlhf.callbacks.history import IN_A_ROW, History, rule

ENTROPY = 0.01
"""Nats a token: the most likely token then has a probability above 0.998 on average."""
RATIO = 10.0
"""Probability ratio of a token, as `update/ratio_max` in METRICS; clipping does not bound the
gradient of tokens with a negative advantage."""
CLIPPED, CLIPPED_FOR = 0.4, 5
"""Share of tokens outside ppo.clip_range, mean over so many iterations; healthy is below 0.3."""
UNMOVED_FOR = 10
"""Consecutive iterations without one clipped token."""
UNMOVED_TOKENS = 3000
"""Tokens of all epochs of these iterations, at least: of a clipped share above 0.1%, so many tokens
show one with 95% probability (3 / n, Hanley and Lippman-Hand 1983)."""
CRITIC_FOR, CRITIC_ERRORS = 20, 2.0
"""Iterations over which the explained variance is averaged, and standard errors below 0."""
CRITIC_AT_MOST = -0.1
"""Mean explained variance: a tenth more squared error than a constant. A new critic is near 0."""
RISE, RISE_FOR = 3.0, 10
"""Factor between the medians of the value loss in so many iterations and in as many before."""


@rule(
    when="kl_divergence > ppo.kl_warning",
    cause="so far from the SFT model a reward says little",
    remedy="Look at samples/; a smaller ppo.lr, or a larger ppo.kl_coef, keeps the policy near",
)
def kl_exploding(history: History) -> str | None:
    limit, kl = history.config.kl_warning, history.last("kl_divergence", 1)
    if limit is None or not kl or not kl[0] > limit:
        return None
    return (
        f"kl_divergence is {kl[0]:.4g} nats a response in iteration "
        f"{history.rows[-1]['step']:.0f}, above ppo.kl_warning={limit:g}"
    )


@rule(
    when=f"entropy < {ENTROPY:g} nats a token in {IN_A_ROW} iterations in a row",
    cause="the policy nearly always picks the same token, so that nothing new is tried: the steps "
    "are too large, or the temperature too low",
    remedy="a smaller ppo.lr, a larger ppo.kl_coef or ppo.ent_coef, a larger ppo.temperature",
)
def entropy_collapse(history: History) -> str | None:
    if not history.lasts("entropy", lambda x: x < ENTROPY, IN_A_ROW):
        return None
    return (
        f"entropy is {history.rows[-1]['entropy']:.3g} nats a token, below {ENTROPY:g} {IN_A_ROW} "
        "iterations in a row"
    )


@rule(
    when=f"update/ratio_max > {RATIO:g} in {IN_A_ROW} iterations in a row",
    cause="single tokens became many times as likely within an iteration: the steps are too large, "
    "or sampling and training compute different log-probabilities",
    remedy="a smaller ppo.lr or ppo.ppo_epochs, ppo.target_kl=0.02, ppo.dual_clip=3",
)
def ratio_outliers(history: History) -> str | None:
    name = "update/ratio_max"
    if not history.lasts(name, lambda x: x > RATIO, IN_A_ROW):
        return None
    return f"{name} is {history.rows[-1][name]:.3g}, above {RATIO:g} {IN_A_ROW} iterations in a row"


@rule(
    when=f"update/clip_fraction > {CLIPPED:g} on average over {CLIPPED_FOR} iterations",
    cause="the policy moves further in an iteration than the clipped loss can follow",
    remedy="a smaller ppo.lr or ppo.ppo_epochs, a larger ppo.minibatch_size, ppo.target_kl=0.02",
)
def clip_fraction_high(history: History) -> str | None:
    found = history.last("update/clip_fraction", CLIPPED_FOR)
    if not found or not fmean(found) > CLIPPED:
        return None
    return (
        f"update/clip_fraction is {fmean(found):.3g} on average over {CLIPPED_FOR} iterations, "
        f"above {CLIPPED:g}"
    )


@rule(
    when=f"update/clip_fraction is 0 in {UNMOVED_FOR} iterations in a row, in which the policy "
    f"learns from {UNMOVED_TOKENS} tokens or more, in several steps and at half of ppo.lr or more",
    cause="the policy hardly moves: the steps are too small, or the clip range is so wide that "
    "nothing is clipped",
    remedy="a larger ppo.lr, a ppo.clip_range near 0.2, more ppo.ppo_epochs",
)
def clip_fraction_zero(history: History) -> str | None:
    config, rows = history.config, history.rows[-UNMOVED_FOR:]
    still = (
        history.lasts("update/clip_fraction", lambda x: x == 0.0, UNMOVED_FOR)
        and history.lasts("update/steps", lambda x: x > 1.0, UNMOVED_FOR)
        and history.lasts("update/lr", lambda x: x >= config.lr / 2, UNMOVED_FOR)
    )
    if not still or rows[0]["step"] <= config.critic_warmup:
        return None
    lengths = history.last("rollout/response_tokens", UNMOVED_FOR)
    if sum(lengths) * config.rollout_batch_size * config.ppo_epochs < UNMOVED_TOKENS:
        return None
    return (
        f"update/clip_fraction is 0 {UNMOVED_FOR} iterations in a row (ppo.clip_range="
        f"{config.clip_range:g}, update/lr={rows[-1]['update/lr']:.3g})"
    )


@rule(
    when=f"rollout/explained_variance over {CRITIC_FOR} iterations is below {CRITIC_AT_MOST:g} on "
    f"average, and below 0 by more than {CRITIC_ERRORS:g} standard errors",
    cause="the critic predicts returns worse than their mean would, so that it adds noise to the "
    "advantages: its learning rate is too high, or its targets move too fast",
    remedy="a smaller ppo.value_lr_factor, ppo.critic_warmup, ppo.advantage=rloo without a critic",
)
def critic_worse(history: History) -> str | None:
    found = history.last("rollout/explained_variance", CRITIC_FOR)
    found = [x for x in found if math.isfinite(x)]
    if len(found) < CRITIC_FOR:
        return None
    mean, error = fmean(found), stdev(found) / math.sqrt(len(found))
    if mean >= CRITIC_AT_MOST or mean + CRITIC_ERRORS * error >= 0.0:
        return None
    return (
        f"rollout/explained_variance is {mean:.3g} on average over {CRITIC_FOR} iterations, with a "
        f"standard error of {error:.2g}"
    )


@rule(
    when=f"the median of update/value_loss over {RISE_FOR} iterations is above {RISE:g} times that "
    f"of the {RISE_FOR} before, and each of them is above it",
    cause="the critic diverges, or returns grow faster than ppo.clip_range_vf lets it follow",
    remedy="a smaller ppo.value_lr_factor or ppo.vf_coef, ppo.score_normalization=running, "
    "ppo.clip_range_vf=null",
)
def value_loss_rising(history: History) -> str | None:
    found = history.last("update/value_loss", 2 * RISE_FOR)
    if not found or history.config.advantage != "gae":
        return None
    before, now = median(found[:RISE_FOR]), median(found[RISE_FOR:])
    if not (now > RISE * before and min(found[RISE_FOR:]) > before):
        return None
    return (
        f"update/value_loss rose from {before:.3g} to {now:.3g} (medians of {RISE_FOR} iterations)"
    )
