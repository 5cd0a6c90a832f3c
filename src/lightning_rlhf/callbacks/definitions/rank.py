"""Metrics of ranked responses, and the judge's, which evaluations have too."""

from __future__ import annotations

from lightning_rlhf.callbacks.definitions.metric import EVALUATED, RANK, Metric

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
