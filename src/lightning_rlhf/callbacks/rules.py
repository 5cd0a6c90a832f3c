"""Rules of the diagnosis over data, reward, samples and outcome, and the history that they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from lightning_rlhf.core.ppo_config import GROUPED, PPOConfig
from lightning_rlhf.rewards.format_check import JUDGE

IN_A_ROW = 3
"""Consecutive iterations in which a metric of a batch must be bad: a single one may be chance."""

Row = Mapping[str, float]
"""Metrics of one iteration by name."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The recent past of a run of PPO."""

    rows: Sequence[Row]
    """Metrics of the latest iterations, oldest first; `step` is the number of the iteration."""
    evaluations: Sequence[Row]
    """Metrics of the latest evaluations, oldest first; `step` as in `rows`."""
    config: PPOConfig
    """Configuration of the stage."""
    prompts_cut: float
    """Share of the training prompts that were cut, or left out, for their length."""

    def last(self, name: str, count: int) -> list[float]:
        """Return a metric in the last `count` iterations; [] unless all of them have it."""
        return column(self.rows[-count:], name, count)

    def lasts(self, name: str, is_bad: Callable[[float], bool], count: int) -> bool:
        """Return whether a metric is bad in each of the last `count` iterations."""
        found = self.last(name, count)
        return bool(found) and all(map(is_bad, found))


def column(rows: Sequence[Row], name: str, count: int) -> list[float]:
    """Return a metric of `count` rows; [] unless there are as many and all of them have it."""
    found = [row[name] for row in rows if name in row]
    return found if len(found) == count else []


Find = Callable[[History], str | None]
"""Function of the history that returns the symptom with its measured numbers, or None."""


@dataclass(frozen=True)
class Rule:
    """A symptom of a fault in training, with its likely cause and a remedy."""

    name: str
    """Name of the rule."""
    when: str
    """Condition on which the rule applies."""
    cause: str
    """Likely cause of the symptom."""
    remedy: str
    """Places to look at, and the keys of the configuration to change."""
    find: Find
    """Function that returns the symptom, or None where it is absent."""


def rule(*, when: str, cause: str, remedy: str) -> Callable[[Find], Rule]:
    """Return a decorator that makes a rule of a function, under the function's name."""

    def decorate(find: Find) -> Rule:
        return Rule(find.__name__, when, cause, remedy, find)

    return decorate


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


CUT = 0.1
"""Share of training prompts cut for their length: below it, they change no mean by much."""
ALIKE = 0.9
"""Share of groups without any difference: what is left of the batch is a tenth of its size."""
ENDED = 0.05
"""Share of responses that end: the score of a response that is cut off is that of a fragment."""
FULL, EMPTY = 0.95, 1.5
"""Mean length as a share of ppo.max_response_tokens, and in tokens: an end token alone is one."""
SIGMAS = 4.0
"""Standard errors below 0 of a KL that cannot be chance: 1 in 30,000 iterations if normal."""
LEAST_KL = 0.01
"""Nats a response: rounding alone gives about 1e-6 (fp32) to 1e-2 (bf16)."""
SAME = 0.5
"""Share of responses that are the most common response of the batch."""
REPEATED = 0.3
"""Share of repeated 4-grams; 0.005 in human text, 0.44 in greedy text of a language model (Welleck
et al. 2019, https://arxiv.org/abs/1908.04319)."""


@rule(
    when=f"more than {CUT:.0%} of the training prompts are longer than data.max_prompt_tokens",
    cause="the policy answers prompts that lack their start, or never sees the longest ones",
    remedy="raise data.max_prompt_tokens; data.long_prompts is what becomes of longer ones",
)
def prompts_cut(history: History) -> str | None:
    if history.prompts_cut <= CUT:
        return None
    return (
        f"{history.prompts_cut:.0%} of the training prompts were cut, or left out, as longer than "
        "data.max_prompt_tokens"
    )


@rule(
    when=f"rollout/groups_alike >= {ALIKE} in {IN_A_ROW} iterations in a row, for the estimators "
    f"that compare ({', '.join(GROUPED)})",
    cause="responses to the same prompt all get the same score, so that their advantage is 0: the "
    "prompts are all too hard or too easy, or the score has too few levels",
    remedy="look at reward_mean and samples/; prompts of mixed difficulty, a finer reward, "
    "a larger ppo.samples_per_prompt or ppo.temperature",
)
def groups_alike(history: History) -> str | None:
    name = "rollout/groups_alike"
    compares = history.config.advantage in GROUPED
    if not compares or not history.lasts(name, lambda x: x >= ALIKE, IN_A_ROW):
        return None
    return (
        f"{name} is {history.rows[-1][name]:.3g}, at least {ALIKE} {IN_A_ROW} iterations in a row"
    )


@rule(
    when=f"all responses of an iteration have the same score, or the same paid score, {IN_A_ROW} "
    "iterations in a row",
    cause="there is nothing to learn from it",
    remedy="Look at the reward, and at samples/; reward.clip must not cut all scores to one",
)
def reward_constant(history: History) -> str | None:
    same = history.config.rollout_batch_size > 1 and (
        all(is_constant(row) for row in history.rows[-IN_A_ROW:]) and len(history.rows) >= IN_A_ROW
    )
    if not same:
        return None
    return (
        f"all responses of an iteration got the same reward, {IN_A_ROW} iterations in a row (the "
        f"last time {history.rows[-1]['rollout/reward_max']:g})"
    )


def is_constant(row: Row) -> bool:
    """Return whether all responses have the same score, or the same training reward.

    Compares values, since the standard deviation of equal values may be rounded above 0.
    """
    paid = "rollout/reward_paid_range"
    equal = "rollout/reward_min" in row and row["rollout/reward_min"] == row["rollout/reward_max"]
    return equal or (paid in row and row[paid] == 0.0)


@rule(
    when=f"rollout/ended < {ENDED} in {IN_A_ROW} iterations in a row",
    cause="responses are cut at ppo.max_response_tokens: the limit is too small, or the SFT model "
    "never learned the end token",
    remedy="raise ppo.max_response_tokens, or give ppo.stop_strings; data.long_responses=cut in "
    "SFT teaches no end; ppo.missing_eos=none where responses need no end",
)
def nothing_ends(history: History) -> str | None:
    name = "rollout/ended"
    if not history.lasts(name, lambda x: x < ENDED, IN_A_ROW):
        return None
    return (
        f"{history.rows[-1][name]:.1%} of the responses end within ppo.max_response_tokens="
        f"{history.config.max_response_tokens}, below {ENDED:.0%} {IN_A_ROW} iterations in a row"
    )


@rule(
    when=f"rollout/response_tokens is at least {FULL} ppo.max_response_tokens, or at most {EMPTY}, "
    f"in {IN_A_ROW} iterations in a row",
    cause="the reward pays for length, or for saying nothing",
    remedy="look at samples/, and at the length bias in the reward's fitness report; "
    "ppo.length_penalty, ppo.missing_eos_penalty, a larger ppo.kl_coef",
)
def length_extreme(history: History) -> str | None:
    name, limit = "rollout/response_tokens", history.config.max_response_tokens
    if history.lasts(name, lambda x: x >= FULL * limit, IN_A_ROW):
        where = f"at the limit of ppo.max_response_tokens={limit}"
    elif history.lasts(name, lambda x: x <= EMPTY, IN_A_ROW):
        where = "hardly more than an end token"
    else:
        return None
    return (
        f"responses have {history.rows[-1][name]:.3g} tokens on average, {where}, {IN_A_ROW} "
        "iterations in a row"
    )


@rule(
    when=f"kl_divergence over {IN_A_ROW} iterations is below -{LEAST_KL:g} nats, and below 0 by "
    f"more than {SIGMAS:g} standard errors",
    cause="a KL is never negative: responses are not sampled from the distribution that their "
    "log-probabilities are taken from",
    remedy="look at a sampler of your own: its temperature, and its is_exact; compare "
    "ppo.rollout=hf",
)
def kl_negative(history: History) -> str | None:
    found = history.last("kl_divergence", IN_A_ROW)
    deviations = history.last("rollout/kl_std", IN_A_ROW)
    if not found or not deviations:
        return None
    mean = fmean(found)
    responses = IN_A_ROW * history.config.rollout_batch_size
    error = math.sqrt(fmean(x * x for x in deviations) / responses)
    if mean >= -LEAST_KL or mean >= -SIGMAS * error:
        return None
    return (
        f"kl_divergence is {mean:.4g} nats a response over {IN_A_ROW} iterations, with a standard "
        f"error of {error:.2g}"
    )


@rule(
    when=f"rollout/most_common >= {SAME:g} in {IN_A_ROW} iterations in a row, of 4 prompts or more",
    cause="the policy gives the same response whatever the prompt is: the reward does not depend "
    "on the prompt, or the policy has collapsed",
    remedy="look at samples/ and at the reward; a larger ppo.kl_coef, a smaller ppo.lr",
)
def responses_identical(history: History) -> str | None:
    name, prompts = "rollout/most_common", history.config.prompts_per_iteration
    if prompts < 4 or not history.lasts(name, lambda x: x >= SAME, IN_A_ROW):
        return None
    return (
        f"{history.rows[-1][name]:.0%} of the responses are the same, at least {SAME:.0%} "
        f"{IN_A_ROW} iterations in a row"
    )


@rule(
    when=f"rollout/repetition > {REPEATED:g} in {IN_A_ROW} iterations in a row",
    cause="responses repeat the same words: the reward pays for it, or the model loops",
    remedy="look at samples/; a smaller ppo.max_response_tokens, a larger ppo.kl_coef or "
    "ppo.temperature, a reward that sees repetition",
)
def responses_repeat(history: History) -> str | None:
    name = "rollout/repetition"
    if not history.lasts(name, lambda x: x > REPEATED, IN_A_ROW):
        return None
    return (
        f"{history.rows[-1][name]:.0%} of the 4-grams of the responses are repeated, above "
        f"{REPEATED:.0%} {IN_A_ROW} iterations in a row"
    )
