"""Compare seconds and memory of an iteration of PPO between our implementation and TRL's.

    python benchmarks/ppo_vs_trl.py [--workload NAME ...] [--iterations 5] [--out FOLDER]

Each side is a separate process. The processes alternate iteration by iteration, so that other load
on the machine affects all of them. The first iteration is a warm-up and is not counted. TRL is
measured twice: unchanged, and with the memory settings of the C library that our command line uses
on a CPU, with which a process keeps the memory that it frees.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ours
import trl_peer
from common import (
    Iteration,
    Setting,
    calm,
    circumstances,
    markdown_table,
    random_prompts,
)
from workloads import LONGEST, SHORTEST, WORKLOADS, Workload, build_model, low_tokens, parameters

SIDES = ("ours", "trl", "trl_kept")


def setting_of(workload: Workload, iterations: int) -> Setting:
    return Setting(
        iterations=iterations,
        episodes=workload.episodes,
        response_tokens=workload.response,
        end_token=0 if workload.early_end else workload.vocabulary + 1,
        score=low_tokens,
        lr=1e-5,
    )


def work(
    side: str, name: str, iterations: int, peer_trains: trl_peer.Trained, talk: Connection
) -> None:
    """Run one side; the main function of its process, with one iteration per "go" received."""
    calm(keep_memory=side != "trl")
    workload = WORKLOADS[name]
    setting = setting_of(workload, iterations + 1)
    prompts = random_prompts(
        setting.iterations,
        workload.episodes,
        vocabulary=workload.vocabulary,
        shortest=SHORTEST,
        longest=LONGEST,
        seed=0,
    )
    model = build_model(workload)
    idle = memory("VmRSS")
    forget_peak()

    def turn(iteration: Iteration) -> None:
        talk.send(iteration)
        talk.recv()

    talk.recv()
    if side == "ours":
        ours.train(model, setting, prompts, turn, critic=workload.critic)
    else:
        trl_peer.train(model, setting, prompts, turn, policy=peer_trains)
    talk.send({"idle_mb": idle, "peak_mb": memory("VmHWM")})


def memory(field: str) -> float | None:
    """Return a field of /proc/self/status of this process in MB; None where there is none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else None


def forget_peak() -> None:
    """Reset the kernel's peak of resident memory (VmHWM) to the current use."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, iterations: int, peer_trains: trl_peer.Trained) -> dict[str, Any]:
    """Return the measurements of all sides on a workload, run in turn iteration by iteration."""
    context = multiprocessing.get_context("spawn")
    talks, processes = {}, []
    for side in SIDES:
        talks[side], other = context.Pipe()
        process = context.Process(target=work, args=(side, name, iterations, peer_trains, other))
        process.start()
        other.close()
        processes.append(process)
    found: dict[str, list[Iteration]] = {side: [] for side in SIDES}
    for _ in range(iterations + 1):
        for side in SIDES:
            talks[side].send("go")
            found[side].append(receive(talks[side], side, name))
    results: dict[str, Any] = {}
    for side in SIDES:
        talks[side].send("go")
        facts = receive(talks[side], side, name)
        results[side] = facts | {"iterations": [asdict(i) for i in found[side][1:]]}
    for process in processes:
        process.join()
    workload = WORKLOADS[name]
    return {"parameters": parameters(workload), "workload": asdict(workload), **results}


def receive(talk: Connection, side: str, name: str) -> Any:
    try:
        return talk.recv()
    except EOFError as error:
        raise RuntimeError(f"{side} ended before its time on {name}; see above") from error


def summary(result: dict[str, Any], side: str, fact: str) -> tuple[float, float, float]:
    """Return median, smallest and largest value of a measurement over iterations."""
    values = [iteration[fact] for iteration in result[side]["iterations"]]
    return statistics.median(values), min(values), max(values)


def table(results: dict[str, Any]) -> str:
    header = ["workload", "model", "response tokens, ours / TRL", "s an iteration, ours",
              "s an iteration, TRL", "TRL with our settings", "TRL's garbage collection, s",
              "TRL / ours", "TRL with our settings / ours", "MB above idle, ours / TRL",
              "memory, ours / TRL"]  # fmt: skip
    rows = []
    for name, result in results.items():
        seconds = {side: summary(result, side, "seconds") for side in SIDES}
        tokens = {
            side: statistics.mean(i["response_tokens"] for i in result[side]["iterations"])
            for side in SIDES
        }
        rows.append(
            [
                name,
                f"{result['parameters'] / 1e6:.2f}M",
                f"{tokens['ours']:.1f} / {tokens['trl']:.1f}",
                *(f"{m:.2f} [{low:.2f}-{high:.2f}]" for m, low, high in seconds.values()),
                f"{summary(result, 'trl', 'gc_seconds')[0]:.2f}",
                f"{seconds['trl'][0] / seconds['ours'][0]:.2f}",
                f"{seconds['trl_kept'][0] / seconds['ours'][0]:.2f}",
                *memory_above_idle(result),
            ]
        )
    return markdown_table(header, rows)


def memory_above_idle(result: dict[str, Any]) -> list[str]:
    """Return two table cells: MB above idle of ours and of unchanged TRL, and their ratio."""
    sides = [result[side] for side in SIDES[:2]]
    if any(facts["peak_mb"] is None or facts["idle_mb"] is None for facts in sides):
        return ["-"] * 2
    ours, peer = (facts["peak_mb"] - facts["idle_mb"] for facts in sides)
    return [f"{ours:.0f} / {peer:.0f}", f"{ours / peer:.2f}"]


def report(results: dict[str, Any], facts: dict[str, str], peer_trains: trl_peer.Trained) -> str:
    """Return the report: the table with its explanation."""
    iterations = len(next(iter(results.values()))["ours"]["iterations"])
    peer = "an adapter of the same rank" if peer_trains == "lora" else "all weights"
    lines = [
        "# An iteration of PPO, ours and TRL's",
        f"{facts['date']}, commit {facts['commit']}; {facts['machine']}; {facts['versions']}.",
        f"Both sides: the same weights, {Workload.episodes} episodes an iteration, prompts of "
        f"{SHORTEST} to {LONGEST} tokens, responses of at most {Workload.response}, 4 epochs of 4 "
        "minibatches and 16 optimizer steps, which are counted; a reward that costs nothing. "
        f"Median of {iterations} iterations [smallest-largest], the sides in turn, iteration by "
        "iteration, after one that warms up.",
        table(results),
        "By default our value head sits on the policy's trunk, while TRL's value model is a model "
        "of its own, which reads and learns every response once more. "
        + shared_trunk(results)
        + f"Our policy is a LoRA adapter of rank 16; TRL trains {peer} of the policy and all "
        "weights of the value model. With `8m-bf16` all weights are bf16; our adapter and value "
        "head are fp32 and compute under bf16 autocast, as with trainer=gpu. TRL calls the "
        "garbage collector twice an iteration, which takes the same time on a model of any size.",
        "Our settings, those of our command line on a CPU: the process keeps the memory that it "
        "frees (glibc's mallopt), and numbers below 1e-38 are 0 (denormals are flushed). TRL's was "
        "measured as it is, and with the same settings.",
        "Memory: the largest resident set (VmHWM, started anew after the imports and one copy of "
        "the model) less the resident set at that moment.",
    ]
    return "\n\n".join(lines) + "\n"


def shared_trunk(results: dict[str, Any]) -> str:
    """Return a sentence on the shared trunk's share of the difference, where it was measured."""
    if not {"tiny", "tiny-critic"} <= results.keys():
        return "`tiny-critic` gives ours a critic with an adapter of its own. "
    head, adapter = (
        summary(results[name], "ours", "seconds")[0] / summary(results[name], "trl", "seconds")[0]
        for name in ("tiny", "tiny-critic")
    )
    return (
        "`tiny-critic` gives ours a critic with an adapter of its own: beside `tiny`, the shared "
        f"trunk is {(adapter - head) / (1 - head):.0%} of the difference to TRL. "
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--peer-trains", choices=["all", "lora"], default="all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    calm()
    facts = circumstances()
    stem = "ppo_vs_trl" if args.peer_trains == "all" else "ppo_vs_trl_lora"
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in args.workload:
        results[name] = measure(name, args.iterations, args.peer_trains)
        print(table({name: results[name]}), flush=True)
        everything = facts | {"workloads": results}
        (args.out / f"{stem}.json").write_text(json.dumps(everything, indent=1, default=str) + "\n")
        (args.out / f"{stem}.md").write_text(report(results, facts, args.peer_trains))


if __name__ == "__main__":
    main()
