"""The record of one check, and the table of all checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Verdict = Literal["passed", "warning", "failed", "not applicable"]


@dataclass(frozen=True)
class Check:
    """One thing that was checked before the first update."""

    name: str
    """Name of the check: a key of CHECKS, with a role in the place of ROLE."""
    measured: str
    """Measured value with its unit, or the reason why nothing is measured."""
    allowed: str
    """Allowed values; empty where nothing is measured."""
    verdict: Verdict


CHECKS: Mapping[str, tuple[str, str, str]] = {
    "vocabulary": (
        "sft, rm, ppo, dpo",
        "number of the tokenizer's tokens",
        "at most the rows of the model's output layer",
    ),
    "positions": (
        "sft, rm, ppo, dpo",
        "longest sequence: prompt and response in tokens",
        "at most the model's `max_position_embeddings`; a warning above them, as the model was not "
        "trained there",
    ),
    "fingerprint: ROLE": (
        "rm, ppo, dpo",
        "relative difference between the logits of the reference, or of a reward model on the same "
        "base, and those stored in its checkpoint",
        "0.0001 in fp32; in 16 bits 0.03, from 4 layers on times the square root of layers / 4; on "
        "quantised weights at least 0.03 (nf4) or 0.1 (int8), and 0.5 where the checkpoint was "
        "trained on others",
    ),
    "trainable: ROLE": (
        "sft, rm, ppo, dpo",
        "number of trainable parameters of the base, of each adapter and of each head",
        "policy and critic all, every other role none; in sft and rm all or none of each role, and "
        "some of one",
    ),
    "sampled log-probabilities": (
        "ppo",
        "log-probabilities that the sampler returns against those of the training model",
        "0.001 nats in fp32, 0.1 in 16 bits",
    ),
    "ratio": (
        "ppo",
        "distance from 1 of the probability ratio in the micro-batches of the first update",
        "0.001 in fp32, 0.1 in 16 bits",
    ),
    "KL to the reference": (
        "ppo",
        "log-ratio of policy to reference; only while the policy's adapter is still 0",
        "0.001 nats in fp32, 0.1 in 16 bits",
    ),
    "padding: ROLE": (
        "sft, rm, ppo, dpo",
        "log-probabilities of the policy, values of the critic (with random weights in its head, "
        "which starts at 0), or rewards of each reward model: rows in a batch with more padding on "
        "both sides against each row without any",
        "0.001 in fp32, 0.1 in 16 bits: nats, or of the size of the values where that is above 1",
    ),
    "memory": (
        "sft, rm, ppo, dpo",
        "largest memory of the run by the plan below",
        "what is free on the device plus the weights that are loaded; a warning where a smaller "
        "micro-batch fits, failed where none does",
    ),
}
"""Name of a check -> stages that have it, measured value, allowed value."""
LIMITS = {4: 1e-3, 2: 0.1}
"""Bytes of a number in the computation -> largest difference between two ways to compute it.

It is the root mean square over tokens or rows, in nats or units of reward. In fp32 another order of
sums moves a log-probability by 1e-6 to 1e-4, most in linear attention, which carries its rounding
from token to token. In 16 bits a number is rounded to 2^-9 of its size, and a logit of 20 moves by
0.04 at each rounding. A fault such as a wrong temperature, a shifted position or a padding token
that is read moves it by 0.1 to several nats.
"""


def at_most(name: str, found: float, limit: float, unit: str = "") -> Check:
    """Return a check that fails where `found` is above `limit` or NaN."""
    verdict: Verdict = "passed" if found <= limit else "failed"
    unit = f" {unit}" if unit else ""
    return Check(name, f"{found:.2g}{unit}", f"<= {limit:.2g}{unit}", verdict)


def not_applicable(name: str, reason: str) -> Check:
    """Return a check that has nothing to measure, with the reason."""
    return Check(name, reason, "", "not applicable")


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference, relative to `expected` where that is above 1.

        rms(found - expected) / max(1, rms(expected))

    NaN where a number is not finite.
    """
    found, expected = found.cpu().double(), expected.cpu().double()
    size = float(expected.square().mean().sqrt())
    distance = float((found - expected).square().mean().sqrt())
    return distance / max(1.0, size) if math.isfinite(size) else math.nan


def rms(x: torch.Tensor) -> float:
    """Return the root mean square of all elements."""
    return float(x.cpu().double().square().mean().sqrt())


def checks_table() -> str:
    """Return CHECKS as a Markdown table."""
    rows = [f"| {name} | {' | '.join(cells)} |" for name, cells in CHECKS.items()]
    return "\n".join(["| check | stages | measured | allowed |", "|---|---|---|---|", *rows])
