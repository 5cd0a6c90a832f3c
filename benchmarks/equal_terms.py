"""Compare the estimators of stage=ppo with each other, and with TRL's PPO, on equal terms.

    .venv-parity/bin/python benchmarks/equal_terms.py [--tasks NAME ...] [--sides NAME ...]
        [--seeds 0 1 2 3 4] [--runs FOLDER] [--jobs 1] [--table]

All sides start from the SFT model of their seed and learn from the same prompts and reward, with as
many responses; dapo samples further ones for groups of equal scores. A run that has finished is not
repeated, nor one of ours in results/equal_terms.json, of whatever commit; an interrupted one of
ours goes on, and TRL's starts over: the same command continues, seed by seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from common import ROOT, calm, circumstances, markdown_table
from lightning_rlhf.cli.recipe import read_recipe, step_overrides
from lightning_rlhf.core.metrics import GOLD, HELD_OUT, HELD_OUT_KL
from lightning_rlhf.evaluation.compare import at_kl, common_kls, over_seeds
from lightning_rlhf.report.curves import KL_AXIS, PALETTE, Curves, joined, points
from lightning_rlhf.runs.console import RECIPES
from lightning_rlhf.runs.measured import read_metrics

BASELINE, TRL = "gae", "trl"
SIDES: Mapping[str, Sequence[str]] = {
    BASELINE: (),
    "grpo": ("advantage=grpo",),
    "rloo": ("advantage=rloo",),
    "dapo": ("advantage=grpo", "policy_loss=dapo"),
    "gspo": ("advantage=grpo", "policy_loss=gspo"),
    "reinforce++": ("advantage=reinforce++",),
    TRL: (),
}
"""Name of a side -> overrides of stage=ppo."""
TASKS = {"quickstart": 100, "arithmetic": 120}
"""Recipe -> iterations of a run; all sides of a seed share the models of the stages before ppo."""
RESULTS = Path("benchmarks/results")
TUNING_SEED = 100
RATES = {"quickstart": (3e-4, 1e-3, 3e-3), "arithmetic": (1e-4, 3e-4, 1e-3)}
"""Recipe -> learning rates of TRL's grid; arithmetic trains all weights, not an adapter."""
VALUE_FACTORS = (1.0, 3.0)
EVALUATIONS = 10  # of a run, besides the first one
PROCESSOR_S, KL_COEF = "time/processor_s", "update/kl_coef"
LABELS = {HELD_OUT: "reward", GOLD: "gold score"}
Runs = Mapping[str, Mapping[int, Curves]]
"""Side -> seed -> metrics of its run."""


class ProcessorTime(Callback):
    """A callback that logs the seconds of processor time of each iteration, of one thread.

    Unlike the time on the clock they hardly depend on what else the machine does.
    """

    def on_train_batch_start(self, *_: Any) -> None:
        self.started = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        spent = {PROCESSOR_S: time.process_time() - self.started}
        trainer.logger.log_metrics(spent, step=module.iteration)  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of stage=ppo, ours or TRL's."""

    task: str
    side: str
    seed: int
    runs: Path
    """Folder of all runs."""
    rates: tuple[float, float] | None = None
    """Learning rate of TRL's policy, and the ratio of its critic's to it; None for ours."""

    @property
    def name(self) -> str:
        return "_".join([self.side, *(f"{rate:g}" for rate in self.rates or ())])

    @property
    def place(self) -> Path:
        """Return the folder of the seed's runs."""
        return self.runs / f"{self.task}_s{self.seed}" / "tiny"

    @property
    def curves(self) -> Curves | None:
        """Return the metrics of the run; None unless it has finished: TRL's writes them then.

        Those of a run whose folder is not there are read from the results, unless it has rates.
        """
        last = self.place / self.name / "ppo" / ("metrics.csv" if self.side == TRL else "final")
        if last.exists():
            return read_metrics(last.parent)
        curves: Curves | None = kept().get(self.task, {}).get(self.side, {}).get(str(self.seed))
        return None if self.rates else curves

    def words(self, stage: str) -> list[str]:
        """Return the overrides of a stage: those of the recipe, and of the side."""
        given = [f"run={self.place.parent.name}", f"seed={self.seed}", f"outputs={self.runs}"]
        given += ["samples=false", "trainer=cpu"]
        count = TASKS[self.task]
        every = f"ppo.val_every={count // EVALUATIONS}"
        own = [f"ppo.iterations={count}", every, *SIDES[self.side]]
        given, job = ([*given, *own], self.name) if stage == "ppo" else (given, None)
        return [*step_overrides(read_recipe(RECIPES / self.task), stage, given, job)]

    def make(self, stage: str) -> bool:
        """Make a stage, or go on with it, unless its model is there; return whether it is now."""
        name, words = self.name if stage == "ppo" else stage, self.words(stage)
        if stage == "ppo" and self.rates is not None:
            place = str(self.place / name / stage)
            words = ["benchmarks/equal_terms_trl.py", place, *map(str, self.rates), *words]
        else:
            clock = ["callbacks.clock._target_=equal_terms.ProcessorTime"] * (stage == "ppo")
            words = ["train.py", *words, "resume=auto", *clock]
        if stage != "ppo" and (self.place / stage / "final").exists():
            return True
        log, started = self.place / "logs" / f"{name}.txt", time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks")))
        with log.open("a") as file:
            done = not subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
                stdout=file, stderr=subprocess.STDOUT,
            ).returncode  # fmt: skip
        told = f"{time.perf_counter() - started:.0f} s" if done else f"failed, see {log}"
        print(f"{self.task} seed {self.seed} {name}: {told}", flush=True)
        return done


def kept() -> dict[str, Any]:
    """Return the numbers of the runs in the results: task -> side -> seed -> metrics."""
    found: dict[str, Any] = json.loads((ROOT / RESULTS / "equal_terms.json").read_text())
    return found


def make(jobs: Sequence[Job], workers: int) -> None:
    """Make the models that the jobs of one seed start from, then the runs."""
    stages = read_recipe(RECIPES / jobs[0].task).stages
    with ThreadPoolExecutor(workers) as pool:
        if all(map(jobs[0].make, stages[: stages.index("ppo")])):
            list(pool.map(Job.make, jobs, itertools.repeat("ppo")))


def seconds(curves: Curves) -> dict[int, float]:
    """Return step -> processor time of the iterations so far, from step 0 on."""
    steps, spent = curves[PROCESSOR_S]
    return dict(zip([0, *steps], [0.0, *itertools.accumulate(spent)], strict=True))


def measures(curves: Curves, limit: float, kls: Sequence[float]) -> dict[str, float]:
    """Return the columns of a run in the tables.

    limit: the equal time, in seconds. kls: values of the KL, over which the reward is averaged.
    Between evaluations all numbers are linear.
    """
    spent = seconds(curves)
    found = {"seconds": max(spent.values()), "KL at the end": curves[HELD_OUT_KL][1][-1]}
    for metric, label in LABELS.items():
        if known := points(curves, metric):
            steps, values = zip(*known, strict=True)
            path = joined(curves, HELD_OUT_KL, metric)
            found[f"{label} at the end"] = values[-1]
            times = [spent[step] for step in steps]
            found[f"{label} after {limit:.0f} s"] = float(np.interp(limit, times, values))
            found[f"{label} at equal KL"] = fmean(at_kl(path, kl) for kl in kls)
    return found


def tables(runs: Runs) -> Iterator[str]:
    """Yield a table of means over seeds, and one of differences to the baseline, paired by seed.

    The equal time is that of the shortest run. The equal KLs reach as far as all runs do, and in
    the second table as far as those of the side and the baseline.
    """
    limit = min(max(seconds(x).values()) for own in runs.values() for x in own.values())

    def measured(some: Iterable[str]) -> tuple[float, list[dict[int, dict[str, float]]]]:
        own = [runs[side] for side in some]
        kls = common_kls([joined(x, HELD_OUT_KL, HELD_OUT) for one in own for x in one.values()])
        return max(kls), [{s: measures(x, limit, kls) for s, x in one.items()} for one in own]

    most, found = measured(runs)
    columns = list(next(iter(found[0].values())))
    rows = []
    for side, one in zip(runs, found, strict=True):
        cells = (over_seeds([run[c] for run in one.values()]) for c in columns)
        rows.append([side, str(len(one)), f"{most:.2f}", *cells])
    yield markdown_table(["side", "seeds", "equal KL up to", *columns], rows)
    rows = []
    for side in (side for side in runs if side != BASELINE and {*runs[side]} & {*runs[BASELINE]}):
        most, (one, base) = measured((side, BASELINE))
        both = [seed for seed in one if seed in base]
        cells = (over_seeds([one[seed][c] - base[seed][c] for seed in both]) for c in columns)
        rows.append([f"{side} - {BASELINE}", str(len(both)), f"{most:.2f}", *cells])
    yield markdown_table(["difference", "seeds", "equal KL up to", *columns], rows)


def draw(tasks: Mapping[str, Runs], path: Path) -> None:
    """Plot the means over seeds against episodes and against KL, with a row of plots for a task."""
    figure = Figure(figsize=(12.8, 3.9 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), 3, squeeze=False)
    for (task, runs), row in zip(tasks.items(), grid, strict=True):
        plots = (("", HELD_OUT), (HELD_OUT_KL, HELD_OUT), (HELD_OUT_KL, GOLD))
        for axes, (x, metric) in zip(row, plots, strict=True):
            axes.set(title=f"{task}: {LABELS[metric]}", xlabel=KL_AXIS if x else "iteration")
            axes.grid(color="#e6e6e6")
            axes.spines[["top", "right"]].set_visible(False)
            for (side, own), color in zip(runs.items(), PALETTE, strict=False):
                curves = own.values()
                lines = [joined(c, x, metric) if x else points(c, metric) for c in curves]
                if all(lines):
                    axes.plot(*np.mean(lines, axis=0).T, color=color, label=side, marker=".")
            axes.set_visible(axes.has_data())
        row[0].legend(frameon=False)
    figure.savefig(path, dpi=90)


def tuned(grid: Sequence[Job]) -> tuple[tuple[float, float] | None, str]:
    """Return the best rates of TRL's grid, None before all of it is there, and its table.

    The best ones have the largest objective of PPO, reward - kl_coef * KL, on held-out prompts.
    """
    rows, ends = [], dict[Any, float]()
    for job in grid:
        if (curves := job.curves) is not None:
            reward, kl, price = (curves[m][1][-1] for m in (HELD_OUT, HELD_OUT_KL, KL_COEF))
            ends[job.rates] = reward - price * kl
            cells = (f"{number:.3f}" for number in (reward, kl, ends[job.rates]))
            rows.append([" x ".join(f"{rate:g}" for rate in job.rates or ()), *cells])
    best = max(ends, key=lambda rates: ends[rates]) if len(ends) == len(grid) else None
    header = ["lr x critic's factor", "reward", "KL", "reward - kl_coef KL"]
    return best, markdown_table(header, rows)


def write(tasks: Mapping[str, Runs], grids: Mapping[str, str], args: argparse.Namespace) -> None:
    """Write the tables, the picture, and the numbers of all runs."""
    facts = circumstances()
    lines = [
        "# Estimators, and TRL's PPO, on equal terms",
        f"Tables of {facts['date']}, commit {facts['commit']}; "
        f"{facts['machine']}; {facts['versions']}.",
        "Every run starts from the SFT model of its seed, with the values "
        "of the recipe and of conf/. All numbers are of held-out prompts: means over seeds with "
        "95% t-intervals; differences are paired by seed. Seconds are processor time of one thread "
        "without evaluations. The equal time is that of the shortest run: a side that takes longer "
        "is read in the middle of its schedule. At equal KL, the reward is averaged over five "
        "values of the KL at equal distances up to the one in the table, where a run first reaches "
        "them.",
    ]
    best = f"TRL has the best rates by the last column of seed {TUNING_SEED}:"
    for task, runs in tasks.items():
        lines += [
            f"## {task}, {TASKS[task]} iterations",
            *tables(runs),
            *([best, grids[task]] if TRL in runs else []),
        ]
    args.out.mkdir(parents=True, exist_ok=True)
    metrics = (HELD_OUT, HELD_OUT_KL, GOLD, PROCESSOR_S)
    content = kept()  # with runs of tasks, sides and seeds that were not asked for
    for task, side in ((task, side) for task, runs in tasks.items() for side in runs):
        own = content.setdefault(task, {}).setdefault(side, {})
        for seed, x in tasks[task][side].items():
            own[str(seed)] = {m: x[m] for m in metrics if m in x}
    (args.out / "equal_terms.json").write_text(json.dumps(content) + "\n")
    draw(tasks, args.out / "equal_terms.png")
    text = "\n\n".join([*lines, "![learning curves](equal_terms.png)"]) + "\n"
    (args.out / "equal_terms.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "equal_terms")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at once")
    parser.add_argument("--table", action="store_true", help="write the tables of what is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if BASELINE not in args.sides:
        parser.error(f"--sides needs {BASELINE}, which the others are compared with")
    calm()
    jobs, grids = list[Job](), dict[str, str]()
    runs = args.runs.resolve()
    own = [side for side in args.sides if side != TRL]

    def made(some: Sequence[Job]) -> Sequence[Job]:
        todo = [] if args.table else [job for job in some if job.curves is None]
        if todo:
            make(todo, args.jobs)
        return some

    for seed, task in itertools.product(args.seeds, args.tasks):
        jobs += made([Job(task=task, side=side, seed=seed, runs=runs) for side in own])
    for task in args.tasks if TRL in args.sides else ():
        base = Job(task=task, side=TRL, seed=TUNING_SEED, runs=runs)
        grid = [replace(base, rates=x) for x in itertools.product(RATES[task], VALUE_FACTORS)]
        rates, grids[task] = tuned(made(grid))
        for seed in args.seeds if rates else ():
            jobs += made([replace(base, seed=seed, rates=rates)])
    found: dict[str, dict[str, dict[int, Curves]]] = {}
    for job in jobs:
        if (curves := job.curves) is not None:
            found.setdefault(job.task, {}).setdefault(job.side, {})[job.seed] = curves
    if not (tasks := {task: runs for task, runs in found.items() if BASELINE in runs}):
        raise SystemExit(f"no run of {BASELINE} has finished")
    write(tasks, grids, args)


if __name__ == "__main__":
    main()
