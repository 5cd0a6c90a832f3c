"""Kill runs with SIGKILL at random times, resume them, and compare with uninterrupted runs.

python benchmarks/soak.py [--kills 100] [--seed 0] [--only "two processes"] [--out FOLDER]

Every variant of a stage is killed repeatedly, in all its phases, at a random time after the phase
began; the command that resumes is killed likewise. After half of the kills a loss of power is
simulated: files are truncated to what was flushed to the disk. Half of the resuming commands use
resume=auto, the others resume=true or overwrite=true, as the state of the folder requires. Finally
the run is completed, and its weights, metrics, samples and checkpoint names are compared with those
of an uninterrupted run. The recipe is killed together with its stage's process, at random times
within its whole duration. Of PPO in two processes, either of them or the one that started them is
killed, and the others have to end within 30 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import hashlib
import json
import mmap
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import commit, markdown_table, processor
from lightning_rlhf.callbacks.checkpoints import Checkpoints
from lightning_rlhf.cli.main import main as command_line
from lightning_rlhf.core.metrics import MACHINE
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import DPOModule, RewardModule, SFTModule
from lightning_rlhf.rollout.collector import Collector
from lightning_rlhf.stages import final

STAGES = ("sft", "rm", "ppo")
SMALL = {
    "sft": ["sft.epochs=0.03", "sft.val_every=8", "sft.checkpoint_every=6"],
    "rm": ["rm.epochs=0.05", "rm.val_every=8", "rm.checkpoint_every=6",
           "rm.calibration_samples=16"],
    "ppo": ["ppo.iterations=8", "ppo.val_every=5", "ppo.checkpoint_every=3",
            "ppo.rollout_batch_size=32", "ppo.kl_control=adaptive", "ppo.samples_every=2",
            "ppo.score_normalization=running", "ppo.val_samples_per_prompt=1",
            "reward.unfit=warn"],  # the reward model was trained on a tenth of its data
    "dpo": ["dpo.epochs=0.05", "dpo.val_every=8", "dpo.checkpoint_every=6"],
}  # fmt: skip
"""Stage -> overrides of a run that takes a few seconds and uses every part of the state."""
VARIANTS = {
    "sft": ("sft", SMALL["sft"]),
    "rm": ("rm", SMALL["rm"]),
    "ppo": ("ppo", SMALL["ppo"]),
    "dpo": ("dpo", SMALL["dpo"]),
    "sft, adapter, TensorBoard": (
        "sft", [*SMALL["sft"], "sft.finetune=lora", "logger=tensorboard"],
    ),
    "ppo, rloo, recorded": (
        "ppo", ["advantage=rloo", *SMALL["ppo"], "ppo.samples_per_prompt=4", "record=true"],
    ),
}  # fmt: skip
"""Name of a variant -> stage and overrides. Stages from which others start come first."""
PHASES = ("start", "generation", "scoring", "update", "training", "evaluation",
          "checkpoint", "deletion", "export", "end")  # fmt: skip
"""Phases of a process; the index of a phase is the byte that the process reports."""
OWN = {
    "sft": ("start", "training", "evaluation", "checkpoint", "deletion", "export"),
    "rm": ("start", "training", "evaluation", "checkpoint", "deletion", "export"),
    "dpo": ("start", "training", "evaluation", "checkpoint", "deletion", "export"),
    "ppo": ("start", "generation", "scoring", "update", "evaluation", "checkpoint", "deletion",
            "export"),
}  # fmt: skip
"""Stage -> its phases."""
MARKED = [
    (Collector, "roll_out", "generation"),
    (Collector, "score", "scoring"),
    (PPOModule, "update", "update"),
    (PPOModule, "validation_step", "evaluation"),
    (SFTModule, "training_step", "training"),
    (SFTModule, "validation_step", "evaluation"),
    (DPOModule, "training_step", "training"),
    (DPOModule, "validation_step", "evaluation"),
    (RewardModule, "training_step", "training"),
    (RewardModule, "validation_step", "evaluation"),
    (Checkpoints, "save", "checkpoint"),
    (Checkpoints, "delete_surplus", "deletion"),
    (final, "write_final", "export"),
]
"""Functions that mark phases: (owner, name of the function, phase)."""
RECIPE, PROCESSES = "recipe", "two processes"
"""Names of what runs in processes of its own."""
OWN_SHARE = 0.06
"""Share of the kills that each of these gets."""
DEADLINE_S = 30
"""Seconds in which all processes of a run have to end after one of them was killed."""
LONGEST = {"export": 0.15, "checkpoint": 0.02, "deletion": 0.0005, "start": 3.0}
"""Phase -> largest delay of a kill after the start of the phase, in seconds; 0.1 for all others."""


@dataclasses.dataclass
class Outcome:
    """The counts of kills and failures of a variant, or of the recipe."""

    kills: Counter[str] = dataclasses.field(default_factory=Counter)
    """Phase in which the process was killed -> number of kills."""
    finished: int = 0
    """Number of runs that finished and were compared."""
    anew: int = 0
    """Number of restarts of a run that had no checkpoint yet."""
    unpowered: int = 0
    """Number of kills followed by a simulated loss of power."""
    auto: int = 0
    """Number of commands that resumed or restarted a run with resume=auto."""
    lost: list[int] = dataclasses.field(default_factory=list)
    """Number of steps repeated after each kill."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """Descriptions of commands that failed to resume, and of differences."""


class Phase:
    """The phase of a child process, in shared memory that its parent reads, also after a kill."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 2)

    def set(self, name: str) -> str:
        """Enter a phase; returns the previous one."""
        before = PHASES[self.memory[0]]
        self.memory[0] = PHASES.index(name)
        self.memory[1] = (self.memory[1] + 1) % 256  # makes each entry visible
        return before

    @property
    def now(self) -> tuple[str, int]:
        """Return the phase, and a number that changes with every entry."""
        return PHASES[self.memory[0]], self.memory[1]

    def marking(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the function wrapped so that the phase `name` is set while it runs."""

        def within(*args: Any, **kwargs: Any) -> Any:
            if self.now[0] == "evaluation":  # evaluation also samples and scores
                return function(*args, **kwargs)
            before = self.set(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.set(before)

        return within


class Disk:
    """A simulated disk that knows the data surviving a loss of power: file sizes at the last fsync.

    A child writes its flushes and renames to a journal, line by line, which its parent reads.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.journal.touch()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record every fsync and every rename in the block."""
        fsync, replace = os.fsync, os.replace
        journal = os.open(self.journal, os.O_WRONLY | os.O_APPEND)

        def note_fsync(descriptor: int) -> None:
            fsync(descriptor)
            path, size = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
            os.write(journal, f"{json.dumps([path, size])}\n".encode())

        def note_replace(source: Any, target: Any) -> None:
            # Noted first: a kill in between leaves the old file, which the noted size cuts nowhere;
            # noted last, it would leave the new file cut to the size of the old one.
            paths = [os.path.abspath(source), os.path.abspath(target)]
            os.write(journal, f"{json.dumps(paths)}\n".encode())
            replace(source, target)

        with patch.object(os, "fsync", note_fsync), patch.object(os, "replace", note_replace):
            yield

    def synced(self) -> dict[str, int]:
        """Return file -> number of its bytes that are on the disk."""
        sizes: dict[str, int] = {}
        for line in self.journal.read_text().splitlines():
            path, what = json.loads(line)
            if isinstance(what, int):
                sizes[path] = what
                continue
            moved = {p: n for p, n in sizes.items() if p == path or p.startswith(f"{path}/")}
            gone = [p for p in sizes if p == what or p.startswith(f"{what}/")]
            for old in (*moved, *gone):
                del sizes[old]
            sizes |= {what + old.removeprefix(path): size for old, size in moved.items()}
        return sizes

    def lose_power(self, folder: Path) -> None:
        """Truncate the files of a run to the bytes that are on the disk."""
        sizes = self.synced()
        for file in folder.rglob("*"):
            if file.is_file() and file.stat().st_size > (on_disk := sizes.get(str(file), 0)):
                os.truncate(file, on_disk)


def fork(words: Sequence[str], phase: Phase, disk: Disk, log: Path) -> int:
    """Run the command in a forked process, with all libraries loaded; returns the process id."""
    phase.set("start")
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["train.py", *words]
        with contextlib.ExitStack() as patches:
            patches.enter_context(disk.noting())
            for owner, name, what in MARKED:
                marked = phase.marking(getattr(owner, name), what)
                patches.enter_context(patch.object(owner, name, marked))
            command_line()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        phase.set("end")
        os._exit(status)


def ended(child: int) -> int | None:
    """Return the exit status, negative where a signal ended the child; None while it runs."""
    found, status = os.waitpid(child, os.WNOHANG)
    return None if found == 0 else os.waitstatus_to_exitcode(status)


def cut(child: int, phase: Phase, target: str, entry: int, delay: float) -> int:
    """Kill the child `delay` seconds after it entered the phase `target` for the `entry`-th time.

    Returns: the exit status, also where the child ended before.
    """
    seen, last = 0, -1
    while (status := ended(child)) is None:
        name, number = phase.now
        if number != last:
            seen, last = seen + (name == target), number
        if seen >= entry:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.0002)
    return status


def command(variant: str, run: str, outputs: Path, *, auto: bool = False) -> list[str]:
    """Return the arguments that start or resume a run of a variant."""
    stage, own = VARIANTS[variant]
    folder = outputs / run / "tiny" / stage
    parents = [f"policy.checkpoint={outputs}/whole_sft/tiny/sft/final"] * (stage != "sft")
    parents += [f"reward.checkpoint={outputs}/whole_rm/tiny/rm/final"] * (stage == "ppo")
    words = [f"stage={stage}", f"run={run}", f"outputs={outputs}", *own, *parents]
    if auto:
        return [*words, "resume=auto"]
    if saved(folder):
        return [*words, "resume=true"]
    return [*words, "overwrite=true"] if folder.exists() else words


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a run folder, in ascending order."""
    return sorted(int(p.stem) for p in (folder / "checkpoints").glob("*.ckpt") if p.stem.isdigit())


def steps_done(folder: Path, stage: str) -> int:
    """Return the last step in metrics.csv; 0 without rows.

    PPO has a row for each iteration, the other stages for some of their steps.
    """
    file = folder / "metrics.csv"
    return max((int(row["step"]) for row in read_rows(file)), default=0) if file.exists() else 0


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without times and memory, which differ between equal runs."""
    with file.open(newline="") as opened:
        return [
            {k: v for k, v in row.items() if v and not k.startswith(MACHINE)}
            for row in csv.DictReader(opened)
        ]


def content(folder: Path) -> dict[str, object]:
    """Return the content that must be equal between runs, by name.

    It covers the weights in final/, samples, metric rows, and names of checkpoints, unfinished
    files and recorded iterations.
    """
    kept = [*(folder / "final").rglob("*"), *(folder / "samples").rglob("*")]
    files = [f for f in kept if f.is_file() and f.suffix in (".safetensors", ".jsonl")]
    found: dict[str, object] = {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files
    }
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    found["names of checkpoints"] = names
    found["names half written"] = sorted(path.name for path in folder.rglob("*.tmp"))
    found["iterations recorded"] = sorted(path.name for path in folder.glob("rollouts/*"))
    return found | {"metrics.csv": read_rows(folder / "metrics.csv")}


def differences(folder: Path, whole: Path) -> list[str]:
    """Return the names of the content that differs between two runs."""
    one, other = content(folder), content(whole)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def soak_stage(variant: str, kills: int, outputs: Path, dice: random.Random) -> Outcome:
    """Kill runs of a variant `kills` times, complete the last one, and return the counts."""
    stage = VARIANTS[variant][0]
    outcome, phase, log = Outcome(), Phase(), outputs / f"{stage}.log"
    whole, folder = (outputs / run / "tiny" / stage for run in (untouched(variant), "cut"))
    disk = Disk(outputs / "journal")
    tried = Counter(dict.fromkeys(OWN[stage], 0))
    while True:
        is_last = outcome.kills.total() >= kills
        before = steps_done(folder, stage)
        is_auto = dice.random() < 0.5
        words = command(variant, "cut", outputs, auto=is_auto)
        is_begun = (folder / "config.json").exists()
        outcome.auto += is_auto and is_begun
        outcome.anew += is_begun and not saved(folder)
        child = fork(words, phase, disk, log)
        target = dice.choice([p for p, n in tried.items() if n == min(tried.values())])
        tried[target] += 1
        entry = 1 if target in ("export", "start", "deletion") else dice.randint(1, 4)
        delay = dice.uniform(0, LONGEST.get(target, 0.1))
        status = cut(child, phase, "none" if is_last else target, entry, delay)
        if status == -signal.SIGKILL:
            outcome.kills[phase.now[0]] += 1
            point = max(saved(folder), default=0)
            outcome.lost.append(max(0, steps_done(folder, stage) - point))
            if dice.random() < 0.5:
                disk.lose_power(folder)
                outcome.unpowered += 1
        elif status != 0:
            outcome.failures.append(f"exit status {status} of {' '.join(words)}, after {before}")
            return outcome
        if (folder / "final").is_dir():
            outcome.finished += 1
            outcome.failures += [f"{name} differs" for name in differences(folder, whole)]
            shutil.rmtree(folder)
            disk.journal.write_text("")
            if is_last:
                return outcome


def untouched(variant: str) -> str:
    """Return the name of the uninterrupted run of a variant."""
    return f"whole_{variant.replace(', ', '_')}"


def soak_recipe(kills: int, outputs: Path, dice: random.Random) -> Outcome:
    """Kill the recipe and its stage at random times, then complete it, and return the counts."""
    words = [sys.executable, "-m", "lightning_rlhf", "recipe=quickstart", f"outputs={outputs}"]
    words += [word for stage in STAGES for word in SMALL[stage]]
    log = (outputs / "recipe.log").open("a")

    def start(run: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*words, f"run={run}"], stdout=log, stderr=log, start_new_session=True
        )

    began = time.monotonic()
    start("recipe").wait()
    longest, outcome = (time.monotonic() - began) / 2, Outcome()
    while True:
        left = kills - outcome.kills.total()
        process, marks = start("recipe_cut"), finals(outputs)
        moment, between = time.monotonic() + dice.uniform(4, longest), dice.random() < 0.5
        while process.poll() is None:
            new = finals(outputs) - marks
            if left and (time.monotonic() > moment or (between and new)):
                time.sleep(dice.uniform(0, 1.5) if new else 0)
                kill_session(process.pid)
                break
            time.sleep(0.002)
        status = process.wait()
        if status == -signal.SIGKILL:
            outcome.kills["between stages" if between and new else "a stage"] += 1
            continue
        if status != 0:
            outcome.failures.append(
                f"exit status {status} of the recipe, {left} kills before the end"
            )
            return outcome
        if left == 0:
            break
        shutil.rmtree(outputs / "recipe_cut")  # the recipe ended before its kill
    folders = [outputs / run / "tiny" for run in ("recipe_cut", "recipe")]
    for stage in STAGES:
        cut_one, whole = (folder / stage for folder in folders)
        outcome.failures += [f"{stage}: {n} differs" for n in differences(cut_one, whole)]
    outcome.finished = 1
    return outcome


def soak_processes(kills: int, outputs: Path, dice: random.Random) -> Outcome:
    """Kill one of the processes of PPO at random times, complete it, and return the counts."""
    log = (outputs / "processes.log").open("a")

    def start(run: str) -> subprocess.Popen[bytes]:
        words = command("ppo", run, outputs, auto=True)
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_rlhf", *words, *IN_TWO], stdout=log, stderr=log
        )

    began = time.monotonic()
    if status := start("whole_two").wait():
        sys.exit(f"two processes fail uncut with status {status}: {log.name}")
    longest, outcome = time.monotonic() - began, Outcome()
    whole, folder = (outputs / run / "tiny" / "ppo" for run in ("whole_two", "two"))
    while True:
        left, began, killed = kills - outcome.kills.total(), time.monotonic(), ""
        is_whole = not folder.exists()
        process, moment = start("two"), began + dice.uniform(0.2, 1) * longest
        while process.poll() is None:
            found = {"the launcher": process.pid} | ranks(process.pid)
            if left and len(found) == 3 and time.monotonic() > moment:
                killed = dice.choice(sorted(found))
                os.kill(found[killed], signal.SIGKILL)
                break
            time.sleep(0.002)
        if killed:
            outcome.kills[killed] += 1
            outcome.lost.append(max(0, steps_done(folder, "ppo") - max(saved(folder), default=0)))
            if not all([*gone_within(DEADLINE_S, [process.pid, *found.values()], process)]):
                outcome.failures.append(f"{killed} was killed, and others live {DEADLINE_S} s on")
                return outcome
            outcome.auto += 1
        elif status := process.wait():
            outcome.failures.append(f"exit status {status}, {left} kills before the end")
            return outcome
        elif is_whole:
            longest = time.monotonic() - began
        if (folder / "final").is_dir():
            outcome.finished += 1
            outcome.failures += [f"{name} differs" for name in differences(folder, whole)]
            if not left:
                return outcome
            shutil.rmtree(folder)


IN_TWO = ("trainer.devices=2", "trainer.threads=1")
"""Overrides of a run in two processes."""


def ranks(launcher: int) -> dict[str, int]:
    """Return the processes that a launcher has started, by their ranks."""
    found = {}
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            values = dict(entry.split("=", 1) for entry in environment if "=" in entry)
            if "RANK" in values:
                found[f"rank {values['RANK']}"] = int(pid)
    return found


def gone_within(
    seconds: float, numbers: Sequence[int], launcher: subprocess.Popen[bytes]
) -> Iterator[bool]:
    """Yield for each process whether it ended in so many seconds; those that did not are killed."""
    deadline = time.monotonic() + seconds
    for number in numbers:
        while Path(f"/proc/{number}").exists() and time.monotonic() < deadline:
            launcher.poll()  # a process that nobody waited for remains
            time.sleep(0.01)
        yield not Path(f"/proc/{number}").exists()
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def finals(outputs: Path) -> set[Path]:
    """Return the `final/` folders of the recipe's finished stages."""
    return set(outputs.glob("recipe_cut/tiny/*/final"))


def kill_session(leader: int) -> None:
    """Send SIGKILL to a process and to all processes of its session."""
    for number in children(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def children(leader: int) -> Iterator[int]:
    """Yield the process ids of a session, its leader included."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    yield int(entry.name)


def table(found: dict[str, Outcome]) -> str:
    """Return a Markdown table with one row per variant."""
    rows = []
    for name, outcome in found.items():
        died = ", ".join(f"{n} in {phase}" for phase, n in sorted(outcome.kills.items()))
        rows.append([
            name, f"{outcome.kills.total()}: {died}", str(outcome.unpowered), str(outcome.auto),
            str(outcome.finished), str(outcome.anew),
            str(max(outcome.lost, default=0)) if outcome.lost else "", str(len(outcome.failures)),
        ])  # fmt: skip
    total = sum(outcome.kills.total() for outcome in found.values())
    failed = sum(len(outcome.failures) for outcome in found.values())
    ended_well = sum(outcome.finished for outcome in found.values())
    unpowered = sum(outcome.unpowered for outcome in found.values())
    auto = sum(outcome.auto for outcome in found.values())
    rows.append(
        ["all", str(total), str(unpowered), str(auto), str(ended_well), "", "", str(failed)]
    )
    header = [
        "", "killed", "with a loss of power", "resume=auto", "runs compared", "begun anew",
        "steps lost at most", "differences",
    ]  # fmt: skip
    return markdown_table(header, rows)


def main() -> None:
    """Run the test for every variant and the recipe; exit status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of phases and moments")
    everything = (*VARIANTS, RECIPE, PROCESSES)
    parser.add_argument("--only", nargs="+", choices=everything, default=everything)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    dice, began = random.Random(args.seed), time.monotonic()
    outputs = Path(tempfile.mkdtemp(prefix="soak-"))
    own = [name for name in (RECIPE, PROCESSES) if name in args.only]
    variants = [name for name in VARIANTS if name in args.only]
    of_own = max(1, round(OWN_SHARE * args.kills if variants else args.kills / len(own)))
    of_variant = -(-(args.kills - of_own * len(own)) // max(1, len(variants)))
    found: dict[str, Outcome] = {}
    for variant in VARIANTS:
        if variant not in (*variants, "sft", "rm"):  # from which others start
            continue
        words, log = command(variant, untouched(variant), outputs), outputs / "whole.log"
        child = fork(words, Phase(), Disk(outputs / "journal"), log)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"{variant} fails uncut: {log.read_text()[-2000:]}")
        (outputs / "journal").write_text("")
        if variant in variants:
            found[variant] = soak_stage(variant, of_variant, outputs, dice)
            print(f"{variant}: {found[variant]}", flush=True)
    for name, soak in ((RECIPE, soak_recipe), (PROCESSES, soak_processes)):
        if name in own:
            found[name] = soak(of_own, outputs, dice)
            print(f"{name}: {found[name]}", flush=True)
    minutes = (time.monotonic() - began) / 60
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "minutes": round(minutes, 1),
        "seed": args.seed,
    }
    head = "{date}, commit {commit}; {machine}; {minutes} minutes, seed {seed}.".format(**facts)
    text = f"# Runs that were killed\n\n{head}\n\n{table(found)}\n"
    results = {name: vars(outcome) for name, outcome in found.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    part = [] if set(args.only) == set(everything) else [n.replace(" ", "_") for n in found]
    stem = args.out / "_".join(["soak", *part])
    stem.with_suffix(".json").write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    print(text)
    failures = [failure for outcome in found.values() for failure in outcome.failures]
    if failures:
        sys.exit("\n".join([*failures, f"what was left: {outputs}"]))
    shutil.rmtree(outputs)


if __name__ == "__main__":
    main()
