"""Scored pairs, to be measured."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_rlhf.report.fitness import Fitness, ScoredPair, ScoredSample, measure_fitness


def pair(**changes: Any) -> ScoredPair:
    values: dict[str, Any] = {
        "prompt": "question", "chosen": "good", "rejected": "bad", "chosen_score": 1.0,
        "rejected_score": 0.0, "chosen_tokens": 4, "rejected_tokens": 4,
    }  # fmt: skip
    return ScoredPair(**(values | changes))


def scored(*rows: tuple[float, float, int, int]) -> list[ScoredPair]:
    """Pairs of (chosen score, rejected score, chosen tokens, rejected tokens), a prompt each."""
    return [
        pair(prompt=f"question {i}", chosen_score=c, rejected_score=r, chosen_tokens=ct,
             rejected_tokens=rt)
        for i, (c, r, ct, rt) in enumerate(rows)
    ]  # fmt: skip


def measure(
    pairs: Sequence[ScoredPair], samples: Sequence[ScoredSample] = (),
    logit_scale: float | None = 1.0, seed: int = 0,
) -> Fitness:  # fmt: skip
    return measure_fitness(pairs, samples, logit_scale=logit_scale, seed=seed)


def simulated(count: int, per_token: float, scale: float = 1.0, seed: int = 1) -> list[ScoredPair]:
    """A model of qualities q whose labels are drawn with P = sigmoid(q_a - q_b), so that scores q
    are calibrated; it adds `per_token` for each token, of which quality knows nothing."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        a, b = generator.normal(0, 1.2, 2)
        if generator.random() > 1 / (1 + math.exp(b - a)):
            a, b = b, a
        ct, rt = (int(tokens) for tokens in generator.integers(5, 100, 2))
        rows.append((scale * a + per_token * ct, scale * b + per_token * rt, ct, rt))
    return scored(*rows)
