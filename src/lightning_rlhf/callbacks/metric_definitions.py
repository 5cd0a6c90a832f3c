"""Definitions of metrics of cost, of evaluations and of ranked responses, and their record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.config import Mode, Stage

Phase = Literal["rollout", "update", "eval", "time", "compute", "rank"]


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


COST: dict[str, Metric] = {
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
        "floating-point operations so far: from 2 to 6 for each weight and real token, and "
        "attention; in PPO rollout_flops + score_flops + update_flops; evaluation is not counted",
        "FLOP",
        "compute",
        EVERY,
        "-",
    ),
    "compute/device_s": Metric(
        "time of the training steps so far, in PPO the sum of time/iteration_s, times the number "
        "of processes",
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


EVALUATION: dict[str, Metric] = {
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
    "eval/unigram_perplexity": Metric(
        "perplexity of the same tokens under their frequencies in the training targets",
        "tokens",
        "eval",
        SFT,
        "far above eval/perplexity; near it, the model has learned little",
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
}


RANKED: dict[str, Metric] = {
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
}
