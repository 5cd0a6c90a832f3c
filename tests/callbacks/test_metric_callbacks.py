"""The rows that callbacks log of training and evaluation, and their totals over resumes."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rlhf.callbacks.compute import compute_line
from lightning_rlhf.callbacks.loggers import MetricsFile, RunTensorBoard
from lightning_rlhf.callbacks.metrics import PPOMetrics, StepMetrics
from lightning_rlhf.callbacks.progress import position
from lightning_rlhf.core.metrics import METRICS
from lightning_rlhf.core.results import RESULT

from .conftest import FakePPO, FakeSFT, Fit


def column(folder: Path, name: str) -> dict[int, float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return {int(r["step"]): float(r[name]) for r in csv.DictReader(file) if r[name]}


def test_ppo_has_a_row_an_iteration_with_every_metric_of_its_training(
    fit: Fit, tmp_path: Path
) -> None:
    trainer = fit(FakePPO(), [PPOMetrics()], [MetricsFile(tmp_path)], batches=3)
    assert trainer.global_step == 6
    assert column(tmp_path, "reward_mean") == {1: 1.5, 2: 2.5, 3: 3.5}
    assert column(tmp_path, "update/lr") == {1: 0.5, 2: 0.5, 3: 0.5}
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    named = {n: m for n, m in METRICS.items() if "<" not in n}  # the others are named by a user
    trained = [n for n, m in named.items() if "ppo" in m.stages and m.phase != "eval"]
    absent = "reward_paid reward_paid_range logprob_gap_mean logprob_gap_max importance_masked "
    for name in f"{absent} groups_alike_first resample_rounds prompts_drawn".split():
        trained.remove(f"rollout/{name}")  # no clip, the sampler is exact, groups stay
    trained.remove("compute/judge_tokens")  # no component is a judge
    assert header == ["step", *trained]


def test_each_of_several_components_has_a_column_and_a_histogram(fit: Fit, tmp_path: Path) -> None:
    fit(FakePPO(("helpful", "short")), [PPOMetrics()],
        [MetricsFile(tmp_path), RunTensorBoard(tmp_path)], batches=2)  # fmt: skip
    # Column k is (k + 1) * (2 + iteration, -1 + iteration): means 1.5 and 2.5 times k + 1.
    assert column(tmp_path, "rollout/reward/helpful") == {1: 1.5, 2: 2.5}
    assert column(tmp_path, "rollout/reward/short") == {1: 3.0, 2: 5.0}
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0}).Reload()
    assert events.Tags()["histograms"] == ["histogram/reward/helpful", "histogram/reward/short"]
    found = events.Histograms("histogram/reward/short")
    assert [event.step for event in found] == [1, 2]
    # Iteration 2: 2 * (4, 1).
    assert (found[1].histogram_value.min, found[1].histogram_value.max) == (2.0, 8.0)


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if position(trainer, pl_module) == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("cut", [None, 3])
def test_the_last_row_covers_as_many_steps_as_the_others(
    fit: Fit, tmp_path: Path, cut: int | None
) -> None:
    # Batch k has k + 1 tokens of loss k. Row 5 has batches 3 and 4: (4 * 3 + 5 * 4) / 9, where
    # batch 4 alone says 4. So it has after a resume.
    options = {"batches": 5, "log_every_n_steps": 2, "limit_val_batches": 0}
    callbacks = [StepMetrics(), SaveAt(cut or 5, tmp_path / "cut.ckpt")]
    fit(FakeSFT(), callbacks, [MetricsFile(tmp_path)], **options)
    if cut is not None:
        resumed = {"ckpt_path": tmp_path / "cut.ckpt", **options}
        fit(FakeSFT(), [StepMetrics()], [MetricsFile(tmp_path)], **resumed)
    assert column(tmp_path, "update/loss") == pytest.approx({2: 2 / 3, 4: 18 / 7, 5: 32 / 9})


class Spoiled(FakeSFT):
    """Batches 1 and 2 give no number, and their updates are not made."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        step = super().training_step(batch, batch_idx)
        is_made = batch_idx not in (1, 2)
        result = step[RESULT]
        loss = result.loss + (0.0 if is_made else math.nan)
        return step | {RESULT: replace(result, is_made=is_made, loss=loss)}


def test_updates_that_were_not_made_are_counted_and_in_no_mean(fit: Fit, tmp_path: Path) -> None:
    # Batch k has loss k; means over more steps are in the next test.
    options = {"batches": 4, "log_every_n_steps": 1}
    fit(Spoiled(), [StepMetrics()], [MetricsFile(tmp_path)], **options)
    losses = {1: 0.0, 2: math.nan, 3: math.nan, 4: 3.0}
    assert column(tmp_path, "update/loss") == pytest.approx(losses, nan_ok=True)
    assert column(tmp_path, "update/nonfinite") == {1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}


def test_what_was_counted_before_a_checkpoint_is_in_the_row_after_it(
    fit: Fit, tmp_path: Path
) -> None:
    # The row of step 4 has batches 0 and 3: (1 * 0 + 4 * 3) / 5. The cut is after batch 1.
    checkpoint, whole, resumed = tmp_path / "two.ckpt", tmp_path / "whole", tmp_path / "resumed"
    for folder, options in ((whole, {}), (resumed, {"ckpt_path": checkpoint})):
        folder.mkdir()
        callbacks = [StepMetrics(), SaveAt(2, checkpoint)]
        loggers = [MetricsFile(folder)]
        fit(Spoiled(), callbacks, loggers, batches=4, log_every_n_steps=4, **options)
        assert column(folder, "update/loss") == {4: pytest.approx(2.4)}
        assert column(folder, "update/nonfinite") == {4: 2.0}
        # A step has 100 operations and 7 tokens, and takes half a second.
        assert column(folder, "compute/flops") == {4: 400.0}
        assert column(folder, "compute/trained_tokens") == {4: 28.0}
        assert column(folder, "compute/device_s") == {4: 2.0}


@pytest.mark.parametrize(("checked", "rows"), [(1, {2}), (-1, {0, 2})])
def test_a_sanity_check_counts_only_if_it_covers_the_validation_set(
    fit: Fit, tmp_path: Path, checked: int, rows: set[int]
) -> None:
    loggers = [MetricsFile(tmp_path)]
    fit(FakeSFT(), [StepMetrics()], loggers, batches=2, num_sanity_val_steps=checked)
    assert set(column(tmp_path, "eval/loss")) == rows


def test_the_totals_of_a_recipe_are_those_of_its_stages() -> None:
    sft = {"compute/trained_tokens": 5.0, "compute/flops": 1e15, "compute/device_s": 2.0}
    sft |= {"compute/peak_memory": 9_000.0, "eval/loss": 1.0}
    ppo = sft | {"compute/generated_tokens": 3.0, "compute/peak_memory": 7_000.0}
    assert compute_line([sft, ppo], " of sft, ppo") == (
        "compute of sft, ppo: tokens 3 generated, 10 trained; 2 PFLOP; 4.0 device seconds; "
        "peak memory 9.0 kB"
    )
