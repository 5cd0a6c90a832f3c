"""METRICS: one row for each metric, which tables, curves, pages, dashboards, docs and goals read.

A row is the name, the stages that log it and the unit ("1" if it has none); "min" or "max", the
best value of a metric by which an evaluation is judged; LOWEST..HIGHEST, the ends of a fixed
healthy range; the name in a sentence; after ":" the formula or description, and after "->" the
healthy range or course.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_rlhf.core import config, errors

Phase = Literal["rollout", "update", "eval", "time", "compute", "rank"]
"""Part of an iteration in which a metric is measured, or what is measured of the whole."""

JUDGE = "eval/judge/"
"""Prefix of a judge's metrics of the responses."""
BEST_JUDGE = "rank/best_judge/"
"""Prefix of a judge's metrics of the best response to each prompt."""
PART, EVAL_PART = "rollout/reward/", "eval/reward/"
"""Prefixes of the components of a reward with several components, in training and evaluation."""
PASS = "eval/pass@"
"""Prefix of pass@k, which the number k and the name of the score complete."""
INTERVALS = ("eval/reward_gain_", "eval/win_rate_")
"""Prefixes of the ends of intervals, which low and high complete."""
REWARD, KL = "reward_mean", "kl_divergence"
"""Reward and KL to the reference in training."""
HELD_OUT, HELD_OUT_KL, GOLD = "eval/reward_mean", "eval/kl", f"{JUDGE}gold"
"""Reward, KL and gold score on held-out prompts."""
FLOPS = "compute/flops"
HEADLINES = {REWARD: "rollout", KL: "rollout", "entropy": "update", "ppo_loss": "update"}
"""Metrics without the prefix of their phase -> that phase."""
SIGNS = {"min": -1, "max": 1}
"""Direction in which a metric is better -> factor by which the largest value is the best."""
QUANTILES = (5, 25, 50, 75, 95)
FAN = tuple(f"rollout/score_p{p:02d}" for p in QUANTILES)
"""Percentages of the quantiles of the score, and the metrics that these are."""
BEFORE_AFTER = (HELD_OUT, GOLD, HELD_OUT_KL, "eval/response_perplexity", "eval/response_tokens",
                "eval/ended")  # fmt: skip
"""Metrics of the tables of an evaluation, in their order; all others follow."""
FITNESS = "fitness/"
"""Prefix of the metrics of a fitness report, which defines them."""
MACHINE = ("time/", "compute/device_s", "compute/peak_memory")
"""Starts of the names of metrics that a repeated run measures differently."""
CHOSEN_NAMES = (JUDGE, BEST_JUDGE, PART, EVAL_PART, FITNESS, PASS, *INTERVALS)
"""Prefixes of metrics whose names are not listed in METRICS."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The definition of a logged metric."""

    formula: str
    """Formula or description of the metric."""
    unit: str
    """Unit of the metric; "1" for dimensionless ones."""
    phase: Phase
    stages: tuple[str, ...]
    """Names of the stages that log the metric."""
    healthy: str
    """Healthy range or course of the metric; "-" where there is none."""
    label: str | None
    """Name of the metric in a sentence."""
    better: config.Mode | None
    """Direction of a metric of an evaluation: whether the lowest or the highest value is the best;
    None where neither is."""
    band: tuple[float | None, float | None] | None
    """Lowest and highest healthy value; None for an end that is open."""


def metric_rows(text: str) -> dict[str, Metric]:
    """Return the metrics of a text like that of METRICS by name."""
    found = {}
    for row in re.split(r"\n(?=\S)", text.strip()):
        head, _, rest = " ".join(row.split()).partition(": ")
        formula, _, healthy = rest.partition(" -> ")
        name, stages, unit, *more = head.split(" | ")
        known: dict[str, Any] = {"better": None, "band": None, "label": None}
        for one in more:
            if ".." in one:
                known["band"] = tuple(float(end) if end else None for end in one.split(".."))
            else:
                known["better" if one in SIGNS else "label"] = one
        prefix: Any = name.partition("/")[0].replace("fitness", "eval")
        found[name] = Metric(
            formula=formula, unit=unit, phase=HEADLINES.get(name, prefix), healthy=healthy or "-",
            stages=tuple(stages.split()), **known,  # type: ignore[arg-type]
        )  # fmt: skip
    return found


METRICS = metric_rows("""
reward_mean | ppo | score | the reward in training: mean over responses of the score, before any KL
    penalty -> rises, then flattens; 0 is what the SFT model gets on training prompts
kl_divergence | ppo | nats a response | the KL to the reference in training, nats a response: mean
    over responses of sum_t kl_t, policy against reference -> starts at 0, grows slowly; growth
    without end is reward hacking
entropy | ppo | nats a token | the entropy in training, nats a token: mean over minibatches of the
    mean entropy of a token's distribution -> falls slowly; near 0 the policy has collapsed
ppo_loss | ppo | 1 | the PPO loss: mean over minibatches of policy_loss + kl_coef kl_loss + vf_coef
    value_loss - ent_coef entropy + ptx_coef ptx_loss -> near 0 and noisy; not a sign of progress in
    either direction
rollout/reward_std | ppo | score | 0..: standard deviation of the score over responses, denominator
    B -> above 0; at 0 there is nothing to learn; a warning after three iterations
rollout/reward_min | ppo | score: smallest score of the batch
rollout/reward_max | ppo | score: largest score of the batch
rollout/score_p05 | ppo | score: 5% quantile of the score over responses, linear between neighbours
    (numpy's default) -> rises too; alone at the bottom it shows responses that still fail
rollout/score_p25 | ppo | score: 25% quantile of the score over responses
rollout/score_p50 | ppo | score: 50% quantile of the score over responses -> follows reward_mean
rollout/score_p75 | ppo | score: 75% quantile of the score over responses
rollout/score_p95 | ppo | score: 95% quantile of the score over responses -> far from score_p50
    only while responses differ
rollout/groups_alike | ppo | share: share of prompts whose responses all have the same score, from
    which estimators that compare them learn nothing but the KL -> below 0.5; near 1 take prompts of
    other difficulty or more samples_per_prompt
rollout/groups_alike_first | ppo | share: the same before ppo.resample_groups replaced any -> as
    rollout/groups_alike without that key
rollout/resample_rounds | ppo | 1: rounds in which ppo.resample_groups replaced groups -> below that
    key; at it some groups stay alike
rollout/prompts_drawn | ppo | prompts: prompts of the batch and of these rounds together -> near the
    batch; twice as many cost twice the sampling
rollout/prompts_effective | ppo | prompts: prompts whose responses do not all have the same score,
    where an estimator compares them -> near the prompts of the batch
rollout/score_std_within | ppo | score: root of the mean over prompts of the variance of the score
    over a prompt's responses, denominator samples_per_prompt -> above 0; what the estimator learns
    from
rollout/score_std_between | ppo | score: standard deviation over prompts of the mean score of their
    responses; its square and that of score_std_within sum to that of reward_std -> far above
    score_std_within where prompts differ in difficulty
rollout/importance_masked | ppo | share: share of responses that ppo.importance_mask leaves out of
    the policy's loss -> below 0.05; near 1 the sampler has other weights
rollout/reward/<component> | ppo | the component's: mean over responses of one of several components
    of the reward, before its weight -> no component rises at the cost of all others
rollout/reward_paid | ppo | score: mean over responses of the score that PPO maximises, before its
    shaping, where a component has a running normalization or a clip -> follows reward_mean; near 0
    with running normalization
rollout/reward_paid_range | ppo | score: largest less smallest of these scores -> above 0
rollout/kl_std | ppo | nats a response: standard deviation over responses of sum_t kl_t, denominator
    B -> of the size of kl_divergence; kl_std / sqrt(B) is the standard error of kl_divergence
rollout/most_common | ppo | share: share of responses that equal the most common response of the
    batch, token for token -> below 0.5, unless the answers to all prompts are the same few
rollout/repetition | ppo | share: share of 4-grams of tokens that occurred earlier in the same
    response, over all responses -> below 0.1; 0.4 is a loop of the same words
rollout/response_tokens | ppo | tokens: mean over responses of their tokens, end token included ->
    no steady drift to the limit or to 1
rollout/ended | ppo | share: share of responses that end with an end token or stop string -> near 1
rollout/logprob_gap_mean | ppo | nats a token | ..0.02: mean over response tokens of the absolute
    difference between the sampler's log-probability and that of the trained model, of samplers that
    are not exact, as ppo.rollout=vllm -> 1e-6 in float32, below 0.02 in bfloat16; where it grows,
    the sampler has other weights
rollout/logprob_gap_max | ppo | nats a token | ..2: largest such difference of any token -> 1e-5 in
    float32, below 2 in bfloat16
rollout/padding | ppo | share: share of padding among the positions read for scoring -> lower costs
    less; a smaller microbatch_size lowers it, with more passes
rollout/shaped_return | ppo | score: mean over responses of sum_t rewards_t: the shaped score, less
    the KL if kl_in=reward -> rises; this is what PPO maximises
rollout/value_mean | ppo | score: mean over response tokens of the critic's value at sampling time;
    0 without a critic -> follows shaped_return
rollout/explained_variance | ppo | 1 | 0..: 1 - Var(returns - values) / Var(returns) over tokens;
    nan if no variance; 0 if no critic -> above 0 after warm-up; below 0 the critic hurts
update/policy_loss | ppo | 1: mean over minibatches of the loss ppo.policy_loss -> near 0,
    slightly negative
update/value_loss | ppo | score^2: mean over minibatches of half the clipped squared error of the
    value -> falls in the first iterations
update/kl_loss | ppo | nats a token: mean over minibatches of the KL to the reference in the loss,
    as kl_estimator says -> as kl_divergence; 0 if the KL is in the reward
update/ptx_loss | ppo | nats a token: mean over minibatches of the negative log-likelihood of a
    batch of demonstrations, mean over its target tokens -> no steep rise
update/approx_kl | ppo | nats a token | ..0.05: mean over minibatches of KL(policy at sampling,
    policy now), estimator k3 -> below 0.05; above if steps are too large
update/clip_fraction | ppo | share | ..0.3: share of tokens whose ratio left the clip range -> below
    0.3
update/value_clip_fraction | ppo | share | ..0.5: share of tokens whose value left its clip range ->
    below 0.5
update/ratio_mean | ppo | 1 | 0.99..1.01: mean over minibatches of the mean probability ratio,
    policy now to policy at sampling -> within 0.01 of 1
update/ratio_max | ppo | 1 | ..10: largest probability ratio of any token in any minibatch -> below
    10
update/grad_norm | sft rm ppo dpo | 1: gradient norm before clipping, of the logged step; in PPO the
    mean over minibatches -> steady; spikes come before collapses
update/steps | ppo | 1: optimizer steps taken in the iteration -> ppo_epochs x minibatches, unless
    target_kl or max_ratio is set
update/skipped | ppo | 1: minibatches skipped because their mean ratio was above max_ratio -> 0
update/stopped | ppo | 1: 1 if approx_kl above target_kl ended the epochs, else 0 -> occasionally 1;
    always 1 if steps are too large
update/nonfinite | sft rm ppo dpo | 1: updates since the last row that were not made because loss or
    gradient is not finite -> 0
update/kl_coef | ppo | 1: weight of the KL in this iteration's rewards or loss
update/ent_coef | ppo | 1: weight of the entropy bonus in this iteration's loss
update/lr | sft rm ppo dpo | 1: learning rate of the first parameter group when the batch started ->
    follows its schedule
update/loss | sft | nats a token: negative log-likelihood, mean over target tokens of the latest
    trainer.log_every_n_steps steps -> falls
update/perplexity | sft | tokens: exp(update/loss) -> falls
update/rm_loss | rm | nats a pair | ..0.693: -log sigmoid(chosen - rejected), mean over pairs of the
    latest trainer.log_every_n_steps steps -> falls below log 2 = 0.693, the loss of guessing
update/accuracy | rm dpo | share | 0.5..: share of the same pairs with chosen > rejected, a tie
    counting one half; with kto, of the responses on the right side of reward_reference -> above
    0.5; near 1 the model has memorised the pairs
update/reward_chosen | rm dpo | reward: mean reward of chosen, with kto of those with the label
    true; of stage=dpo the implicit one, beta log(policy / reference), of a token with loss_type
    sigmoid_norm, ipo, orpo and simpo, and beta log(policy) where the loss reads no reference
update/reward_rejected | rm dpo | reward: mean reward of rejected, likewise
update/reward_margin | rm dpo | reward: mean of chosen - rejected -> grows, then flattens
update/reward_reference | dpo | reward | 0..: with kto, mean of the reward that the others are
    compared with, beta times the estimated KL -> between reward_rejected and reward_chosen
update/dpo_loss | dpo | 1: preference loss of loss_type with label_smoothing, without the SFT term,
    mean over pairs of the latest trainer.log_every_n_steps steps, with kto over responses -> falls
    below that of the reference: log 2 = 0.693, with ipo 1 / (2 beta)^2, with kto 1/2
update/logps_chosen | dpo | nats a response: mean over the same pairs of the log-probability of
    chosen under the policy -> falls less than logps_rejected; far below its start the policy
    forgets what SFT learned: raise beta or sft_coef
update/logps_rejected | dpo | nats a response: the same of rejected -> falls
update/sft_loss | dpo | nats a token: negative log-likelihood of the chosen responses, mean over
    their tokens; sft_coef weighs it -> no steep rise
eval/loss | sft | nats a token | min | the loss on held-out demonstrations: negative log-likelihood,
    mean over all target tokens of the validation set -> falls; a rise is overfitting
eval/perplexity | sft eval_policy | tokens | min | the perplexity of held-out demonstrations:
    exp(eval/loss); of stage=eval_policy, exp of the same loss on held-out demonstrations -> falls;
    after PPO, not far above that of the SFT model
eval/unigram_perplexity | sft | tokens | the perplexity by token frequencies alone: perplexity of
    the same tokens under their frequencies in the training targets -> far above eval/perplexity;
    near it, the model has learned little
eval/rm_loss | rm | nats a pair | min | ..0.693 | the loss on held-out pairs: -log sigmoid(chosen -
    rejected), mean over all validation pairs -> below log 2 = 0.693; a rise is overfitting
eval/accuracy | rm dpo | share | max | 0.6..0.85 | the accuracy on held-out pairs: share of
    validation pairs with chosen > rejected, a tie counting one half -> 0.6 to 0.85; limited by the
    noise of the labels
eval/reward_chosen | rm dpo | reward | the reward of chosen responses: mean reward of chosen, as
    update/reward_chosen
eval/reward_rejected | rm dpo | reward | the reward of rejected responses: mean reward of rejected,
    likewise
eval/reward_margin | rm dpo | reward | max | 0.. | the reward of chosen less rejected responses:
    mean of chosen - rejected -> positive
eval/reward_reference | dpo | reward | the reward that those of kto are compared with: as
    update/reward_reference, of batches of validation responses
eval/dpo_loss | dpo | 1 | min | the preference loss on held-out pairs: preference loss as
    update/dpo_loss, mean over all validation pairs -> falls; a rise is overfitting
eval/logps_chosen | dpo | nats a response | the log-probability of chosen responses, nats: mean over
    validation pairs of the log-probability of chosen under the policy -> as update/logps_chosen
eval/logps_rejected | dpo | nats a response | the log-probability of rejected responses, nats: the
    same of rejected -> falls
eval/sft_loss | dpo | nats a token | min | the SFT loss of chosen responses: negative log-likelihood
    of the chosen responses of the validation pairs, mean over tokens -> no steep rise
fitness/<number> | rm | as there: a number of the fitness report at the end of the stage, defined in
    final/report.md -> flags 0, accuracy_low above 0.5
eval/reward_mean | ppo eval_policy | score | max | the reward on held-out prompts: mean score over
    validation prompts -> rises with reward_mean
eval/reward/<component> | ppo eval_policy | the component's: mean over validation responses of one
    of several components of the reward -> no component rises at the cost of all others
eval/kl | ppo eval_policy | nats a response | min | KL to the SFT model, nats a response: mean over
    validation responses of sum_t (logprob_t - ref_logprob_t) -> near kl_divergence; single
    responses may be negative
eval/response_tokens | ppo eval_policy | tokens | response length, tokens: mean response length ->
    no drift
eval/ended | ppo eval_policy | share | ended in time: share of responses that end with an end token
    or stop string -> near 1
eval/response_perplexity | ppo eval_policy | tokens | perplexity under the SFT model: exp(-sum of
    the reference's log-probabilities of response tokens / number of them) -> as that of the SFT
    model; a rise with the reward is text that the SFT model would not say
eval/distinct_1 | ppo eval_policy | share | the share of different words: different words / words,
    over all responses together (Li et al. 2016) -> as that of the SFT model; a fall is repetition,
    in a response or across prompts
eval/distinct_2 | ppo eval_policy | share | the share of different pairs of words: different pairs
    of neighbouring words / such pairs, over all responses together -> as eval/distinct_1
eval/best_of_kl_bound | eval_policy | nats a response | largest KL of best-of-n, nats a response:
    log n - (n - 1) / n, above which the KL of best-of-n to its policy cannot be
eval/win_rate | ppo eval_policy | share | the win rate over the SFT model: share of validation
    responses that score above the SFT model's response to the same prompt with the same random
    numbers, a tie counting one half -> starts at 0.5, rises
eval/win_rate_<end> | eval_policy | share: end, low or high, of the 95% interval of eval/win_rate,
    by bootstrap over prompts -> low above 0.5
eval/reward_gain | eval_policy | score: mean over prompts of the score less that of the SFT model ->
    above 0
eval/reward_gain_<end> | eval_policy | score: end, low or high, of the 95% interval of
    eval/reward_gain, by bootstrap over prompts -> low above 0
eval/pass@<k>/<score> | eval_policy | share: mean over prompts of 1 - C(n - c, k) / C(n, k), with n
    responses of which c have a score of 1, for scores of 0 and 1 alone (Chen et al. 2021) -> rises
rank/reward_mean | rank | score | the reward of all responses: mean score of all responses
rank/best_reward | rank | score | the reward of the best response to each prompt: mean over prompts
    of the highest score -> above rank/reward_mean
rank/best_kl | rank | nats a response: KL of best-of-n to the policy, estimated from the scores:
    sum_s w_s log(w_s / p_s) with w_s = P(x <= s)^n - P(x < s)^n, mean over prompts -> at most
    rank/best_kl_bound; far below it, scores or responses repeat
rank/best_kl_bound | rank | nats a response: log n - (n - 1) / n, the largest KL of best-of-n
rank/pairs | rank | pairs | the number of preference pairs: number of preference pairs written
rank/demonstrations | rank | responses: number of best responses written -> that of the prompts
rank/accepted | rank | responses: number of accepted responses written
rank/left_out | rank | responses: number of responses that no row has: cut, repeated, or not to be
    read -> few; many that are cut ask for a larger rank.max_response_tokens
rank/best_judge/<part> | rank | the judge's: mean of one of the judge's scores over the best
    response to each prompt -> gold above eval/judge/gold: the reward finds better responses
eval/judge/<part> | ppo eval_policy rank | the judge's: mean of one of the judge's scores over the
    validation responses that have it -> gold that falls while the reward rises is reward hacking
time/rollout_s | ppo | s: sampling responses with their values
time/score_s | ppo | s: scoring by the reward source and the reference
time/update_s | ppo | s: all optimizer steps of the iteration
time/iteration_s | ppo | s: rollout_s + score_s + update_s -> steady
time/other_s | ppo | s: from the end of the iteration before: evaluation, logs, samples,
    checkpoints, data -> small compared with iteration_s, except where one of these is due
time/tokens_per_s | ppo | tokens/s: response tokens / iteration_s -> steady
time/episodes_per_s | ppo | 1/s: responses / iteration_s -> steady
compute/generated_tokens | ppo | tokens: response tokens sampled so far, end tokens included
compute/scored_tokens | ppo | tokens: prompt and response tokens read without a gradient so far,
    once for each model that reads them: reference, reward models, a critic apart, the policy where
    it annotates
compute/judge_tokens | ppo | tokens: tokens that judge models have read and written so far, also of
    evaluations; only with a judge as reward
compute/trained_tokens | sft rm ppo dpo | tokens: prompt and response tokens read with a gradient so
    far, once for each epoch of PPO
compute/rollout_flops | ppo | FLOP: floating-point operations of sampling so far
compute/score_flops | ppo | FLOP: floating-point operations of the reference and the reward models
    so far
compute/update_flops | ppo | FLOP: floating-point operations of all updates so far
compute/flops | sft rm ppo dpo | FLOP: floating-point operations so far: from 2 to 6 for each weight
    and real token, and attention; in PPO rollout_flops + score_flops + update_flops; evaluation is
    not counted
compute/device_s | sft rm ppo dpo | s: time of the training steps so far, in PPO the sum of
    time/iteration_s, times the number of processes
compute/peak_memory | sft rm ppo dpo | bytes: largest memory so far: of tensors on a GPU, else of
    the process -> below what the machine has
""")
"""Name -> definition of every metric, in the order of docs/metrics.md."""

Goal = Sequence[tuple[str, config.Mode]]
"""Metrics that decide which evaluation is the best, and whether the lowest or the highest is.

A later metric decides where the ones before it are equal; among evaluations that are equal in all
of them, the earliest is the best.
"""


def signed(value: float, mode: config.Mode) -> float:
    """Return the value with the sign by which the larger one is better; NaN is the worst."""
    return -math.inf if math.isnan(value) else SIGNS[mode] * value


def require_metrics(key: str, goal: Goal, metrics: Mapping[str, float]) -> None:
    """Raise ConfigError naming `key` where an evaluation lacks a metric of `goal`."""
    measured = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
    for name, _ in goal:
        errors.require(name in metrics, key, name, measured or "none, as no metric was logged")


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for names that are not defined in METRICS."""
    unknown = [n for n in names if n not in METRICS and not n.startswith(CHOSEN_NAMES)]
    if unknown:
        raise ValueError(
            f"metrics {unknown} have no row in METRICS (core/metrics.py); add one that says "
            "what they mean"
        )


def label_of(metric: str) -> str:
    """Return the name of a metric in a sentence; a part of the reward or judge has its own."""
    if metric == GOLD:
        return "the gold score"
    found = METRICS[metric].label if metric in METRICS else None
    return found or metric.removeprefix(JUDGE)


def heading_of(metric: str) -> str:
    """Return the name of a metric above or beside its values."""
    label = label_of(metric).removeprefix("the ")
    is_key = "_" in label or "/" in label
    return label if is_key else f"{label[:1].upper()}{label[1:]}"
