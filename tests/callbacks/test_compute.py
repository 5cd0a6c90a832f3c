from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_rlhf.callbacks.compute import CountedRows, compute_line, peak_memory, sum_of
from lightning_rlhf.callbacks.loggers import MetricsFile
from lightning_rlhf.callbacks.metrics import PPOMetrics, StepMetrics

from .conftest import FakePPO, FakeReward, FakeSFT, Fit
from .test_metric_callbacks import SaveAt, column


def test_totals_add_up_and_memory_is_the_largest() -> None:
    rows, more = CountedRows(), {"generated_tokens": 4, "scored_tokens": 12}
    more |= {"trained_tokens": 6, "flops": 6e15, "device_s": 4.5}
    rows.count(more, 7_000)
    assert rows.count(more, 5_000) == {
        "compute/generated_tokens": 8,
        "compute/scored_tokens": 24,
        "compute/trained_tokens": 12,
        "compute/flops": 12e15,
        "compute/device_s": 9.0,
        "compute/peak_memory": 7_000,
    }
    assert compute_line(rows.totals) == (
        "compute: tokens 8 generated, 24 scored, 12 trained; 12 PFLOP; 9.0 device seconds; "
        "peak memory 7.0 kB"
    )


def test_the_totals_of_a_recipe_are_those_of_its_stages() -> None:
    sft = {"compute/trained_tokens": 5.0, "compute/flops": 1e15, "compute/device_s": 2.0,
           "compute/peak_memory": 9_000.0, "eval/loss": 1.0}  # fmt: skip
    ppo = sft | {"compute/generated_tokens": 3.0, "compute/peak_memory": 7_000.0}
    total = sum_of([sft, ppo])
    assert compute_line(total, " of sft, ppo") == (
        "compute of sft, ppo: tokens 3 generated, 10 trained; 2 PFLOP; 4.0 device seconds; "
        "peak memory 9.0 kB"
    )


@pytest.mark.parametrize(("module", "metrics"), [(FakeSFT, StepMetrics), (FakeReward, StepMetrics)])
def test_a_supervised_run_counts_and_goes_on_with_its_totals(
    fit: Fit, tmp_path: Path, module: type[FakeSFT], metrics: type[StepMetrics]
) -> None:
    """A row every second step; a step has 100 operations and 7 tokens, and takes half a second."""
    checkpoint = tmp_path / "three.ckpt"
    run = partial(fit, batches=6, log_every_n_steps=2)
    run(module(), [metrics(), SaveAt(3, checkpoint)], [MetricsFile(tmp_path)])
    whole = column(tmp_path, "compute/flops")
    assert whole == {2: 200.0, 4: 400.0, 6: 600.0}
    assert column(tmp_path, "compute/trained_tokens")[6] == 42.0
    assert column(tmp_path, "compute/device_s")[6] == 3.0
    assert column(tmp_path, "compute/peak_memory")[6] > 1e7
    run(module(), [metrics()], [MetricsFile(tmp_path)], ckpt_path=checkpoint)
    assert column(tmp_path, "compute/flops") == whole


def test_the_peak_of_this_process_counts_a_large_tensor() -> None:
    found = peak_memory(torch.device("cpu"))
    held = torch.ones(max(found // 4, 1) + 2**22)  # larger than all that was, by 16 MB
    assert peak_memory(torch.device("cpu")) >= found + 2**23
    del held
    assert peak_memory(torch.device("cpu")) >= found + 2**23


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_the_peak_is_not_that_of_the_process_which_started_this_one() -> None:
    large = torch.ones(2**28)  # 1.07 GB, which ru_maxrss of a child starts at
    code = (
        "import torch; from lightning_rlhf.callbacks.compute import peak_memory;"
        "print(peak_memory(torch.device('cpu')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1e7 < int(found.stdout) < large.nbytes


def test_a_resumed_run_goes_on_with_the_totals(fit: Fit, tmp_path: Path) -> None:
    # An iteration of FakePPO: 10 + 20 + 30 operations, 4 tokens sampled, 2 + 1 + 1 seconds.
    checkpoint = tmp_path / "three.ckpt"
    fit(FakePPO(), [PPOMetrics(), SaveAt(3, checkpoint)], [MetricsFile(tmp_path)], batches=6)
    whole = column(tmp_path, "compute/flops")
    assert whole == {k: 60.0 * k for k in range(1, 7)}
    fit(FakePPO(), [PPOMetrics()], [MetricsFile(tmp_path)], batches=6, ckpt_path=checkpoint)
    assert column(tmp_path, "compute/flops") == whole
    assert column(tmp_path, "compute/generated_tokens")[6] == 24.0
    assert column(tmp_path, "compute/device_s")[6] == 24.0
