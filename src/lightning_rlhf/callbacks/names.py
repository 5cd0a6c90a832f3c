"""METRICS: the definition of every metric name, with its formula, unit and healthy range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.config import Stage
from lightning_rlhf.core.prefixes import EVAL_PART, JUDGE, PART

Phase = Literal["rollout", "update", "eval", "time"]

FITNESS = "fitness/"
"""Prefix of the metrics of a fitness report, which defines them."""

CHOSEN_NAMES = (JUDGE, PART, EVAL_PART, FITNESS)
"""Prefixes of metrics whose names are not listed in METRICS."""


@dataclass(frozen=True)
class Metric:
    """The definition of a logged metric."""

    formula: str
    """Formula or description of the metric."""
    unit: str
    """Unit of the metric; "1" for dimensionless ones."""
    phase: Phase
    """Part of an iteration in which the metric is measured."""
    stages: tuple[Stage, ...]
    """Stages that log the metric."""
    healthy: str
    """Healthy range or course of the metric."""
    band: tuple[float | None, float | None] | None = None
    """Lowest and highest healthy value, as `healthy` says it, for metrics with a fixed range; None
    for an end that is open."""


PPO: tuple[Stage, ...] = ("ppo",)
SFT: tuple[Stage, ...] = ("sft",)
RM: tuple[Stage, ...] = ("rm",)
EVERY: tuple[Stage, ...] = ("sft", "rm", "ppo")

METRICS: dict[str, Metric] = {
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
        "- ent_coef entropy",
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
        RM,
        "above 0.5; near 1 the model has memorised the pairs",
        band=(0.5, None),
    ),
    "update/reward_chosen": Metric("mean reward of chosen", "reward", "update", RM, "-"),
    "update/reward_rejected": Metric("mean reward of rejected", "reward", "update", RM, "-"),
    "update/reward_margin": Metric(
        "mean of chosen - rejected", "reward", "update", RM, "grows, then flattens"
    ),
    "eval/loss": Metric(
        "negative log-likelihood, mean over all target tokens of the validation set",
        "nats a token",
        "eval",
        SFT,
        "falls; a rise is overfitting",
    ),
    "eval/perplexity": Metric("exp(eval/loss)", "tokens", "eval", SFT, "falls"),
    "eval/rm_loss": Metric(
        "-log sigmoid(chosen - rejected), mean over all validation pairs",
        "nats a pair",
        "eval",
        RM,
        "below log 2 = 0.693; a rise is overfitting",
        band=(None, 0.693),
    ),
    "eval/accuracy": Metric(
        "share of validation pairs with chosen > rejected, a tie counting one half",
        "share",
        "eval",
        RM,
        "0.6 to 0.85; limited by the noise of the labels",
        band=(0.6, 0.85),
    ),
    "eval/reward_chosen": Metric("mean reward of chosen", "reward", "eval", RM, "-"),
    "eval/reward_rejected": Metric("mean reward of rejected", "reward", "eval", RM, "-"),
    "eval/reward_margin": Metric(
        "mean of chosen - rejected", "reward", "eval", RM, "positive", band=(0.0, None)
    ),
    "fitness/<number>": Metric(
        "a number of the fitness report at the end of the stage, defined in final/report.md",
        "as there",
        "eval",
        RM,
        "flags 0, accuracy_low above 0.5",
    ),
    "eval/reward_mean": Metric(
        "mean score over validation prompts", "score", "eval", PPO, "rises with reward_mean"
    ),
    "eval/reward/<component>": Metric(
        "mean over validation responses of one of several components of the reward",
        "the component's",
        "eval",
        PPO,
        "as rollout/reward/<component>",
    ),
    "eval/kl": Metric(
        "mean over validation responses of sum_t (logprob_t - ref_logprob_t)",
        "nats a response",
        "eval",
        PPO,
        "near kl_divergence; single responses may be negative",
    ),
    "eval/response_tokens": Metric("mean response length", "tokens", "eval", PPO, "no drift"),
    "eval/ended": Metric(
        "share of responses that end with an end token or stop string",
        "share",
        "eval",
        PPO,
        "near 1",
    ),
    "eval/judge/<part>": Metric(
        "mean of one of the judge's scores over the validation responses that have it",
        "the judge's",
        "eval",
        PPO,
        "gold that falls while the reward rises is reward hacking",
    ),
    "time/rollout_s": Metric("sampling responses with their values", "s", "time", PPO, "-"),
    "time/score_s": Metric("scoring by the reward source and the reference", "s", "time", PPO, "-"),
    "time/update_s": Metric("all optimizer steps of the iteration", "s", "time", PPO, "-"),
    "time/iteration_s": Metric("rollout_s + score_s + update_s", "s", "time", PPO, "steady"),
    "time/other_s": Metric(
        "from the end of the iteration before: evaluation, logs, samples, checkpoints, data",
        "s",
        "time",
        PPO,
        "small compared with iteration_s, except where one of these is due",
    ),
    "time/tokens_per_s": Metric("response tokens / iteration_s", "tokens/s", "time", PPO, "steady"),
    "time/episodes_per_s": Metric("responses / iteration_s", "1/s", "time", PPO, "steady"),
}


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for names that are not defined in METRICS."""
    unknown = [n for n in names if n not in METRICS and not n.startswith(CHOSEN_NAMES)]
    if unknown:
        raise ValueError(
            f"metrics {unknown} have no row in METRICS (lightning_rlhf/callbacks/names.py); "
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
