"""What is told of a run while it goes on: once, of a constant reward and of a large KL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks.diagnosis import Diagnosis
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.core.shaping import RunningMoments, ScoreMoments

from .conftest import FakePPO, Fit, make_experience
from .test_metric_callbacks import SaveAt

CONSTANT = "warning: all responses of an iteration got the same reward, 3 iterations in a row"
FAR = "warning: kl_divergence is "


class Scored(FakePPO):
    """Iteration k pays its two responses scores[k], and is kl[k] nats from the reference."""

    def __init__(self, scores: list[tuple[float, float]], kl: list[float] | None = None) -> None:
        super().__init__()
        self.scores, self.kl = scores, kl or [0.0] * len(scores)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        score = torch.tensor(self.scores[self.iteration])
        # Both responses have the same sum, of which kl_divergence is the mean.
        kl = torch.zeros(2, 3)
        kl[:, 0] = self.kl[self.iteration]
        experience = make_experience(score=score, component_scores=score[:, None], kl=kl)
        result = super().training_step(batch, batch_idx)[RESULT]
        return {RESULT: replace(result, experience=experience)}


def train(fit: Fit, module: FakePPO, kl_warning: float | None = None, **options: Any) -> Diagnosis:
    diagnosis = Diagnosis(kl_warning)
    callbacks = [PPOMetrics(), diagnosis, *options.pop("more", [])]
    fit(module, callbacks, [], batches=len(module.scores), limit_val_batches=0, **options)
    return diagnosis


SAME, OTHER = (0.1, 0.1), (0.1, 0.2)


@pytest.mark.parametrize(("scores", "times"), [
    ([SAME] * 2, 0),
    ([SAME] * 3, 1),
    ([SAME] * 9, 1),
    ([SAME, SAME, OTHER, SAME, SAME], 0),
    ([OTHER, (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], 1),
    ([SAME] * 3 + [OTHER] + [SAME] * 3, 1),
])  # fmt: skip
def test_a_constant_reward_is_told_once(
    fit: Fit, capsys: Any, scores: list[tuple[float, float]], times: int
) -> None:
    train(fit, Scored(scores))
    out = capsys.readouterr().out
    assert out.count("warning: ") == out.count(CONSTANT) == times


def test_what_is_paid_counts_where_it_is_not_what_is_reported(fit: Fit, capsys: Any) -> None:
    """Scores of 3 and 4 clipped at 1 are both paid 1."""

    class Clipped(Scored):
        moments = ScoreMoments(RunningMoments(1, 0.0, 0.0), (RunningMoments(1, 0.0, 0.0),))

    module = Clipped([(3.0, 4.0)] * 3)
    module.reward.terms = [replace(module.reward.terms[0], clip=1.0)]
    train(fit, module)
    assert capsys.readouterr().out.count(CONSTANT) == 1


@pytest.mark.parametrize(("bound", "told"), [(None, None), (50.0, "2"), (60.0, "3"), (61.0, None)])
def test_a_large_kl_is_told_once(fit: Fit, capsys: Any, bound: float | None, told: str) -> None:
    kl = [50.0, 50.5, 61.0, 99.0] if bound != 61.0 else [50.0, 50.5, 61.0, 61.0]
    train(fit, Scored([OTHER] * 4, kl), bound)
    out = capsys.readouterr().out
    assert out.count(FAR) == (told is not None)
    if told is not None:
        assert f"nats a response in iteration {told}, above ppo.kl_warning={bound:g}: " in out


@pytest.mark.parametrize("cut", [2, 4])
def test_a_resumed_run_counts_on_and_says_nothing_again(
    fit: Fit, tmp_path: Path, capsys: Any, cut: int
) -> None:
    """From before the warning of iteration 3, or from after it."""
    path = tmp_path / "cut.ckpt"
    train(fit, Scored([SAME] * 5), more=[SaveAt(cut, path)])
    assert capsys.readouterr().out.count(CONSTANT) == 1
    train(fit, Scored([SAME] * 5), ckpt_path=path)
    assert capsys.readouterr().out.count(CONSTANT) == (1 if cut == 2 else 0)
