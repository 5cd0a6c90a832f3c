"""Reward functions that check a response: reward.path=lightning_rlhf.verifiers:NAME."""

from lightning_rlhf.rewards.functions import exact_match, regular_expression
from lightning_rlhf.verifiers.answers import json_schema, math_answer, numeric_answer, reasoning_gym
from lightning_rlhf.verifiers.judge import Judge
from lightning_rlhf.verifiers.programs import unit_tests

__all__ = [
    "Judge", "exact_match", "json_schema", "math_answer", "numeric_answer", "reasoning_gym",
    "regular_expression", "unit_tests",
]  # fmt: skip
