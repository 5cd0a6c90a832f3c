"""A run that has diverged, or has learned nothing, ends with status 1 and without final/."""

from typing import Any

import pytest
import torch

from lightning_rlhf.core.results import PairScores
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import RewardModule, SFTModule

from .conftest import Workplace, given

ONE_STEP = {"sft": "sft.epochs=0.125", "rm": "rm.epochs=0.125", "ppo": "ppo.iterations=1"}
"""Of the 32 rows of SFT and RM, a batch of 4."""


def command(place: Workplace, stage: str, *more: str) -> list[str]:
    parents = {"sft": [], "rm": given(place)[:1], "ppo": given(place)}[stage]
    return [f"stage={stage}", "run=away", *parents, *more]


def has_final(place: Workplace, stage: str) -> bool:
    return (place.stage(stage, "away") / "final").exists()


def infinite_weights(stage: str) -> tuple[str, ...]:
    """Overrides with which Adam's first step, of about the learning rate, leaves fp32."""
    return (f"{stage}.lr=1e39", f"{stage}.lr_schedule=constant", f"{stage}.warmup_fraction=0")


def test_an_evaluation_that_is_not_finite_ends_the_run(finished: Workplace) -> None:
    """In the middle of the run; its checkpoint, of the same weights, is not gone on from."""
    failed = command(
        finished, "sft", *infinite_weights("sft"), "sft.val_every=2", "sft.max_nonfinite=5"
    )
    error = finished.mini(*failed).error
    assert error.startswith("sft has diverged: after step 2, eval/loss is nan")
    assert "(overwrite=true or run=NAME) with a smaller sft.lr" in error
    error = finished.mini(*failed, "resume=true").error
    assert "of its weights hold numbers that are NaN or infinite" in error
    assert not has_final(finished, "sft")


def test_weights_that_no_evaluation_shows_are_looked_at(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fine(self: RewardModule, *_: Any) -> PairScores:
        return PairScores(chosen=torch.ones(1), rejected=torch.zeros(1))

    monkeypatch.setattr(RewardModule, "validation_step", fine)
    failed = command(finished, "rm", *infinite_weights("rm"), ONE_STEP["rm"])
    error = finished.mini(*failed).error
    assert error.startswith("rm has diverged: after step 1, ")
    assert "trained parameters are NaN or infinite (the first: roles." in error
    assert "with a smaller rm.lr" in error
    assert not has_final(finished, "rm")


@pytest.mark.parametrize(
    ("stage", "count", "resumed"), [("sft", 1, ["false", "true"]), ("ppo", 4, ["false"])]
)
def test_a_run_of_which_every_update_was_refused(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch, stage: str, count: int, resumed: list[str]
) -> None:
    """Fewer than max_nonfinite of them, 5, so that none of them ends the run."""
    owner, name = {"sft": (SFTModule, "scores"), "ppo": (PPOModule, "policy_losses")}[stage]
    original = getattr(owner, name)

    def spoil(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        if not torch.is_grad_enabled():
            return found
        if isinstance(found, tuple):
            return tuple(x * torch.nan for x in found)
        return found.losses * torch.nan if stage == "ppo" else found * torch.nan

    monkeypatch.setattr(owner, name, spoil)
    failed = command(finished, stage, ONE_STEP[stage])
    for resume in resumed:
        error = finished.mini(*failed, f"resume={resume}").error
        none = f"none of its updates was made ({count} with a loss or gradient that is not finite)"
        assert error.startswith(f"{stage} has learned nothing, and writes no final/: {none}. No up")
        assert not has_final(finished, stage)
