"""Run commands on inputs that are malformed at random, and count the outcomes.

python benchmarks/malformed.py [--count 1200] [--seed 0] [--jobs 2]
python benchmarks/malformed.py --only ID       shows one input and its outcome
python benchmarks/malformed.py --kind KIND     counts one kind, as rows-and-files; writes no result

The inputs are valid ones with a random change (malformed_cases.py, mutations.py); inputs whose
answer is known are in tests/cli/refusals.yaml, and malformed answers of a server in tests/rewards.
The real command is run on each in a separate process. Correct outcomes are a single line that
begins with "error: " and exit status 1, or, where the change is harmless, acceptance. Failures are
a traceback, another exit, no answer within the time limit, and a command that refuses to resume a
run but changes its files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "COLUMNS": "200"}

import lightning as L
import torch

from common import ROOT, commit, markdown_table, processor
from lightning_rlhf.cli.main import main as command_line
from lightning_rlhf.evaluation import build_rewards, policies
from lightning_rlhf.runs import run
from malformed_cases import MINI, SMALL, STAGES, Case, Kind, kinds

LOADED = (run, build_rewards)
"""Modules that commands import on demand, imported once here for all forked commands."""
MEMORY_BYTES = 6 * 2**30
"""Bytes of address space that a command may use in addition to the loaded modules."""
Answer = Literal["refused", "accepted", "traceback", "another end", "no answer"]
"""Outcome of one input."""
RIGHT = ("refused", "accepted")
"""Correct outcomes."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one input."""

    kind: str
    """Name of the kind of input."""
    id: str
    """Name of the input, as --only takes it."""
    what: str
    """Description of the input."""
    answer: Answer
    """Outcome."""
    seconds: float
    """Duration in seconds."""
    said: str
    """Exit status and last line of output."""


def leave(status: int) -> NoReturn:
    """Flush the output and exit this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def in_child(case: Case, folder: Path) -> NoReturn:
    """Run the command of a case in this process with `folder` as working directory, then exit."""
    status = 1
    try:
        os.chdir(folder)
        descriptor = os.open(folder / ".said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a chat ends at once
        what, words = case.prepare(folder)
        (folder / ".what").write_text(json.dumps([what, digests(folder)]))
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES,) * 2)
        sys.argv = ["train.py", *words]
        with contextlib.ExitStack() as patches:
            for owner, name in stops(case):
                patches.enter_context(patch.object(owner, name, lambda *_, **__: leave(0)))
            command_line()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(status)


def stops(case: Case) -> list[tuple[Any, str]]:
    """Return the functions at which a command that has accepted its input is ended."""
    if case.stop == "model":
        return [(run, "start_from"), (policies.Task, "load")]
    return [(L.LightningModule, "on_train_batch_end")] if case.stop == "step" else []


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file of the runs in a folder."""
    files = [f for f in (folder / "outputs").rglob("*") if f.is_file()]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def judged(kind: str, name: str, folder: Path, status: int | None, seconds: float) -> Result:
    """Return the result of a command; status: its exit status, None if it did not end."""
    text = (folder / ".said").read_text(errors="replace") if (folder / ".said").exists() else ""
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    noted = folder / ".what"
    what, before = json.loads(noted.read_text()) if noted.exists() else ("not prepared", {})
    errors = [line for line in lines if line.startswith("error: ")]
    answer: Answer = "another end"
    if status is None:
        answer = "no answer"
    elif "Traceback (most recent call last)" in text:
        answer = "traceback"
    elif status == 0 and not errors:
        answer = "accepted"
    elif status == 1 and len(errors) == 1 and lines[-1] == errors[0]:
        lost = [path for path, digest in before.items() if digests(folder).get(path) != digest]
        answer = "another end" if lost else "refused"
        lines += [f"(changed {', '.join(lost)})"] * bool(lost)
    said = lines[-1][:300] if lines else ""
    return Result(kind, name, what, answer, round(seconds, 1), f"status {status}: {said}")


def count_answers(
    todo: Sequence[tuple[str, str, Case]], world: Path, jobs: int, limit_s: float
) -> list[Result]:
    """Run every case, `jobs` at a time, and return the results."""
    waiting, running, results = list(todo), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            kind, name, case = waiting.pop(0)
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=world.parent))
            for part in case.template:
                shutil.copytree(world / part, folder / part)
            child = os.fork()
            if not child:
                os.setsid()
                in_child(case, folder)
            running[child] = (kind, name, folder, time.monotonic())
        time.sleep(0.005)
        for child, (kind, name, folder, began) in list(running.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            seconds = time.monotonic() - began
            if not found and seconds < limit_s:
                continue
            if not found:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status) if found else None
            results.append(judged(kind, name, folder, code, seconds))
            tell(results[-1])
            del running[child]
            shutil.rmtree(folder)
    return results


def tell(result: Result) -> None:
    """Print a result if it is a failure."""
    if result.answer not in RIGHT:
        print(f"{result.id} {result.answer}: {result.what}\n    {result.said}", flush=True)


def make_world(folder: Path) -> None:
    """Run every stage once on rows of the quickstart."""
    (folder / "data").mkdir(parents=True)
    shipped = ROOT / "recipes" / "quickstart" / "data"
    names = {"sft": "sft_train", "rm": "preferences_train", "ppo": "prompts_train"}
    for stage, name in names.items():
        lines = (shipped / f"{name}.jsonl").read_text().splitlines(keepends=True)[:24]
        (folder / "data" / f"{stage}.jsonl").write_text("".join(lines))
    for stage in STAGES:
        words = [f"stage={stage}", *MINI, *SMALL[stage]]
        child = os.fork()
        if not child:
            in_child(Case(lambda _, w=words: ("", w), [], "end"), folder)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"stage={stage} fails on right input: {(folder / '.said').read_text()}")


def table(results: Sequence[Result], limit_s: float) -> str:
    """Return a Markdown table of counts, with one row for each kind of input."""
    header = ["input", "given", "refused in one line", "taken", "tracebacks", "other ends",
              f"no answer in {limit_s:g} s", "slowest, s"]  # fmt: skip
    rows = []
    for kind in [*dict.fromkeys(r.kind for r in results), "all"]:
        mine = [r for r in results if kind in (r.kind, "all")]
        counts = Counter(r.answer for r in mine)
        answers = ("refused", "accepted", "traceback", "another end", "no answer")
        cells = [str(counts[answer]) for answer in answers]
        rows.append([kind, str(len(mine)), *cells, f"{max(r.seconds for r in mine):.1f}"])
    return markdown_table(header, rows)


def main() -> None:
    """Run the benchmark and write its results; exit status 1 where an outcome is a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1200, help="of inputs")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    parser.add_argument("--limit", type=float, default=20, help="seconds for an answer")
    parser.add_argument("--only", help="name of one input, as overrides-12")
    parser.add_argument("--kind", help="one kind of input, named by the start of its IDs")
    args = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    top = Path(tempfile.mkdtemp(prefix="malformed-"))
    world = top / "world"
    make_world(world)
    results = run_all(args, world)
    shutil.rmtree(top)
    if args.only:
        print(json.dumps([dataclasses.asdict(r) for r in results], indent=1))
        return
    if args.kind:
        print(table(results, args.limit))
        sys.exit(int(any(r.answer not in RIGHT for r in results)))
    minutes = (time.monotonic() - began) / 60
    head = f"{datetime.date.today()}, commit {commit()}; {processor()}, {os.cpu_count()} cores; "
    head += f"{minutes:.1f} minutes, seed {args.seed}."
    wrong = [f"- {r.id} {r.answer}: {r.what}: {r.said}" for r in results if r.answer not in RIGHT]
    text = "\n\n".join(["# Malformed inputs", head, table(results, args.limit), *wrong])
    (Path(__file__).parent / "results" / "malformed.md").write_text(text + "\n")
    print(text)
    sys.exit(bool(wrong))


def run_all(args: argparse.Namespace, world: Path) -> list[Result]:
    """Return the results of all inputs, of those of --kind, or of the one named by --only."""

    def numbers(key: str, share: float) -> list[str]:
        if args.only:
            return [args.only] * (args.only.rpartition("-")[0] == key)
        count = round(share * args.count) if args.kind in (None, key) else 0
        return [f"{key}-{number}" for number in range(count)]

    def dice(name: str) -> random.Random:
        return random.Random(f"{args.seed} {name}")

    found: list[Kind] = kinds(world)
    named = {"-".join(re.sub("[,:=]", " ", kind.name).lower().split()[:3]): kind for kind in found}
    todo = [(kind.name, name, kind.draw(dice(name)))
            for key, kind in named.items() for name in numbers(key, kind.share)]  # fmt: skip
    return count_answers(todo, world, args.jobs, args.limit)


if __name__ == "__main__":
    main()
