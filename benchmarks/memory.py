"""Measure the largest tensors of an update, and the memory of an iteration of PPO and of long runs.

python benchmarks/memory.py [--quick] [--device cpu]
"""

from __future__ import annotations

import argparse
import csv
import gc
import multiprocessing
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from common import ROOT, calm, markdown_table
from counting import Memory
from lightning_rlhf.core.records import Prompts
from machine import options, write
from workloads import (
    WORKLOADS,
    Workload,
    build_module,
    experience_of,
    fit,
    parameters,
    prompts_of,
    within_fit,
)

WIDE = Workload(vocabulary=248_320, hidden=64, layers=2, intermediate=128, hybrid=True)
MICROBATCH = 8
LIMIT = 64e6  # bytes
LONG = {"sft": ("sft.epochs", 2.3), "rm": ("rm.epochs", 2.6), "dpo": ("dpo.epochs", 2.7),
        "ppo": ("ppo.iterations", 300)}  # fmt: skip
"""Stage -> key and value of its length: 2,000 steps of the tiny model, 300 iterations."""


def tensors(episodes: int, response: int, device: torch.device) -> dict[str, Any]:
    """Return the bytes of the largest new tensors of update and rollout, and the update's peak."""
    workload = replace(WIDE, episodes=episodes, response=response)
    module = build_module(workload, device, microbatch_size=min(MICROBATCH, episodes))

    def work(prompts: Prompts) -> dict[str, Any]:
        with Memory() as sampling:
            experience = experience_of(module, prompts)
        with Memory() as memory:
            module.update(experience)
        return {
            "largest": memory.largest,
            "shape": memory.largest_shape,
            "peak": memory.peak,
            "all_logits": 4 * int(experience.response_mask.sum()) * workload.vocabulary,
            "largest_sampling": sampling.largest,
            "shape_sampling": sampling.largest_shape,
        }

    found = within_fit(module, prompts_of(workload), device, work)
    return {"episodes": episodes, "response": response} | found


def iteration(name: str, device: torch.device) -> dict[str, float | None]:
    """Run one iteration of PPO in a new process; return its idle and peak memory in MB."""
    context = multiprocessing.get_context("spawn")
    ours, other = context.Pipe()
    process = context.Process(target=alone, args=(name, device, other))
    process.start()
    other.close()
    found: dict[str, float | None] = ours.recv()
    process.join()
    return found


def alone(name: str, device: torch.device, talk: Connection) -> None:
    """Measure one iteration; the main function of the process started by `iteration`."""
    calm()
    workload = WORKLOADS[name]
    module = build_module(workload, device)
    prompts = prompts_of(workload)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        idle: float | None = torch.cuda.memory_allocated(device) / 1e6
    else:
        idle = resident("VmRSS")
        forget_peak()
    fit(module, prompts, device)
    on_device = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if on_device else resident("VmHWM")
    talk.send({"idle_mb": idle, "peak_mb": peak})


def resident(field: str) -> float | None:
    """Return a field of /proc/self/status of this process in MB; None where there is none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else None


def forget_peak() -> None:
    """Reset the kernel's peak of resident memory (VmHWM) to the current use."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def growth(stage: str, share: float, folder: str) -> dict[str, float]:
    """Run a stage of the tiny model; return its steps and its peak after a tenth and at the end.

    share: share of the length in LONG.
    """
    key, length = LONG[stage]
    command = [sys.executable, "train.py", f"stage={stage}", "model=tiny", f"outputs={folder}",
               f"{key}={type(length)(share * length)}"]  # fmt: skip
    command += ["reward.unfit=warn"] if stage == "ppo" else []
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with Path(folder, "default", "tiny", stage, "metrics.csv").open() as file:
        found = [(int(r["step"]), r["compute/peak_memory"]) for r in csv.DictReader(file)]
    peaks = {step: float(peak) / 1e6 for step, peak in found if peak}
    steps = max(peaks)
    tenth = max((step for step in peaks if step <= steps / 10), default=min(peaks))
    return {"steps": steps, "tenth_mb": peaks[tenth], "end_mb": peaks[steps]}


def growths(share: float) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        return {stage: growth(stage, share, folder) for stage in LONG}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    sizes = [(2, 16)] if args.quick else [(b, t) for b in (2, 8, 32) for t in (16, 64)]
    names = ["tiny"] if args.quick else ["tiny", "vocab32k", "hybrid", "8m"]
    return {
        "tensors": [tensors(episodes, response, args.device) for episodes, response in sizes],
        "iterations": {
            name: iteration(name, args.device) | {"parameters": parameters(WORKLOADS[name])}
            for name in names
        },
        "growth": growths(0.02 if args.quick else 1) if args.device.type == "cpu" else {},
    }


def tensors_table(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            str(r["episodes"]),
            str(r["response"]),
            f"{r['largest'] / 1e6:.1f}",
            " x ".join(map(str, r["shape"])),
            "yes" if r["largest"] <= LIMIT else "no",
            f"{r['peak'] / 1e6:.0f}",
            f"{r['all_logits'] / 1e6:.0f}",
            f"{r['largest_sampling'] / 1e6:.1f}",
            " x ".join(map(str, r["shape_sampling"])),
        ]
        for r in results
    ]
    header = ["responses", "tokens each", "largest tensor of the update, MB", "its shape",
              "within 64 MB", "peak of the update, MB", "all logits at once would be, MB",
              "largest tensor of rollout and score, MB", "its shape"]  # fmt: skip
    return markdown_table(header, rows)


def iterations_table(results: dict[str, Any]) -> str:
    rows = []
    for name, found in results.items():
        idle, peak = found["idle_mb"], found["peak_mb"]
        known = idle is not None and peak is not None
        above = f"{peak - idle:.0f}" if known else "-"
        rows.append([name, f"{found['parameters'] / 1e6:.2f}M", above])
    return markdown_table(["workload", "model", "MB above idle"], rows)


def growth_table(results: dict[str, dict[str, float]]) -> str:
    rows = [
        [stage, f"{r['steps']:,}", f"{r['tenth_mb']:.0f}", f"{r['end_mb']:.0f}",
         f"{r['end_mb'] / r['tenth_mb'] - 1:.1%}"]
        for stage, r in results.items()
    ]  # fmt: skip
    header = ["stage", "steps", "MB after a tenth", "MB at the end", "growth"]
    return markdown_table(header, rows)


def main() -> None:
    args = options(str(__doc__))
    results = measure(args)
    write(
        args,
        "memory",
        "Memory of an update",
        results,
        f"New tensors in one update with Qwen3.5's vocabulary of {WIDE.vocabulary} on a thin model "
        f"(hidden size {WIDE.hidden}), micro-batches of at most {MICROBATCH}, seen operation "
        "by operation: the largest, and the most bytes alive together.",
        tensors_table(results["tensors"]),
        "One whole iteration (rollout, score, one update of 32 responses of 48 tokens in one "
        "micro-batch) in a process of its own: the largest resident set, started anew after the "
        "imports and the model, less the resident set at that moment; on a GPU, the same of what "
        "torch has allocated.",
        iterations_table(results["iterations"]),
        "Long runs of the tiny model on texts of varied lengths, on a CPU: the largest resident "
        "set of the process so far.",
        growth_table(results["growth"]),
    )


if __name__ == "__main__":
    main()
