"""METRICS: the definition of every metric name, with its formula, unit and healthy range.

Here are those of rollouts and updates, and the metrics by which an evaluation is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lightning_rlhf.callbacks.metric_definitions import (
    COST,
    DPO,
    EVALUATION,
    EVERY,
    PAIRS,
    PPO,
    RANKED,
    RM,
    SFT,
    Metric,
)
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import require
from lightning_rlhf.rewards.format_check import BEST_JUDGE, EVAL_PART, INTERVALS, JUDGE, PART, PASS

Goal = Sequence[tuple[str, Mode]]
"""Metrics that tell which evaluation is the best, and whether the lowest or the highest is.

A later metric decides where the ones before it are equal; among evaluations that are equal in all
of them, the earliest is the best.
"""
SIGNS = {"min": -1, "max": 1}


def signed(value: float, mode: Mode) -> float:
    """Return the value with the sign by which the larger one is better; NaN is the worst."""
    return -math.inf if math.isnan(value) else SIGNS[mode] * value


def require_metrics(key: str, goal: Goal, metrics: Mapping[str, float]) -> None:
    """Raise ConfigError naming `key` where an evaluation lacks a metric of `goal`."""
    measured = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
    for name, _ in goal:
        require(name in metrics, key, name, measured or "none, as no metric was logged")


ROLLOUT: dict[str, Metric] = {
    "reward_mean": Metric(
        "mean over responses of the score, before any KL penalty",
        "score",
        "rollout",
        PPO,
        "rises, then flattens; 0 is what the SFT model gets on training prompts",
    ),
    "kl_divergence": Metric(
        "mean over responses of sum_t kl_t, policy against reference",
        "nats a response",
        "rollout",
        PPO,
        "starts at 0, grows slowly; growth without end is reward hacking",
    ),
    "entropy": Metric(
        "mean over minibatches of the mean entropy of a token's distribution",
        "nats a token",
        "update",
        PPO,
        "falls slowly; near 0 the policy has collapsed",
    ),
    "ppo_loss": Metric(
        "mean over minibatches of policy_loss + kl_coef kl_loss + vf_coef value_loss "
        "- ent_coef entropy + ptx_coef ptx_loss",
        "1",
        "update",
        PPO,
        "near 0 and noisy; not a sign of progress in either direction",
    ),
    "rollout/reward_std": Metric(
        "standard deviation of the score over responses, denominator B",
        "score",
        "rollout",
        PPO,
        "above 0; at 0 there is nothing to learn; a warning after three iterations",
        band=(0.0, None),
    ),
    "rollout/reward_min": Metric("smallest score of the batch", "score", "rollout", PPO, "-"),
    "rollout/reward_max": Metric("largest score of the batch", "score", "rollout", PPO, "-"),
    **{
        f"rollout/score_p{p:02d}": Metric(
            f"{p}% quantile of the score over responses, linear between neighbours (numpy's "
            "default)",
            "score",
            "rollout",
            PPO,
            healthy,
        )
        for p, healthy in (
            (5, "rises too; alone at the bottom it shows responses that still fail"),
            (25, "-"),
            (50, "follows reward_mean"),
            (75, "-"),
            (95, "far from score_p50 only while responses differ"),
        )
    },
    "rollout/groups_alike": Metric(
        "share of prompts whose responses all have the same score, from which rloo, grpo and "
        "dr_grpo learn nothing but the KL",
        "share",
        "rollout",
        PPO,
        "below 0.5; near 1 nothing is learned: harder or easier prompts, more samples_per_prompt",
    ),
    "rollout/reward/<component>": Metric(
        "mean over responses of one of several components of the reward, before its weight",
        "the component's",
        "rollout",
        PPO,
        "no component rises at the cost of all others",
    ),
    "rollout/reward_paid": Metric(
        "mean over responses of the score that PPO is paid, before its own shaping; only if a "
        "component has a running normalization or a clip",
        "score",
        "rollout",
        PPO,
        "follows reward_mean; near 0 by construction with running normalization",
    ),
    "rollout/reward_paid_range": Metric(
        "largest less smallest of the same scores; only where reward_paid is logged",
        "score",
        "rollout",
        PPO,
        "above 0",
    ),
    "rollout/kl_std": Metric(
        "standard deviation over responses of sum_t kl_t, denominator B",
        "nats a response",
        "rollout",
        PPO,
        "of the size of kl_divergence; kl_std / sqrt(B) is the standard error of kl_divergence",
    ),
    "rollout/most_common": Metric(
        "share of responses that equal the most common response of the batch, token for token",
        "share",
        "rollout",
        PPO,
        "below 0.5, unless the answers to all prompts are the same few",
    ),
    "rollout/repetition": Metric(
        "share of 4-grams of tokens that occurred earlier in the same response, over all responses",
        "share",
        "rollout",
        PPO,
        "below 0.1; 0.4 is a loop of the same words",
    ),
    "rollout/response_tokens": Metric(
        "mean over responses of their tokens, end token included",
        "tokens",
        "rollout",
        PPO,
        "no steady drift to the limit or to 1",
    ),
    "rollout/ended": Metric(
        "share of responses that end with an end token or stop string",
        "share",
        "rollout",
        PPO,
        "near 1",
    ),
    "rollout/padding": Metric(
        "share of padding among the positions read for scoring, microbatch_size rows at a time",
        "share",
        "rollout",
        PPO,
        "lower costs less; a smaller microbatch_size lowers it, with more passes",
    ),
    "rollout/shaped_return": Metric(
        "mean over responses of sum_t rewards_t: the shaped score, less the KL if kl_in=reward",
        "score",
        "rollout",
        PPO,
        "rises; this is what PPO maximises (with ppo.kl_in=loss, less the KL)",
    ),
    "rollout/value_mean": Metric(
        "mean over response tokens of the critic's value at sampling time; 0 without a critic",
        "score",
        "rollout",
        PPO,
        "follows shaped_return",
    ),
    "rollout/explained_variance": Metric(
        "1 - Var(returns - values) / Var(returns) over tokens; nan if no variance; 0 if no critic",
        "1",
        "rollout",
        PPO,
        "above 0 after warm-up; below 0 the critic hurts",
        band=(0.0, None),
    ),
}


UPDATE: dict[str, Metric] = {
    "update/policy_loss": Metric(
        "mean over minibatches of the clipped surrogate",
        "1",
        "update",
        PPO,
        "near 0, slightly negative",
    ),
    "update/value_loss": Metric(
        "mean over minibatches of half the clipped squared error of the value",
        "score^2",
        "update",
        PPO,
        "falls in the first iterations",
    ),
    "update/kl_loss": Metric(
        "mean over minibatches of the KL to the reference in the loss, as kl_estimator says",
        "nats a token",
        "update",
        PPO,
        "as kl_divergence; 0 if the KL is in the reward",
    ),
    "update/ptx_loss": Metric(
        "mean over minibatches of the negative log-likelihood of a batch of demonstrations, mean "
        "over its target tokens; ptx_coef weighs it",
        "nats a token",
        "update",
        PPO,
        "no steep rise; 0 if ptx_coef is 0",
    ),
    "update/approx_kl": Metric(
        "mean over minibatches of KL(policy at sampling, policy now), estimator k3",
        "nats a token",
        "update",
        PPO,
        "below 0.05; above if steps are too large",
        band=(None, 0.05),
    ),
    "update/clip_fraction": Metric(
        "share of tokens whose ratio left the clip range",
        "share",
        "update",
        PPO,
        "below 0.3",
        band=(None, 0.3),
    ),
    "update/value_clip_fraction": Metric(
        "share of tokens whose value left its clip range",
        "share",
        "update",
        PPO,
        "below 0.5",
        band=(None, 0.5),
    ),
    "update/ratio_mean": Metric(
        "mean over minibatches of the mean probability ratio, policy now to policy at sampling",
        "1",
        "update",
        PPO,
        "within 0.01 of 1",
        band=(0.99, 1.01),
    ),
    "update/ratio_max": Metric(
        "largest probability ratio of any token in any minibatch",
        "1",
        "update",
        PPO,
        "below 10",
        band=(None, 10.0),
    ),
    "update/grad_norm": Metric(
        "gradient norm before clipping, of the logged step; in PPO the mean over minibatches",
        "1",
        "update",
        EVERY,
        "steady; spikes come before collapses",
    ),
    "update/steps": Metric(
        "optimizer steps taken in the iteration",
        "1",
        "update",
        PPO,
        "ppo_epochs x minibatches, unless target_kl or max_ratio is set",
    ),
    "update/skipped": Metric(
        "minibatches skipped because their mean ratio was above max_ratio", "1", "update", PPO, "0"
    ),
    "update/stopped": Metric(
        "1 if approx_kl above target_kl ended the epochs, else 0",
        "1",
        "update",
        PPO,
        "occasionally 1; always 1 if steps are too large",
    ),
    "update/nonfinite": Metric(
        "updates since the last row that were not made because loss or gradient is not finite",
        "1",
        "update",
        EVERY,
        "0",
    ),
    "update/kl_coef": Metric(
        "weight of the KL in this iteration's rewards or loss", "1", "update", PPO, "-"
    ),
    "update/lr": Metric(
        "learning rate of the first parameter group when the batch started",
        "1",
        "update",
        EVERY,
        "follows its schedule",
    ),
    "update/loss": Metric(
        "negative log-likelihood, mean over target tokens of the latest trainer.log_every_n_steps "
        "steps",
        "nats a token",
        "update",
        SFT,
        "falls",
    ),
    "update/perplexity": Metric("exp(update/loss)", "tokens", "update", SFT, "falls"),
    "update/rm_loss": Metric(
        "-log sigmoid(chosen - rejected), mean over pairs of the latest trainer.log_every_n_steps "
        "steps",
        "nats a pair",
        "update",
        RM,
        "falls below log 2 = 0.693, the loss of guessing",
        band=(None, 0.693),
    ),
    "update/accuracy": Metric(
        "share of the same pairs with chosen > rejected, a tie counting one half",
        "share",
        "update",
        PAIRS,
        "above 0.5; near 1 the model has memorised the pairs",
        band=(0.5, None),
    ),
    "update/reward_chosen": Metric(
        "mean reward of chosen; of stage=dpo the implicit one, beta log(policy / reference), of a "
        "token with loss_type sigmoid_norm and ipo",
        "reward",
        "update",
        PAIRS,
        "-",
    ),
    "update/reward_rejected": Metric(
        "mean reward of rejected, likewise", "reward", "update", PAIRS, "-"
    ),
    "update/reward_margin": Metric(
        "mean of chosen - rejected", "reward", "update", PAIRS, "grows, then flattens"
    ),
    "update/dpo_loss": Metric(
        "preference loss of loss_type with label_smoothing, without the SFT term, mean over pairs "
        "of the latest trainer.log_every_n_steps steps",
        "1",
        "update",
        DPO,
        "falls below that of the reference: log 2 = 0.693, with ipo 1 / (2 beta)^2",
    ),
    "update/logps_chosen": Metric(
        "mean over the same pairs of the log-probability of chosen under the policy",
        "nats a response",
        "update",
        DPO,
        "falls less than logps_rejected; far below its start the policy forgets what SFT learned: "
        "raise beta or sft_coef",
    ),
    "update/logps_rejected": Metric(
        "the same of rejected", "nats a response", "update", DPO, "falls"
    ),
    "update/sft_loss": Metric(
        "negative log-likelihood of the chosen responses, mean over their tokens; sft_coef weighs "
        "it",
        "nats a token",
        "update",
        DPO,
        "no steep rise",
    ),
}


FITNESS = "fitness/"
"""Prefix of the metrics of a fitness report, which defines them."""

MACHINE = ("time/", "compute/device_s", "compute/peak_memory")
"""Starts of the names of metrics that a repeated run measures differently."""

CHOSEN_NAMES = (JUDGE, BEST_JUDGE, PART, EVAL_PART, FITNESS, PASS, *INTERVALS)
"""Prefixes of metrics whose names are not listed in METRICS."""

METRICS: dict[str, Metric] = {**ROLLOUT, **UPDATE, **EVALUATION, **RANKED, **COST}
"""Name -> definition of every metric, in the order of docs/metrics.md."""


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for names that are not defined in METRICS."""
    unknown = [n for n in names if n not in METRICS and not n.startswith(CHOSEN_NAMES)]
    if unknown:
        raise ValueError(
            f"metrics {unknown} have no row in METRICS (callbacks/metric_definitions.py); "
            "add one that says what they mean"
        )


def metrics_table() -> str:
    """Return METRICS as a Markdown table."""
    lines = [
        "| metric | stage | phase | what it is | unit | healthy |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {', '.join(m.stages)} | {m.phase} | {m.formula} | {m.unit} | {m.healthy} |"
        for name, m in METRICS.items()
    ]
    return "\n".join(lines)
