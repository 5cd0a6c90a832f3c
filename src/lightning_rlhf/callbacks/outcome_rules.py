"""Rules over the outcome: whether the reward rises, and what falls meanwhile."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from lightning_rlhf.callbacks.history import History, rule
from lightning_rlhf.rewards.prefixes import JUDGE

FLAT_AFTER, GAIN = 40, 0.1
"""Iterations before the reward can be flat, and the least gain, in standard deviations of the
score."""
FALL = 0.1
"""Fall of the gold score in two evaluations, as a share of its range so far."""
PERPLEXITY = 10.0
"""Factor on the perplexity of the first evaluation: 2.3 nats a token."""


@rule(
    when=f"after {FLAT_AFTER} to 100 iterations, reward_mean of the last third is, with 2 standard "
    f"errors, less than {GAIN:g} standard deviations of the score above that of the first third",
    cause="the policy does not learn what the reward pays for: the steps are too small, kl_coef is "
    "too large, or the reward is noise",
    remedy="a larger ppo.lr, a smaller ppo.kl_coef, a larger ppo.rollout_batch_size against noise; "
    "stage=eval_reward tells whether the reward is fit to be maximised",
)
def reward_flat(history: History) -> str | None:
    rows = [row for row in history.rows if row["step"] > history.config.critic_warmup]
    if len(rows) < FLAT_AFTER or rows[0]["step"] > history.config.critic_warmup + 1:
        return None  # too few for a judgement, or the first ones are no longer kept
    third = len(rows) // 3
    first, last = ([row["reward_mean"] for row in part] for part in (rows[:third], rows[-third:]))
    gain = fmean(last) - fmean(first)
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / third)
    spread = fmean(row["rollout/reward_std"] for row in rows)
    if spread == 0.0 or gain + 2 * error >= GAIN * spread:
        return None
    return (
        f"reward_mean gained {gain:.3g} in {len(rows)} iterations, with a standard error of "
        f"{error:.2g}; the standard deviation of the scores is {spread:.3g}"
    )


@rule(
    when="eval/reward_mean rises and eval/judge/gold falls in two evaluations in a row, together "
    f"by more than {FALL:.0%} of the range of gold so far",
    cause="the policy exploits the reward: what it pays for is no longer what is wanted",
    remedy="take the checkpoint with the best gold score; a larger ppo.kl_coef, fewer "
    "ppo.iterations, a better reward; compare samples/eval_*.jsonl",
)
def reward_against_gold(history: History) -> str | None:
    name = f"{JUDGE}gold"
    rows = [row for row in history.evaluations if name in row]
    if len(rows) < 3:
        return None
    a, b, c = rows[-3:]
    gold = [row[name] for row in rows]
    opposite = all(
        x["eval/reward_mean"] < y["eval/reward_mean"] and x[name] > y[name]
        for x, y in ((a, b), (b, c))
    )
    if not opposite or a[name] - c[name] <= FALL * (max(gold) - min(gold)):
        return None
    return (
        f"from iteration {a['step']:.0f} to {c['step']:.0f} eval/reward_mean rose from "
        f"{a['eval/reward_mean']:.3g} to {c['eval/reward_mean']:.3g}, while {name} fell from "
        f"{a[name]:.3g} to {c[name]:.3g}"
    )


@rule(
    when=f"eval/response_perplexity is more than {PERPLEXITY:g} times that of the first "
    "evaluation, while eval/reward_mean is higher",
    cause="the policy has left the language of the data for what the reward pays",
    remedy="look at samples/eval_*.jsonl; a larger ppo.kl_coef, fewer ppo.iterations",
)
def reward_against_perplexity(history: History) -> str | None:
    name = "eval/response_perplexity"
    rows = [row for row in history.evaluations if name in row]
    if not rows:
        return None
    first, now = rows[0], rows[-1]
    is_up = now["eval/reward_mean"] > first["eval/reward_mean"]
    if not is_up or not now[name] > PERPLEXITY * first[name]:
        return None
    return (
        f"{name} rose from {first[name]:.3g} to {now[name]:.3g}, while eval/reward_mean rose from "
        f"{first['eval/reward_mean']:.3g} to {now['eval/reward_mean']:.3g}"
    )
