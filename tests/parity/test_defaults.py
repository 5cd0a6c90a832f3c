"""What a run has that names no value: TRL's PPOConfig and our stage=ppo."""

from dataclasses import fields
from typing import Any

import pytest
from trl.experimental.ppo import PPOConfig

from .ours import default_config

THEIRS = {field.name: field.default for field in fields(PPOConfig)}


SAME = {
    "kl_coef": "kl_coef", "kl_estimator": "kl_estimator", "cliprange": "clip_range",
    "cliprange_value": "clip_range_vf", "vf_coef": "vf_coef", "gamma": "gamma",
    "lam": "gae_lambda", "num_ppo_epochs": "ppo_epochs", "whiten_rewards": "whiten_rewards",
    "max_grad_norm": "max_grad_norm",
}  # fmt: skip
"""TRL's name -> ours."""


def test_same_default() -> None:
    ours = default_config()
    assert {name: THEIRS[name] for name in SAME} == {n: getattr(ours, x) for n, x in SAME.items()}


@pytest.mark.parametrize(
    ("theirs", "their_value", "ours", "our_value"),
    [
        ("temperature", 0.7, "temperature", 1.0),
        ("missing_eos_penalty", None, "missing_eos_penalty", 1.0),
        ("response_length", 53, "max_response_tokens", 256),
        ("learning_rate", 3e-6, "lr", 1e-5),
    ],
)
def test_other_default(theirs: str, their_value: Any, ours: str, our_value: Any) -> None:
    assert THEIRS[theirs] == their_value
    assert getattr(default_config(), ours) == our_value
