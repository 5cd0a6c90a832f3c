"""Prefixes of metrics whose names are completed by a judge or the configuration."""

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


def short_name(metric: str) -> str:
    """Return the name of a metric of an evaluation as the results of a sweep show it."""
    return metric.removeprefix("eval/").removeprefix("judge/")
