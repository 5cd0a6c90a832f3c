"""Measure how the time of a rollout and of an update grows with the sizes of their inputs.

python benchmarks/scaling.py [--quick] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from common import markdown_table
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.modules.ppo import TRAINING
from machine import in_turn, middle, options, write
from workloads import (
    Workload,
    build_module,
    experience_of,
    parameters,
    prompts_of,
    within_fit,
)

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BASE = Workload(episodes=16, response=32)
MICROBATCH = 8
PHASES = ("rollout", "update")
AXES: dict[str, dict[int, Workload]] = {
    "response tokens": {n: replace(BASE, response=n) for n in (16, 32, 64, 128)},
    "responses": {n: replace(BASE, episodes=n) for n in (8, 16, 32, 64)},
    "vocabulary": {n: replace(BASE, vocabulary=n) for n in (1024, 4096, 16384, 65536)},
    "hidden size": {
        n: replace(BASE, hidden=n, intermediate=n * 11 // 4) for n in (64, 128, 256, 512)
    },
}


def measure(workload: Workload, repeats: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds of a rollout and of an update."""
    module = build_module(workload, device, microbatch_size=MICROBATCH)

    def work(prompts: Prompts) -> dict[str, list[float]]:
        experience = experience_of(module, prompts)
        works = {
            "rollout": lambda: module.collector.roll_out(prompts, module.generator(TRAINING, 0)),
            "update": lambda: module.update(experience),
        }
        return in_turn(works, repeats, device)

    found = within_fit(module, prompts_of(workload), device, work)
    return {"parameters": parameters(workload), "seconds": found}


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Return the slope of a line through the logarithms, 1 if twice the size takes twice the time.

    It is the least-squares fit of log(time) against log(size).
    """
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def medians(points: dict[int, Any], phase: str) -> list[float]:
    return [statistics.median(point["seconds"][phase]) for point in points.values()]


def tables(results: dict[str, dict[int, Any]]) -> list[str]:
    """Return the table of slopes and the table of all points."""
    slopes, rows = [], []
    for axis, points in results.items():
        sizes = list(points)
        over = {axis: sizes}
        if axis == "hidden size":
            over["parameters"] = [point["parameters"] for point in points.values()]
        for name, numbers in over.items():
            span = f"{numbers[0]}-{numbers[-1]}"
            ends = [slope(numbers[-2:], medians(points, phase)[-2:]) for phase in PHASES]
            fits = [slope(numbers, medians(points, phase)) for phase in PHASES]
            slopes.append([name, span, *(f"{x:.2f}" for x in (*fits, *ends))])
        for size, point in points.items():
            cells = [middle(point["seconds"][phase]) for phase in PHASES]
            rows.append([f"{axis} {size}", f"{point['parameters'] / 1e6:.2f}M", *cells])
    header = ["against", "from-to", "rollout, slope", "update, slope",
              "rollout, last two points", "update, last two points"]  # fmt: skip
    return [
        markdown_table(header, slopes),
        markdown_table(["point", "model", "rollout, s", "update, s"], rows),
    ]


def draw(results: dict[str, dict[int, Any]], path: Path) -> None:
    """Draw one log-log plot for each varied size, with a line of slope 1 for comparison."""
    figure, panels = plt.subplots(1, len(results), figsize=(3.4 * len(results), 3.2), sharey=True)
    for panel, (axis, points) in zip(np.atleast_1d(panels), results.items(), strict=True):
        sizes = np.array(list(points), dtype=float)
        for phase in PHASES:
            times = medians(points, phase)
            panel.loglog(
                sizes, times, "o-", label=f"{phase}, slope {slope(list(points), times):.2f}"
            )
        panel.loglog(sizes, times[0] * sizes / sizes[0], ":", color="grey", label="slope 1")
        panel.set_xlabel(axis)
        panel.set_xticks(sizes, [str(int(size)) for size in sizes])
        panel.minorticks_off()
        panel.legend(fontsize=7)
    np.atleast_1d(panels)[0].set_ylabel("seconds")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(args: argparse.Namespace) -> dict[str, dict[int, Any]]:
    repeats = 1 if args.quick else 3
    results: dict[str, dict[int, Any]] = {}
    for axis, points in AXES.items():
        sizes = list(points)[:2] if args.quick else list(points)
        results[axis] = {n: measure(points[n], repeats, args.device) for n in sizes}
    return results


def main() -> None:
    args = options(str(__doc__))
    results = run(args)
    suffix = "" if args.device.type == "cpu" else f"_{args.device.type}"
    draw(results, args.out / f"scaling{suffix}.png")
    slopes, points = tables(results)
    write(
        args,
        "scaling",
        "How cost grows",
        results,
        f"Rollout and update of {BASE.episodes} responses of {BASE.response} tokens to prompts of "
        f"16 to 32, {BASE.layers} layers of width {BASE.hidden}, vocabulary {BASE.vocabulary}, "
        f"micro-batches of {MICROBATCH}; one of these changes at a time. The slope is that of a "
        "straight line through the logarithms: 1 where twice the size takes twice the time, less "
        "where a fixed cost is still paid off.",
        slopes,
        f"![Seconds against sizes, logarithmic](scaling{suffix}.png)",
        points,
    )


if __name__ == "__main__":
    main()
