"""METRICS: the definition of every metric name, with its formula, unit and healthy range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.config import Mode, Stage
from lightning_rlhf.rewards.prefixes import BEST_JUDGE, EVAL_PART, INTERVALS, JUDGE, PART, PASS

Phase = Literal["rollout", "update", "eval", "time", "compute", "rank"]

FITNESS = "fitness/"
"""Prefix of the metrics of a fitness report, which defines them."""

MACHINE = ("time/", "compute/device_s", "compute/peak_memory")
"""Starts of the names of metrics that a repeated run measures differently."""

CHOSEN_NAMES = (JUDGE, BEST_JUDGE, PART, EVAL_PART, FITNESS, PASS, *INTERVALS)
"""Prefixes of metrics whose names are not listed in METRICS."""


@dataclass(frozen=True)
class Metric:
    """The definition of a logged metric."""

    formula: str
    """Formula or description of the metric."""
    unit: str
    """Unit of the metric; "1" for dimensionless ones."""
    phase: Phase
    """Part of an iteration in which the metric is measured, or what is measured of the whole."""
    stages: tuple[Stage, ...]
    """Stages that log the metric."""
    healthy: str
    """Healthy range or course of the metric."""
    better: Mode | None = None
    """Direction of a metric of an evaluation: whether the lowest or the highest value is the best;
    None where neither is."""
    band: tuple[float | None, float | None] | None = None
    """Lowest and highest healthy value, as `healthy` says it, for metrics with a fixed range; None
    for an end that is open."""


PPO: tuple[Stage, ...] = ("ppo",)
SFT: tuple[Stage, ...] = ("sft",)
RM: tuple[Stage, ...] = ("rm",)
DPO: tuple[Stage, ...] = ("dpo",)
PAIRS: tuple[Stage, ...] = ("rm", "dpo")
EVAL_POLICY: tuple[Stage, ...] = ("eval_policy",)
RANK: tuple[Stage, ...] = ("rank",)
EVALUATED: tuple[Stage, ...] = ("ppo", "eval_policy")
EVERY: tuple[Stage, ...] = ("sft", "rm", "ppo", "dpo")

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
    "eval/loss": Metric(
        "negative log-likelihood, mean over all target tokens of the validation set",
        "nats a token",
        "eval",
        SFT,
        "falls; a rise is overfitting",
        better="min",
    ),
    "eval/perplexity": Metric(
        "exp(eval/loss); of stage=eval_policy, exp of the same loss on held-out demonstrations",
        "tokens",
        "eval",
        (*SFT, *EVAL_POLICY),
        "falls; after PPO, not far above that of the SFT model",
        better="min",
    ),
    "eval/rm_loss": Metric(
        "-log sigmoid(chosen - rejected), mean over all validation pairs",
        "nats a pair",
        "eval",
        RM,
        "below log 2 = 0.693; a rise is overfitting",
        better="min",
        band=(None, 0.693),
    ),
    "eval/accuracy": Metric(
        "share of validation pairs with chosen > rejected, a tie counting one half",
        "share",
        "eval",
        PAIRS,
        "0.6 to 0.85; limited by the noise of the labels",
        better="max",
        band=(0.6, 0.85),
    ),
    "eval/reward_chosen": Metric(
        "mean reward of chosen, as update/reward_chosen", "reward", "eval", PAIRS, "-"
    ),
    "eval/reward_rejected": Metric(
        "mean reward of rejected, likewise", "reward", "eval", PAIRS, "-"
    ),
    "eval/reward_margin": Metric(
        "mean of chosen - rejected",
        "reward",
        "eval",
        PAIRS,
        "positive",
        better="max",
        band=(0.0, None),
    ),
    "eval/dpo_loss": Metric(
        "preference loss as update/dpo_loss, mean over all validation pairs",
        "1",
        "eval",
        DPO,
        "falls; a rise is overfitting",
        better="min",
    ),
    "eval/logps_chosen": Metric(
        "mean over validation pairs of the log-probability of chosen under the policy",
        "nats a response",
        "eval",
        DPO,
        "as update/logps_chosen",
    ),
    "eval/logps_rejected": Metric("the same of rejected", "nats a response", "eval", DPO, "falls"),
    "eval/sft_loss": Metric(
        "negative log-likelihood of the chosen responses of the validation pairs, mean over tokens",
        "nats a token",
        "eval",
        DPO,
        "no steep rise",
        better="min",
    ),
    "fitness/<number>": Metric(
        "a number of the fitness report at the end of the stage, defined in final/report.md",
        "as there",
        "eval",
        RM,
        "flags 0, accuracy_low above 0.5",
    ),
    "eval/reward_mean": Metric(
        "mean score over validation prompts",
        "score",
        "eval",
        EVALUATED,
        "rises with reward_mean",
        better="max",
    ),
    "eval/reward/<component>": Metric(
        "mean over validation responses of one of several components of the reward",
        "the component's",
        "eval",
        EVALUATED,
        "as rollout/reward/<component>",
    ),
    "eval/kl": Metric(
        "mean over validation responses of sum_t (logprob_t - ref_logprob_t)",
        "nats a response",
        "eval",
        EVALUATED,
        "near kl_divergence; single responses may be negative",
        better="min",
    ),
    "eval/response_tokens": Metric("mean response length", "tokens", "eval", EVALUATED, "no drift"),
    "eval/ended": Metric(
        "share of responses that end with an end token or stop string",
        "share",
        "eval",
        EVALUATED,
        "near 1",
    ),
    "eval/response_perplexity": Metric(
        "exp(-sum of the reference's log-probabilities of response tokens / number of them)",
        "tokens",
        "eval",
        EVALUATED,
        "as that of the SFT model; a rise with the reward is text that the SFT model would not say",
    ),
    "eval/distinct_1": Metric(
        "different words / words, over all responses together (Li et al. 2016)",
        "share",
        "eval",
        EVALUATED,
        "as that of the SFT model; a fall is repetition, in a response or across prompts",
    ),
    "eval/distinct_2": Metric(
        "different pairs of neighbouring words / such pairs, over all responses together",
        "share",
        "eval",
        EVALUATED,
        "as eval/distinct_1",
    ),
    "eval/win_rate": Metric(
        "share of validation responses that score above the SFT model's response to the same "
        "prompt with the same random numbers, a tie counting one half",
        "share",
        "eval",
        EVALUATED,
        "starts at 0.5, rises",
    ),
    "eval/win_rate_<end>": Metric(
        "end, low or high, of the 95% interval of eval/win_rate, by bootstrap over prompts",
        "share",
        "eval",
        EVAL_POLICY,
        "low above 0.5",
    ),
    "eval/reward_gain": Metric(
        "mean over prompts of the score less that of the SFT model",
        "score",
        "eval",
        EVAL_POLICY,
        "above 0",
    ),
    "eval/reward_gain_<end>": Metric(
        "end, low or high, of the 95% interval of eval/reward_gain, by bootstrap over prompts",
        "score",
        "eval",
        EVAL_POLICY,
        "low above 0",
    ),
    "eval/pass@<k>/<score>": Metric(
        "mean over prompts of 1 - C(n - c, k) / C(n, k), with n responses of which c have a score "
        "of 1, for scores of 0 and 1 alone (Chen et al. 2021)",
        "share",
        "eval",
        EVAL_POLICY,
        "rises",
    ),
    "rank/reward_mean": Metric("mean score of all responses", "score", "rank", RANK, "-"),
    "rank/best_reward": Metric(
        "mean over prompts of the highest score", "score", "rank", RANK, "above rank/reward_mean"
    ),
    "rank/best_kl": Metric(
        "KL of best-of-n to the policy, estimated from the scores: sum_s w_s log(w_s / p_s) with "
        "w_s = P(x <= s)^n - P(x < s)^n, mean over prompts",
        "nats a response",
        "rank",
        RANK,
        "at most rank/best_kl_bound; far below it, scores or responses repeat",
    ),
    "rank/best_kl_bound": Metric(
        "log n - (n - 1) / n, the largest KL of best-of-n", "nats a response", "rank", RANK, "-"
    ),
    "rank/pairs": Metric("number of preference pairs written", "pairs", "rank", RANK, "-"),
    "rank/demonstrations": Metric(
        "number of best responses written", "responses", "rank", RANK, "that of the prompts"
    ),
    "rank/accepted": Metric("number of accepted responses written", "responses", "rank", RANK, "-"),
    "rank/left_out": Metric(
        "number of responses that no row has: cut, repeated, or not to be read",
        "responses",
        "rank",
        RANK,
        "few; many that are cut ask for a larger rank.max_response_tokens",
    ),
    "rank/best_judge/<part>": Metric(
        "mean of one of the judge's scores over the best response to each prompt",
        "the judge's",
        "rank",
        RANK,
        "gold above eval/judge/gold: the reward finds better responses",
    ),
    "eval/judge/<part>": Metric(
        "mean of one of the judge's scores over the validation responses that have it",
        "the judge's",
        "eval",
        (*EVALUATED, *RANK),
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
    "compute/generated_tokens": Metric(
        "response tokens sampled so far, end tokens included", "tokens", "compute", PPO, "-"
    ),
    "compute/scored_tokens": Metric(
        "prompt and response tokens read without a gradient so far, once for each model that reads "
        "them: reference, reward models, a critic apart, the policy where it annotates",
        "tokens",
        "compute",
        PPO,
        "-",
    ),
    "compute/trained_tokens": Metric(
        "prompt and response tokens read with a gradient so far, once for each epoch of PPO",
        "tokens",
        "compute",
        EVERY,
        "-",
    ),
    "compute/rollout_flops": Metric(
        "floating-point operations of sampling so far", "FLOP", "compute", PPO, "-"
    ),
    "compute/score_flops": Metric(
        "floating-point operations of the reference and the reward models so far",
        "FLOP",
        "compute",
        PPO,
        "-",
    ),
    "compute/update_flops": Metric(
        "floating-point operations of all updates so far", "FLOP", "compute", PPO, "-"
    ),
    "compute/flops": Metric(
        "floating-point operations so far: matrix products of the real tokens, from the sizes of "
        "the models; in PPO rollout_flops + score_flops + update_flops; evaluation is not counted",
        "FLOP",
        "compute",
        EVERY,
        "-",
    ),
    "compute/device_s": Metric(
        "time of the training steps so far, in PPO the sum of time/iteration_s, times one device",
        "s",
        "compute",
        EVERY,
        "-",
    ),
    "compute/peak_memory": Metric(
        "largest memory so far: of tensors on a GPU, else of the process",
        "bytes",
        "compute",
        EVERY,
        "below what the machine has",
    ),
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
