"""Prefixes of metrics whose names are completed by a judge or the configuration."""

JUDGE = "eval/judge/"
"""Prefix of a judge's metrics of the responses."""

PART, EVAL_PART = "rollout/reward/", "eval/reward/"
"""Prefixes of the components of a reward with several components, in training and evaluation."""
