"""Measure the machine's rates of matrix products and memory.

    python benchmarks/machine.py [--quick] [--device cpu]

Each rate is the best of several trials, so that other load on the machine affects it least.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from common import calm, commit, markdown_table, processor
from lightning_rlhf.kernels.layers import linear
from workloads import WORKLOADS, Workload

LIBRARIES = ("torch", "transformers", "peft", "lightning")
ROWS = 2048  # number of tokens in an update of 32 episodes
LORA_RANK = 16
DTYPES = (torch.float32, torch.bfloat16)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SQUARE = (2048, 2048, 2048)
Shape = tuple[int, int, int]
"""Rows, inner size and columns of a matrix product."""


def options(doc: str, *own: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the command line options of a benchmark: quick, device, clock and out.

    Also applies `common.calm` and selects the clock.

    doc: module docstring, whose first line is the description.
    own: parsers, made with add_help=False, of further options.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], parents=own)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda"
    )
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: of this process alone, for one thread on a machine that has other work too",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results",
        help="folder of the results (default: benchmarks/results)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.clock == "cpu" and args.device.type != "cpu":
        parser.error("--clock cpu does not see what another device does")
    calm()
    Clock.read = staticmethod(CLOCKS[args.clock])
    return args


class Clock:
    """The clock selected by `--clock`."""

    read: Callable[[], float] = staticmethod(time.perf_counter)
    """Function that returns the time in seconds."""


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, until the device has finished."""
    settle(device)
    started = Clock.read()
    work()
    settle(device)
    return Clock.read() - started


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(
    works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of each work in each of `repeats` rounds, after one warm-up round.

    The works alternate within a round, so that other load on the machine affects all of them.
    """
    for work in works.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        gc.collect()
        for name, work in works.items():
            found[name].append(seconds(work, device))
    return found


def middle(numbers: Sequence[float], form: str = ".3f") -> str:
    """Return the median with the smallest and the largest number, as text."""
    low, high = min(numbers), max(numbers)
    return f"{statistics.median(numbers):{form}} [{low:{form}}-{high:{form}}]"


def product_rate(shape: Shape, dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Return GFLOP/s of x @ w.T by the faster library: the best trial within `budget` seconds."""
    rows, inner, columns = shape
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    w = torch.randn(columns, inner, device=device, dtype=dtype)
    best = fastest(lambda: linear(x, w), device, budget)
    return 2 * rows * inner * columns / best / 1e9


def bandwidth(device: torch.device, budget: float) -> float:
    """Return GB/s of a = b + s c on arrays larger than the caches: two are read, one is written."""
    size = 2**28 if device.type == "cuda" else 2**25
    a, b, c = (torch.ones(size, device=device) for _ in range(3))
    best = fastest(lambda: torch.add(b, c, alpha=2.0, out=a), device, budget)
    return 3 * 4 * size / best / 1e9


def fastest(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the seconds of the fastest of at least three trials, after one warm-up trial.

    budget: total seconds of the trials.
    """
    work()
    found: list[float] = []
    while len(found) < 3 or sum(found) < budget:
        found.append(seconds(work, device))
    return min(found)


def products(workload: Workload) -> dict[str, Shape]:
    """Return the shapes of the matrix products of one layer, its adapter and the output layer.

    They are those of ROWS tokens, except for decoding: one token per episode.
    """
    hidden, inner = workload.hidden, workload.intermediate
    return {
        "attention": (ROWS, hidden, hidden),
        "up": (ROWS, hidden, inner),
        "down": (ROWS, inner, hidden),
        "adapter in": (ROWS, hidden, LORA_RANK),
        "adapter out": (ROWS, LORA_RANK, hidden),
        "output": (ROWS, hidden, workload.vocabulary),
        "decoding": (workload.episodes, hidden, hidden),
    }


def rates(device: torch.device, quick: bool) -> dict[str, Any]:
    """Return GFLOP/s of matrix products, and GB/s of memory."""
    budget = 0.02 if quick else 0.15
    shapes = {"square": SQUARE} | {
        f"{name}, {part}": shape
        for name in ("tiny", "8m", "vocab32k")
        for part, shape in products(WORKLOADS[name]).items()
        if name != "vocab32k" or part == "output"
    }
    found = {
        name: {"shape": shape}
        | {str(t)[6:]: product_rate(shape, t, device, budget) for t in DTYPES}
        for name, shape in shapes.items()
    }
    return {"products": found, "gigabytes_per_s": bandwidth(device, budget)}


def best_rate(found: Mapping[str, Any], dtype: str = "float32") -> float:
    """Return GFLOP/s of the fastest product."""
    return max(row[dtype] for row in found["products"].values())


def rates_table(found: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            " x ".join(map(str, row["shape"])),
            f"{row['float32']:.1f}",
            f"{row['bfloat16']:.1f}",
        ]
        for name, row in found["products"].items()
    ]
    header = ["matrix product", "rows x inner x columns", "fp32, GFLOP/s", "bf16, GFLOP/s"]
    return markdown_table(header, rows)


def circumstances(device: torch.device) -> dict[str, str]:
    """Return date, commit, machine and library versions of a measurement on `device`."""
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        machine = f"{processor()}, {os.cpu_count()} cores, {threads} thread(s) used"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": f"{machine}, {platform.system()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        + f", Python {platform.python_version()}",
    }


def write(args: argparse.Namespace, name: str, title: str, results: Any, *paragraphs: str) -> None:
    """Print the report, and write it and all measurements to the results folder `args.out`."""
    facts = circumstances(args.device)
    head = "{date}, commit {commit}; {machine}; {versions}.".format(**facts)
    if args.clock == "cpu":
        head += " Seconds are processor time of one thread; the machine had other work too."
    text = "\n\n".join([f"# {title}", head, *paragraphs]) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    suffix = "" if args.device.type == "cpu" else f"_{args.device.type}"
    everything = json.dumps(
        facts | {"quick": args.quick, "clock": args.clock, "results": results}, indent=1
    )
    (args.out / f"{name}{suffix}.json").write_text(everything + "\n")
    (args.out / f"{name}{suffix}.md").write_text(text)
    print(text)


def main() -> None:
    args = options(str(__doc__))
    found = rates(args.device, args.quick)
    write(
        args,
        "machine",
        "What the machine can do",
        found,
        rates_table(found),
        f"Memory: {found['gigabytes_per_s']:.1f} GB/s (a = b + s c, two arrays read and one "
        "written). All rates are the best of several trials.",
    )


if __name__ == "__main__":
    main()
