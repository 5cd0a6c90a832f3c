"""How often a run validates, what that changes, and which evaluation is called the best."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_rlhf.core.results import SFTEvaluation
from lightning_rlhf.modules.supervised import SFTModule

from .conftest import Workplace, given, rows, weights

STEPS = {"sft": 6, "rm": 6, "ppo": 3}
METRIC = {"sft": "eval/loss", "rm": "eval/accuracy", "ppo": "eval/reward_mean"}


@pytest.mark.parametrize("stage", STEPS)
def test_a_run_shorter_than_val_every_validates_at_tenths_and_learns_the_same(
    finished: Workplace, cut: Callable[[str, int], None], stage: str, request: pytest.FixtureRequest
) -> None:
    """A tenth of 6 or 3 steps, rounded up, is 1. run=default validated at 2, or at 4."""
    parents = {"sft": [], "rm": given(finished)[:1], "ppo": given(finished)}[stage]
    command = [f"stage={stage}", "run=short", *parents, f"{stage}.val_every=1000"]
    outcome = finished.mini(*command).succeeded
    said = (
        f"validating every 1 step, a tenth of the {STEPS[stage]} of the run: {stage}.val_every is "
        "1000, more than it has"
    )
    assert said in outcome.out
    short, default = finished.stage(stage, "short"), finished.stage(stage)
    names = [name for name in weights(default) if "fingerprint" not in name]
    assert names
    assert {n: weights(short)[n] for n in names} == {n: weights(default)[n] for n in names}
    at = [int(row["step"]) for row in rows(short) if METRIC[stage] in row]
    assert at == [*([0] if stage == "ppo" else []), *range(1, STEPS[stage] + 1)]

    cut("step", 2)
    assert "PowerCut" in finished.mini(*command, "run=cut").err
    request.getfixturevalue("monkeypatch").undo()
    finished.mini(*command, "run=cut", "resume=true").succeeded  # noqa: B018
    assert rows(finished.stage(stage, "cut")) == rows(short)
    assert weights(finished.stage(stage, "cut")) == weights(short)


def test_the_best_evaluation_is_named_with_its_number(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(self: SFTModule, *_: object) -> SFTEvaluation:
        loss = {2: 1.5, 4: 1.25, 6: 2.0}[self.iteration]
        return SFTEvaluation(nll_sum=torch.tensor(2 * loss), tokens=torch.tensor(2))

    monkeypatch.setattr(SFTModule, "validation_step", judged)
    assert (
        "the best evaluation was that of step 4: eval/loss 1.250 (lower is better). final/ is the "
        "last step"
    ) in workplace.mini("stage=sft").succeeded.out
