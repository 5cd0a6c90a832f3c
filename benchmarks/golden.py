"""Compare the metrics of all recipes between two commits, in every digit.

python benchmarks/golden.py BEFORE [AFTER=HEAD] [--only quickstart bandit] [--seeds 0 1 2]
                            [--cache FOLDER] [--dropped METRIC ...]

Each commit is cloned into a temporary folder and its train.py runs the recipes there, with this
environment. Every CSV file that a recipe leaves (metrics.csv of each stage, steps.csv of the
bandit) is compared cell by cell: as text, or where that differs as numbers, NaN being equal to
NaN. Columns of the machine, compute/* and time/*, are left out. The files are kept by commit in
--cache, so that a commit is run once. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = ("bandit", "composite_reward", "dpo", "rounds", "course", "arithmetic", "online_dpo")
RECIPES = ("quickstart", *OTHERS)
"""Recipes in the order in which they run; --seeds counts for the first alone, the others have 0."""
LEFT_OUT = ("compute/", "time/")
"""Prefixes of the columns that differ between two equal runs."""
ISOLATED = """
import sys
from pathlib import Path
here = str(Path(__file__).parent)
sys.path[:] = [p for p in sys.path if p == here or not (Path(p) / "hydra_plugins").is_dir()
               or Path(p).name == "site-packages"]
"""
"""sitecustomize.py beside a commit's package: the package of an editable install is not seen."""
Table = tuple[list[str], list[list[str]]]
"""Header and rows of a CSV file."""


def git(*words: str) -> str:
    """Return what git prints; exits with git's message where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def results(commit: str, runs: Sequence[tuple[str, int]], cache: Path) -> dict[str, Path]:
    """Return "recipe, seed" -> folder of the CSV files that a commit leaves, run where not kept."""
    found = {f"{recipe}, seed {seed}": cache / commit / f"{recipe}-{seed}" for recipe, seed in runs}
    missing = [run for run, folder in zip(runs, found.values(), strict=True) if not folder.is_dir()]
    if not missing:
        return found
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        clone = Path(name) / "clone"
        git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone))
        subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", commit], check=True)
        (clone / "src" / "sitecustomize.py").write_text(ISOLATED)
        for recipe, seed in missing:
            run_recipe(clone, recipe, seed, cache / commit / f"{recipe}-{seed}")
    return found


def run_recipe(clone: Path, recipe: str, seed: int, kept: Path) -> None:
    """Run one recipe of a clone and keep its CSV files; exits with its output where it fails."""
    began, work = time.monotonic(), clone.parent / f"{recipe}-{seed}"
    work.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(clone / "src"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    words = [str(clone / "train.py"), f"recipe={recipe}", "run=golden", f"seed={seed}"]
    with (work / "log.txt").open("w") as log:
        done = subprocess.run(
            [sys.executable, *words], cwd=work, env=environment, stdout=log, stderr=log
        )
    if done.returncode:
        tail = (work / "log.txt").read_text(errors="replace")[-3000:]
        sys.exit(f"{tail}\nerror: recipe={recipe} seed={seed} ended with {done.returncode}")
    written = kept.with_name(f"{kept.name}.{os.getpid()}")
    for file in sorted((work / "outputs").rglob("*.csv")):
        target = written / file.relative_to(work / "outputs" / "golden")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    written.rename(kept)
    seconds = time.monotonic() - began
    print(f"{kept.parent.name[:12]} {recipe}, seed {seed}: {seconds:.0f} s", flush=True)


def read(file: Path) -> Table:
    """Return header and rows of a CSV file."""
    with file.open(newline="") as lines:
        header, *rows = csv.reader(lines)
    return header, rows


def same(a: str, b: str) -> bool:
    """Return whether two cells are equal as text, or as numbers; NaN is equal to NaN."""
    if a == b:
        return True
    try:
        x, y = float(a), float(b)
    except ValueError:
        return False
    return x == y or (math.isnan(x) and math.isnan(y))


def compared(before: Table, after: Table, dropped: Sequence[str]) -> tuple[int, str]:
    """Return the number of columns compared, and "equal" or the first difference."""
    sides = [
        {name: i for i, name in enumerate(header) if not name.startswith(LEFT_OUT)}
        for header, _ in (before, after)
    ]
    names = [name for name in sides[0] if name in sides[1]]
    alone = [
        f"{name} only {side}"
        for side, mine, others in (("before", *sides), ("after", *sides[::-1]))
        for name in mine
        if name not in others and name not in dropped
    ]
    step = next((name for name in ("step", "iteration") if name in names), None)
    for number, (old, new) in enumerate(zip(before[1], after[1], strict=False), 1):
        at = f"row {number}" if step is None else f"{step} {old[sides[0][step]]}"
        for name in names:
            a, b = old[sides[0][name]], new[sides[1][name]]
            if not same(a, b):
                return len(names), "; ".join([f"{at}, {name}: {a!r} before, {b!r} after", *alone])
    if len(before[1]) != len(after[1]):
        alone.insert(0, f"{len(before[1])} rows before, {len(after[1])} after")
    return len(names), "; ".join(alone) or "equal"


def rows_of(run: str, before: Path, after: Path, dropped: Sequence[str]) -> list[list[str]]:
    """Return the lines of the table of one recipe: run, file, rows, columns, outcome."""
    files = [{str(f.relative_to(p)): f for f in p.rglob("*.csv")} for p in (before, after)]
    lines = []
    for name in sorted({**files[0], **files[1]}):
        if name not in files[0] or name not in files[1]:
            side = "before" if name in files[0] else "after"
            lines.append([run, name, "", "", f"file only {side}"])
            continue
        old, new = read(files[0][name]), read(files[1][name])
        columns, outcome = compared(old, new, dropped)
        lines.append([run, name, str(len(old[1])), str(columns), outcome])
    return lines or [[run, "", "", "", "no CSV file"]]


def main() -> None:
    """Run what is missing, print the table; exit status 1 where a line is not equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of quickstart")
    kept = Path(tempfile.gettempdir()) / "lightning-rlhf-golden"
    parser.add_argument("--cache", type=Path, default=kept, help=f"default {kept}")
    parser.add_argument("--dropped", nargs="+", action="extend", default=[], metavar="METRIC")
    args = parser.parse_args()
    runs = [(recipe, seed) for recipe in RECIPES if recipe in args.only
            for seed in (args.seeds if recipe == "quickstart" else [0])]  # fmt: skip
    commits = [git("rev-parse", "--verify", f"{c}^{{commit}}") for c in (args.before, args.after)]
    before, after = (results(commit, runs, args.cache) for commit in commits)
    table = [["recipe", "file", "rows", "columns", "outcome"]]
    for run in before:
        table += rows_of(run, before[run], after[run], args.dropped)
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    for line in table:
        print("  ".join([*(f"{c:{w}}" for c, w in zip(line, widths, strict=False)), line[4]]))
    sys.exit(any(line[4] != "equal" for line in table[1:]))


if __name__ == "__main__":
    main()
