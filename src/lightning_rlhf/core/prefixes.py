"""Prefixes of metrics of which a judge or the configuration chooses the rest of the name."""

JUDGE = "eval/judge/"
"""Of what a judge says of the responses."""

PART, EVAL_PART = "rollout/reward/", "eval/reward/"
"""Of the components of a reward that has several."""
