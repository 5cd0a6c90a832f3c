"""Plant faults in a copy of the code, one at a time, and count those that the tests catch.

python benchmarks/faults.py [--slice 0/6] [--only TEXT ...] [--kind planted|mutants]
python benchmarks/faults.py --draw 120     draws mutants anew into results/faults.csv

Planted faults are the rows of faults.yaml; mutants are single operators or constants of core,
modules, rollout, rewards and data, drawn by a fixed seed and kept in results/faults.csv. Both are
found by the name of a function (Class.method), searched in all of src, and by the text of the
code, so that they outlive moves of code. A fault is run, up to the first failure, against the tests
that its row names, those that mention its function and class most, and its whole room. A text
that is not found any more is "not applicable". Outcomes are written to results/faults.csv; the exit
status is 1 where a planted fault is missed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import csv
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "modules", "rollout", "rewards", "data")
"""Folders below src/lightning_rlhf from which mutants are drawn."""
NOT_DRAWN = ("static", "cache", "step_compute", "compute", "config")
"""Files without mutants: those of CUDA graphs and of counted operations, and tables of bounds."""
RESULTS = Path(__file__).parent / "results" / "faults.csv"
LEFT_OUT = (".git", ".venv*", "outputs", "__pycache__", ".*_cache", ".hypothesis", "results")
NOT_RUN = ("parity", "standin", "engines", "kernels", "families", "recipes")  # folders of tests
IMPORTED = ("lightning", "transformers", "peft", "hydra", "pytest", "datasets", "matplotlib.pyplot")
"""Libraries that are imported once, here, for the tests of all faults."""
LIMIT_S = 1200  # for the tests of one fault
Functions = dict[str, list[tuple[Path, ast.AST]]]
"""Qualified name -> files and definitions of the functions and methods of that name."""


@dataclass(frozen=True)
class Fault:
    """One fault, and its outcome where it was run."""

    kind: str
    """"planted", or the kind of node that a mutant changes."""
    at: str
    """Name of the function, or Class.method."""
    old: str
    """Text that is replaced; of a mutant, as ast.unparse writes it."""
    new: str
    number: int = 0
    """Number of the occurrence of `old` in the function, from 0."""
    outcome: str = ""
    """caught, MISSED, no end (of the tests in time), not applicable; empty where it was not run."""
    by: str = ""
    """Test that failed."""
    seconds: str = ""
    commit: str = ""


def functions(source: Path) -> Functions:
    """Return all functions and methods of the files below a folder."""
    found: Functions = {}
    for file in sorted(source.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            for one, prefix in [(node, ""), *((x, f"{node.name}.") for x in inner)]:  # type: ignore[union-attr]
                if isinstance(one, ast.FunctionDef):
                    found.setdefault(prefix + one.name, []).append((file, one))
    return found


def span(text: bytes, node: ast.AST) -> tuple[int, int]:
    """Return the first byte of a node in its file, and the one after its last."""
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    return begin, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def planted(fault: Fault, defined: Functions) -> tuple[Path, bytes] | None:
    """Return the file of a fault and its faulty text; None where it is not applicable."""
    words = re.findall(r"\w+|[^\w\s]", fault.old)
    pattern = r"\s*".join(map(re.escape, words))
    pattern = rf"\b{pattern}" if words[0][0].isalnum() else pattern
    pattern += r"\b" if words[-1][-1].isalnum() else ""
    for file, function in defined.get(fault.at, []):
        text = file.read_bytes()
        if fault.kind == "planted":
            body = function.body  # type: ignore[attr-defined]
            begin = span(text, body[bool(ast.get_docstring(function)) and len(body) > 1])[0]  # type: ignore[arg-type]
            end = span(text, function)[1]
            whole = text[begin:end].decode()
            new = re.sub(pattern, lambda _: fault.new, whole, count=1)
            if new != whole:
                return file, text[:begin] + new.encode() + text[end:]
        nodes = [node for node, _, _ in sites(function) if ast.unparse(node) == fault.old]
        if fault.kind != "planted" and len(nodes) > fault.number:
            begin, end = span(text, nodes[fault.number])
            return file, text[:begin] + f"({fault.new})".encode() + text[end:]
    return None


SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum",
         "maximum": "minimum", "argmin": "argmax", "argmax": "argmin", "any": "all", "all": "any",
         "sum": "mean", "mean": "sum"}  # fmt: skip


def changed(node: ast.AST) -> ast.AST | None:
    """Return a copy of a node with its operator, constant or name changed; None for no change."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp() | ast.BoolOp() if type(new.op) in SWAPPED:
            new.op = SWAPPED[type(new.op)]()
        case ast.Compare() if type(new.ops[0]) in SWAPPED:
            new.ops[0] = SWAPPED[type(new.ops[0])]()
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            return new.operand
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value = 1 if new.value == 0 else 0 if new.value == 1 else new.value + 1
        case ast.Call(func=ast.Attribute(attr=name) as func) if name in NAMES:
            func.attr = NAMES[name]
        case ast.Call(func=ast.Name(id=name) as func) if name in ("min", "max", "any", "all"):
            func.id = NAMES[name]
        case _:
            return None
    return new


def sites(function: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield the nodes of a function that a mutant may change, their kinds and new texts.

    Annotations, docstrings, messages and what is raised are left out.
    """
    todo: list[ast.AST] = [*function.body]  # type: ignore[attr-defined]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments | ast.Assert):
            continue
        new = changed(node)
        if new is not None:
            yield node, type(node).__name__, ast.unparse(new)
        parts = [node.value] if isinstance(node, ast.AnnAssign) else ast.iter_child_nodes(node)
        todo += [part for part in parts if part is not None]


def drawn(count: int, seed: int = 0) -> list[Fault]:
    """Return mutants of the rooms, at most three of a function, drawn by a seed."""
    package, found = ROOT / "src" / "lightning_rlhf", []
    defined = {name: places for name, places in functions(package).items() if len(places) == 1}
    for name, [(file, function)] in sorted(defined.items()):
        if file.parent.name not in ROOMS or file.stem in NOT_DRAWN:
            continue
        seen, of_function = Counter[str](), []
        for node, kind, new in sites(function):
            old = ast.unparse(node)
            of_function.append(Fault(kind, name, old, new, seen[old]))
            seen[old] += 1
        random.Random(f"{seed} {name}").shuffle(of_function)
        found += of_function[:3]
    return sorted(random.Random(seed).sample(found, count), key=lambda fault: fault.at)


def tests_of(fault: Fault, file: Path, tree: Path, tests: str) -> list[str]:
    """Return what pytest runs for a fault: the files that name it most, then its whole room."""
    room = file.relative_to(tree / "src" / "lightning_rlhf").parts[0]
    parts = [part for part in fault.at.split(".") if not part.endswith("__")]
    found = [f for f in sorted((tree / "tests").rglob("test_*.py"))
             if f.relative_to(tree / "tests").parts[0] not in NOT_RUN]  # fmt: skip
    mine = [f for f in found if f.is_relative_to(tree / "tests" / room)]

    def named(file: Path) -> tuple[int, bool, int]:
        """Sort key: parts of the name that a file mentions, its room, and how often it does."""
        counts = [len(re.findall(rf"\b{part}\b", file.read_text())) for part in parts]
        return -sum(count > 0 for count in counts), file not in mine, -sum(counts)

    order = {file: named(file) for file in found if "cli" not in file.parts}
    chosen = sorted((f for f in order if order[f][2]), key=lambda f: order[f])
    named_so = tree / "tests" / room / f"test_{file.stem}.py"
    given = [tree / "tests" / part for part in tests.split() if (tree / "tests" / part).exists()]
    first = [*given, *[named_so] * named_so.exists(), *chosen[:10], *mine]
    return [str(path.relative_to(tree)) for path in dict.fromkeys(first)]


def run_tests(tree: Path, paths: Sequence[str]) -> tuple[str, str]:
    """Run tests in a fork of this process, up to the first failure; return outcome and test."""
    log = tree / "log.txt"
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree / "src"))
        os.environ |= {"PYTHONPATH": str(tree / "src"), "WANDB_MODE": "offline"}
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = 70
        with contextlib.suppress(BaseException):
            import pytest

            options = ["-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
            status = int(pytest.main([*options, *paths]))
            sys.stdout.flush()
        os._exit(status)
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "no end", ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    if code in (0, 5):  # passed, or no test is left
        return "MISSED", ""
    found = re.search(r"\n(?:FAILED|ERROR) tests/(\S+)", log.read_text(errors="replace"))
    return "caught", found[1] if found else f"status {code}"


def run(faults: Sequence[tuple[Fault, str]]) -> Iterator[Fault]:
    """Yield each fault with its outcome."""
    revision = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
                              capture_output=True, text=True).stdout.strip()  # fmt: skip
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            __import__(name)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        defined, stamp = functions(tree / "src"), 1_000_000_000
        for fault, tests in faults:
            place = planted(fault, defined)
            if place is None:
                yield replace(fault, outcome="not applicable", by="", seconds="", commit=revision)
                continue
            file, text = place
            right, began = file.read_bytes(), time.monotonic()
            for content in (text, right):  # each with a time of its own, for Python's caches
                file.write_bytes(content)
                stamp += 1
                os.utime(file, (stamp, stamp))
                if content is text:
                    outcome, by = run_tests(tree, tests_of(fault, file, tree, tests))
            seconds = f"{time.monotonic() - began:.0f}"
            yield replace(fault, outcome=outcome, by=by, seconds=seconds, commit=revision)


def read_results() -> list[Fault]:
    """Return the rows of results/faults.csv."""
    with RESULTS.open("a+", newline="") as file:
        file.seek(0)
        return [Fault(**(row | {"number": int(row["number"])})) for row in csv.DictReader(file)]


def write_results(faults: Sequence[Fault]) -> None:
    """Write results/faults.csv, planted faults first."""
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Fault)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, faults))


def main() -> None:
    """Run faults, print and write their outcomes; exit status 1 where a planted one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slice", default="0/1", help="K/N: every N-th fault, from the K-th")
    parser.add_argument("--only", nargs="+", default=[""], help="texts, one of which a name has")
    parser.add_argument("--kind", choices=("planted", "mutants"))
    parser.add_argument("--new", action="store_true", help="those without an outcome")
    parser.add_argument("--draw", type=int, help="draw so many mutants anew and run nothing")
    args = parser.parse_args()
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    tests = {("planted", r["at"], r["old"], r["new"]): r.get("tests", "") for r in rows}
    kept = {(f.kind, f.at, f.old, f.new, f.number): f for f in read_results()}
    listed = [kept.get((*key, 0), Fault(*key)) for key in tests]
    listed += drawn(args.draw) if args.draw else [f for f in kept.values() if f.kind != "planted"]
    write_results(listed)
    if args.draw:
        return
    first, step = map(int, args.slice.split("/"))
    todo = [
        f for f in listed
        if any(text in f.at for text in args.only)
        and args.kind in (None, "planted" if f.kind == "planted" else "mutants")
        and not (args.new and f.outcome)
    ][first::step]  # fmt: skip
    pairs = [(f, tests.get((f.kind, f.at, f.old, f.new), "")) for f in todo]
    done = []
    for before, fault in zip(todo, run(pairs), strict=True):
        listed = [fault if f == before else f for f in read_results()]  # others may write, too
        write_results(listed)
        done.append(fault)
        words = f"{fault.at}: {fault.old} -> {fault.new or 'nothing'}"
        print(f"{fault.outcome:14} {fault.seconds:>4} s  {words[:90]}  {fault.by}", flush=True)
    for kind, chosen in (("planted", True), ("mutants", False)):
        counts = Counter(f.outcome for f in listed if (f.kind == "planted") == chosen)
        share = counts["caught"] / max(1, counts["caught"] + counts["MISSED"])
        print(f"{kind}: {dict(counts)}; {share:.1%} of those that were run are caught")
    sys.exit(any(fault.outcome == "MISSED" and fault.kind == "planted" for fault in done))


if __name__ == "__main__":
    main()
