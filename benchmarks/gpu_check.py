"""Check this package on the GPUs of this machine, in at most ten minutes, and print one table.

    make gpu-check                                  or
    python benchmarks/gpu_check.py [--minutes 10] [--only NAME ...] [--folder FOLDER]

Rows (gpu_rows.py) are independent of each other: one that fails says why, and the next one is run.
They share a process with one GPU, which is replaced where a row damages it or takes too long.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from common import ROOT, markdown_table
from gpu_rows import ROWS
from gpu_runs import DTYPE, CheckError, Place, Row
from gpu_worker import Outcome, Worker
from lightning_rlhf.runs.accelerator import BUILT
from machine import circumstances

NEEDED = (
    "a CUDA GPU of about 24 GB, 4 GB of disk and ten minutes; rows of all GPUs need two of them, "
    "and that of vLLM its program (LIGHTNING_RLHF_VLLM=PATH)"
)
LATE = 3
"""Multiple of its usual duration after which a row is ended."""
HEADER = [
    "check", "shape", "GPUs", "result", "equal to the CPU", "tokens/s", "share of compute",
    "share of bandwidth", "peak, GB", "memory by role, GB", "remarks",
]  # fmt: skip


Run = Callable[[Row, float], Outcome]
"""(row, seconds that it may take) -> outcome."""


def check(
    rows: Sequence[Row],
    place: Place,
    run: Run,
    budget: float,
    now: Callable[[], float] = time.monotonic,
    report: Callable[[list[Outcome]], None] = lambda _: None,
) -> list[Outcome]:
    """Run the rows one after another; return an outcome of each.

    Args:
        budget: seconds that all rows may take together.
        now: function that returns the time in seconds.
        report: function that is called with all outcomes after each row.
    """
    start, outcomes = now(), list[Outcome]()
    for row in rows:
        begun = now()
        left = budget - (begun - start)
        reason = obstacle(row, place, left)
        if reason is None:
            outcome = run(row, min(left, LATE * row.seconds))
        else:
            outcome = Outcome(row=row, status="not run", reason=reason)
        outcomes.append(replace(outcome, seconds=now() - begun))
        report(outcomes)
    return outcomes


def obstacle(row: Row, place: Place, left: float) -> str | None:
    """Return why a row is not run, None where it is. left: seconds of the check that are left."""
    missing = [x for x in row.needs if not (which(x) or ("/" not in x and find_spec(x)))]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if row.on_all and place.gpus == 1:
        return "it needs two GPUs"
    return None if left >= row.seconds else "time"


def table(outcomes: Sequence[Outcome], gpus: int) -> str:
    """Return the table of all outcomes; shares are of the limits that the first row measured."""
    limits = next((o.found.limits for o in outcomes if o.found.limits), {})
    rows = []
    for outcome in outcomes:
        row, found = outcome.row, outcome.found
        count = gpus if row.on_all else 1
        compute = count * limits.get(str(DTYPE.get(row.shape)).removeprefix("torch."), 0)
        result = f"{outcome.status}: {outcome.reason}" if outcome.reason else outcome.status
        rows.append([
            row.name, row.shape, str(count), result,
            found.equality, listed(found.tokens_per_s, 1, ",.0f"),
            listed(found.flops_per_s, compute, ".1%"),
            listed(found.bytes_per_s, count * limits.get("memory", 0), ".1%"),
            f"{found.peak_bytes / 1e9:.2f}" if found.peak_bytes else "",
            listed(found.roles, 1e9, ".3f"), found.note,
        ])  # fmt: skip
    return markdown_table(HEADER, [[cell.replace("|", "/") for cell in row] for row in rows])


def listed(numbers: Any, unit: float, form: str) -> str:
    """Return named numbers in a unit as the text of a cell; nothing where the unit is unknown."""
    return ", ".join(f"{name} {x / unit:{form}}" for name, x in numbers.items()) if unit else ""


def report_of(outcomes: Sequence[Outcome], place: Place, minutes: float) -> str:
    """Return the report in Markdown."""
    facts, taken = circumstances(place.device), sum(o.seconds for o in outcomes) / 60
    counts = [
        f"{sum(o.status == s for o in outcomes)} {s}" for s in ("passed", "failed", "not run")
    ]
    limits = next((o.found.limits for o in outcomes if o.found.limits), {})
    units = {name: "TB/s" if name == "memory" else "TFLOP/s" for name in limits}
    return "\n\n".join([
        "# The package on a GPU",
        "{date}, commit {commit}; {machine}; {versions}.".format(**facts),
        f"{', '.join(counts)}, in {taken:.1f} of {minutes:g} minutes, on {place.gpus} GPU(s). "
        "Limits of one GPU: "
        + ", ".join(f"{name} {x / 1e12:.2f} {units[name]}" for name, x in limits.items()),
        table(outcomes, place.gpus),
        "tiny: model=tiny in fp32, whose first step is compared with that of the CPU. 0.8b: "
        "Qwen3.5-0.8B's shape with random weights in bf16. Shares are of a large matrix product "
        "in the same type and of a = b + s c, with the necessary operations and the weights that a "
        "decoded token reads. The first step of each run warms up and is not counted.",
    ]) + "\n"  # fmt: skip


def on_gpu(precision: str) -> dict[str, Any]:
    """Return arguments of lightning.Trainer for the first GPU."""
    return {"accelerator": "gpu", "devices": 1, "precision": precision}


def require_gpu() -> None:
    """Raise CheckError where torch cannot compute on a GPU."""
    if not torch.cuda.is_available():
        step = "see that nvidia-smi shows a GPU, and a driver for this CUDA"
        if torch.version.cuda is None:
            step = "install one for CUDA: benchmarks/README.md#on-a-gpu has the command"
        raise CheckError(f"gpu-check needs {NEEDED}; {BUILT} and finds no GPU; {step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=10.0,
        help="minutes that all rows may take together (default: 10)",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose name begins so")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "outputs" / "gpu_check",
        help="folder of the runs and of log.txt (default: outputs/gpu_check)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results",
        help="folder of the table (default: benchmarks/results)",
    )  # fmt: skip
    args = parser.parse_args()
    try:
        require_gpu()
    except CheckError as error:
        sys.exit(f"error: {error}")
    print(f"gpu-check needs {NEEDED}", flush=True)
    place = Place(
        device=torch.device("cuda", 0), words=("trainer=gpu",), arguments=on_gpu,
        gpus=torch.cuda.device_count(), folder=args.folder.resolve(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )  # fmt: skip
    for folder in (place.folder, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"gpu_check_{torch.cuda.get_device_name().lower().replace(' ', '_')}"

    def report(outcomes: list[Outcome]) -> None:
        last = outcomes[-1]
        print(f"{last.seconds:4.0f} s  {last.row.name}: {last.status} {last.reason}", flush=True)
        found = [asdict(o) | {"row": o.row.name, "shape": o.row.shape} for o in outcomes]
        facts = circumstances(place.device) | {"gpus": place.gpus, "rows": found}
        stem.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
        stem.with_suffix(".md").write_text(report_of(outcomes, place, args.minutes))

    rows = [r for r in ROWS if args.only is None or r.name.startswith(tuple(args.only))]
    worker = Worker(place)
    try:
        outcomes = check(rows, place, worker.run, 60 * args.minutes, report=report)
    finally:
        worker.stop()
    print(f"\n{report_of(outcomes, place, args.minutes)}")
    sys.exit(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    main()
