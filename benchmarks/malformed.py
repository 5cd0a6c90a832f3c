"""Run every command on malformed inputs, about a thousand in total, and count the outcomes.

python benchmarks/malformed.py [--count 1200] [--seed 0] [--jobs 2] [--out benchmarks/results]
python benchmarks/malformed.py --only ID       shows one input and its outcome
python benchmarks/malformed.py --kind KIND     counts one kind, as rows-and-files; writes no result

Half of the inputs are from tables (malformed_cases.py, malformed_http.py), half are valid inputs
with a random change (mutations.py). The real command is run on each in a separate process. Correct
outcomes are a single line that begins with "error: " and exit status 1, or, where the change is
harmless, acceptance. Failures are a traceback, another exit, no answer within the time limit, and
a command that refuses to resume a run but has changed its files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
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

import malformed_http as over_http
from common import ROOT, commit, markdown_table, processor
from lightning_rlhf.cli import serve
from lightning_rlhf.cli.main import main as command_line
from lightning_rlhf.stages import rank_responses, run, train_dpo, train_ppo, train_rm, train_sft
from lightning_rlhf.stages.reward import text_rewards
from malformed_cases import MINI, SMALL, STAGES, Case, Kind, kinds

LOADED = (run, serve, text_rewards)
"""Modules that commands import on demand, imported once here for all forked commands."""
MEMORY_BYTES = 6 * 2**30
"""Bytes of address space that a command may use in addition to the loaded modules."""
Answer = Literal["refused", "accepted", "traceback", "another end", "no answer"]
"""Outcome of one input."""
RIGHT = ("refused", "accepted")
"""Correct outcomes."""
SERVER = "HTTP requests to serve-reward"
"""Name of the kind of input that is sent to the reward server."""
PAGE = ROOT / "docs" / "reliability.md"
MARKS = ("<!-- malformed table: begin -->\n", "<!-- malformed table: end -->")


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
    """Exit status and last line of output, or the status line of an HTTP answer."""


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
        modules = (train_sft, train_rm, train_ppo, train_dpo)
        return [*((module, "start_from") for module in modules), (rank_responses, "load_policy")]
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
    what, before = (
        json.loads(noted.read_text()) if noted.exists() else ("could not be prepared", {})
    )
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


def start_server(world: Path) -> tuple[int, int]:
    """Start serve-reward in a new process; returns its process id and its port."""
    log = world / "server.log"
    child = os.fork()
    if not child:
        os.setsid()
        final = str(world / "outputs/default/tiny/rm/final")
        words = ["serve-reward", final, "--port", "0"]
        in_child(Case(lambda _: ("", words), [], "end"), world)
    log = world / ".said"
    for _ in range(600):
        time.sleep(0.1)
        text = log.read_text() if log.exists() else ""
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/score", text):
            return child, int(found[1])
    sys.exit(f"serve-reward did not start: {text}")


def count_requests(
    todo: Sequence[tuple[str, over_http.Request]], world: Path, limit_s: float
) -> list[Result]:
    """Send every request to one server, and return the results."""
    child, port = start_server(world)
    log, results = world / ".said", []
    for name, request in todo:
        before, began = log.stat().st_size, time.monotonic()
        answer: Answer
        try:
            data = over_http.asked(port, request, limit_s)
            first = data.split(b"\r\n")[0]
            status = re.match(rb"HTTP/1\.[01] (\d{3})", first)
            said = first.decode(errors="replace")
            if status is None:
                answer = "refused" if data == b"" else "another end"  # connection closed
            else:
                code = int(status[1])
                answer = "accepted" if code < 400 else "refused"
                if code >= 500 and code not in (501, 505):
                    answer = "another end"
        except TimeoutError:
            answer, said = "no answer", ""
        if "Traceback (most recent call last)" in log.read_text(errors="replace")[before:]:
            answer, said = "traceback", log.read_text(errors="replace").splitlines()[-1]
        seconds = round(time.monotonic() - began, 1)
        results.append(Result(SERVER, name, request.what, answer, seconds, said[:300]))
        tell(results[-1])
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return results


def make_world(folder: Path) -> None:
    """Run every stage once on rows of the quickstart."""
    (folder / "data").mkdir(parents=True)
    shipped = ROOT / "recipes" / "quickstart" / "data"
    names = {"sft": "sft_train", "rm": "preferences_train", "ppo": "prompts_train"}
    for stage, name in names.items():
        lines = (shipped / f"{name}.jsonl").read_text().splitlines(keepends=True)[:24]
        (folder / "data" / f"{stage}.jsonl").write_text("".join(lines))
    for stage in STAGES:
        words = [f"stage={stage}", *MINI, *SMALL[stage], *["record=true"] * (stage == "ppo")]
        child = os.fork()
        if not child:
            in_child(Case(lambda _, w=words: ("", w), [], "end"), folder)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"stage={stage} fails on right input: {(folder / '.said').read_text()}")


def chosen(kind: str, table: Sequence[Any], draw: Any, count: int, seed: int) -> dict[str, Any]:
    """Return name -> input: half evenly spaced in the table, half drawn at random."""
    tabled = min(len(table), -(-count // 2))
    found = {f"{kind}-t{i * len(table) // tabled}": table[i * len(table) // tabled]
             for i in range(tabled)}  # fmt: skip
    for number in range(count - tabled):
        name = f"{kind}-r{number}"
        found[name] = draw(random.Random(f"{seed} {name}"))
    return found


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
    parser.add_argument("--only", help="name of one input, as rows-t12 or rows-r3")
    parser.add_argument("--kind", help="one kind of input, named by the start of its IDs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
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
    facts = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": args.seed,
    }
    head = "{date}, commit {commit}; {machine}; {minutes} minutes, seed {seed}.".format(**facts)
    counted = table(results, args.limit)
    failures = [dataclasses.asdict(r) for r in results if r.answer not in RIGHT]
    args.out.mkdir(parents=True, exist_ok=True)
    content = facts | {"count": len(results), "failures": failures}
    (args.out / "malformed.json").write_text(json.dumps(content, indent=1) + "\n")
    text = f"# Malformed inputs\n\n{head}\n\n{counted}\n"
    (args.out / "malformed.md").write_text(text)
    print(text)
    if args.out.resolve() == Path(__file__).parent / "results":
        link = "[As JSON](../benchmarks/results/malformed.json)."
        write_between(PAGE, MARKS, f"{counted}\n\n{head} {link}\n")
    sys.exit(int(bool(failures)))


def run_all(args: argparse.Namespace, world: Path) -> list[Result]:
    """Return the results of all inputs, or of the one named by --only."""
    found: list[Kind] = [*kinds(world), over_http.client_kind(0.07)]
    todo: list[tuple[str, str, Case]] = []
    for kind in found:
        key = kind.name.replace(",", "").replace(":", "").split("=")[0]
        key = "-".join(key.lower().split()[:3])
        if args.kind not in (None, key):
            continue
        if args.only:
            todo += [(kind.name, args.only, c) for c in one(args, key, kind.table, kind.draw)]
            continue
        cases = chosen(key, kind.table, kind.draw, round(kind.share * args.count), args.seed)
        todo += [(kind.name, name, case) for name, case in cases.items()]
    results = count_answers(todo, world, args.jobs, args.limit)
    requests = over_http.request_table()
    if args.kind:
        todo_requests = []
    elif args.only:
        todo_requests = [
            (args.only, r) for r in one(args, "requests", requests, over_http.request_drawn)
        ]
    else:
        count = max(args.count - len(results), 2)
        drawn = chosen("requests", requests, over_http.request_drawn, count, args.seed)
        todo_requests = list(drawn.items())
    return results + (count_requests(todo_requests, world, args.limit) if todo_requests else [])


def one(args: argparse.Namespace, key: str, table: Sequence[Any], draw: Any) -> list[Any]:
    """Return the input that --only names, if it is of this kind."""
    found = re.fullmatch(rf"{re.escape(key)}-([tr])(\d+)", args.only)
    if found is None:
        return []
    number = int(found[2])
    return [table[number] if found[1] == "t" else draw(random.Random(f"{args.seed} {args.only}"))]


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace the text between two marks of a page."""
    before, _, rest = page.read_text().partition(marks[0])
    _, _, after = rest.partition(marks[1])
    page.write_text(before + marks[0] + text + marks[1] + after)


if __name__ == "__main__":
    main()
