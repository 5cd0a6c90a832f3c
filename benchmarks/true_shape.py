r"""Measure memory and seconds of all stages on Qwen3.5-0.8B at its true shape, with random weights.

    .venv/bin/python benchmarks/true_shape.py [--quick] [--steps 2] [--folder FOLDER] \
        [--override KEY=VALUE]

The checkpoint is made as the hub stores it: bf16 weights of the language model inside the
multimodal wrapper, whose vision tower is made small here. The stages are the commands of a user,
one after the other, each in a process of its own, with the callback `Phases` of this file.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from common import ROOT, markdown_table
from machine import bandwidth, options, write
from memory import forget_peak, resident

LAYERS = 24
SHAPE = {
    "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 1, "bos_token_id": None,
}  # fmt: skip
QUICK = SHAPE | {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
          "num_position_embeddings": 4, "patch_size": 4}  # fmt: skip
DATA = ROOT / "recipes" / "quickstart" / "data"
ROWS = {"sft": 16, "preferences": 16, "prompts": 16}
"""Kind of data -> number of training rows; a quarter of them are for validation."""
BF16 = ("trainer=cpu", "trainer.precision=bf16-mixed", "trainer.weights_dtype=bfloat16")
BATCH = 4
STEPS = {
    "sft": (f"sft.batch_size={BATCH}", "sft.microbatch_size=2"),
    "rm": (f"rm.batch_size={BATCH}", "rm.microbatch_size=2", "rm.calibration_samples=4"),
    "ppo": (
        "ppo.rollout_batch_size=8", "ppo.minibatch_size=4", "ppo.microbatch_size=4",
        "ppo.ppo_epochs=1", "ppo.max_response_tokens=16",
    ),
    "dpo": (f"dpo.batch_size={BATCH}", "dpo.microbatch_size=2"),
}  # fmt: skip
PHASES = ("start", "evaluation", "step", "end")


class Phases(L.Callback):
    """Callback that writes seconds and peak memory of each phase of a stage to a JSON file.

    start: from the start of the process to the first batch or evaluation; end: from the last one to
    the end of the process.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.peaks: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.roles: dict[str, dict[str, int]] = {}
        self.since = time.time() - started()
        atexit.register(self.finish)

    def close(self, phase: str) -> None:
        """End a phase, and start the next one."""
        now = time.time() - started()
        self.seconds[phase].append(now - self.since)
        self.peaks[phase].append(resident("VmHWM") or 0.0)
        self.since = now
        forget_peak()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from lightning_rlhf.stages.memory_plan import role_bytes

        for role, own in role_bytes(pl_module, pl_module.device).items():
            self.roles[role] = {
                "weights": own.weights, "gradients": own.gradients, "optimizer": own.optimizer
            }  # fmt: skip
        self.since = 0.0
        self.close("start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.since = time.time() - started()
        forget_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self.close("step")

    def on_validation_start(self, *_: Any) -> None:
        self.since = time.time() - started()
        forget_peak()

    def on_validation_end(self, *_: Any) -> None:
        self.close("evaluation")

    def finish(self) -> None:
        """Write the file; called when the process ends."""
        self.close("end")
        found = {"seconds": self.seconds, "peaks_mb": self.peaks, "roles": self.roles}
        self.file.write_text(json.dumps(found))


def started() -> float:
    """Return the time at which this process started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def make_checkpoint(folder: Path, shape: dict[str, Any]) -> int:
    """Write a checkpoint with random bf16 weights; return the number of its text parameters."""
    from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    torch.manual_seed(0)
    vision = VISION | {"out_hidden_size": shape["hidden_size"]}
    config = Qwen3_5Config(text_config=shape, vision_config=vision, tie_word_embeddings=True)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3_5ForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "tokenizer").save_pretrained(
        folder
    )
    return sum(p.numel() for p in model.model.language_model.parameters())


def make_data(folder: Path) -> list[str]:
    """Write the first rows of the quickstart's data; return the overrides that name them."""
    words = ["data=files"]
    sections = {"sft": "demonstrations"}
    for kind, count in ROWS.items():
        for split, rows in (("train", count), ("val", count // 4)):
            lines = (DATA / f"{kind}_{split}.jsonl").read_text().splitlines()[:rows]
            file = folder / f"{kind}_{split}.jsonl"
            file.write_text("\n".join(lines) + "\n")
            words.append(f"data.{sections.get(kind, kind)}.{split}={file}")
    return words


def command(folder: Path, *words: str) -> tuple[float, float]:
    """Run a command of the package; return its seconds and its peak memory in MB."""
    begun = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{ROOT / 'src'}"}
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_rlhf", *words],
            cwd=folder, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} failed: {folder / 'log.txt'}")
    return time.perf_counter() - begun, usage.ru_maxrss * 1024 / 1e6


def run_stage(
    folder: Path, stage: str, common: list[str], data: list[str], steps: int
) -> dict[str, Any]:
    """Run a stage; return its seconds and memory by phase, and its metrics of time.

    steps: number of optimizer steps, of PPO that of its iterations.
    """
    file = folder / f"{stage}.json"
    kinds = {"sft": "demonstrations", "rm": "preferences", "dpo": "preferences", "ppo": "prompts"}
    own = [word for word in data if word == "data=files" or f"data.{kinds[stage]}." in word]
    callback = [
        "+callbacks.phases._target_=true_shape.Phases", f"+callbacks.phases.file={file}",
    ]  # fmt: skip
    passes = steps * BATCH / ROWS["sft"]
    length = f"ppo.iterations={steps}" if stage == "ppo" else f"{stage}.epochs={passes}"
    seconds, peak = command(
        folder, f"stage={stage}", *common, *own, *STEPS[stage], length, *callback, "preflight=off"
    )
    found: dict[str, Any] = json.loads(file.read_text())
    rows = (folder / "outputs" / "default" / "qwen0.8b" / stage / "metrics.csv").read_text()
    times = [
        {name: float(cell) for name, cell in row.items() if name.startswith("time/") and cell}
        for row in csv.DictReader(rows.splitlines())
    ]
    return found | {"total_s": seconds, "peak_mb": peak, "times": [row for row in times if row]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.perf_counter()
    parameters = make_checkpoint(folder / "model", QUICK if args.quick else SHAPE)
    print(
        f"checkpoint of {parameters:,} parameters: {time.perf_counter() - begun:.0f} s", flush=True
    )
    data = make_data(folder)
    common = ["model=qwen0.8b", f"model.name_or_path={folder / 'model'}", *BF16,
              f"trainer.threads={torch.get_num_threads()}", "data.max_response_tokens=48",
              *args.words]  # fmt: skip
    found: dict[str, Any] = {"parameters": parameters, "stages": {}}
    for stage in STEPS:
        found["stages"][stage] = run_stage(folder, stage, common, data, args.steps)
        print(f"{stage}: {found['stages'][stage]['total_s']:.0f} s", flush=True)
    final = folder / "outputs" / "default" / "qwen0.8b" / "ppo" / "final"
    seconds, peak = command(folder, "export", str(final), "--merge", "--dtype", "bfloat16")
    found["merge"] = {"total_s": seconds, "peak_mb": peak}
    found["total_s"] = time.perf_counter() - begun
    found["gigabytes_per_s"] = bandwidth(args.device, 0.15)
    return found


def roles_table(stages: dict[str, Any]) -> str:
    rows = [
        [
            stage,
            role,
            *(f"{own[part] / 1e6:,.1f}" for part in ("weights", "gradients", "optimizer")),
        ]
        for stage, found in stages.items()
        for role, own in found["roles"].items()
    ]
    header = ["stage", "role", "weights, MB", "gradients, MB", "optimizer, MB"]
    return markdown_table(header, rows)


def phases_table(stages: dict[str, Any]) -> str:
    rows = []
    for stage, found in stages.items():
        for phase in PHASES:
            seconds, peaks = found["seconds"][phase], found["peaks_mb"][phase]
            if seconds:
                each = ", ".join(f"{one:.1f}" for one in seconds)
                rows.append([stage, phase, each, f"{max(peaks):,.0f}"])
        rows.append([stage, "whole command", f"{found['total_s']:.1f}", f"{found['peak_mb']:,.0f}"])
    return markdown_table(["stage", "phase", "seconds, each", "peak resident set, MB"], rows)


def iterations_table(stages: dict[str, Any]) -> str:
    names = ("time/rollout_s", "time/score_s", "time/update_s")
    rows = [
        [str(i), *(f"{row[name]:.1f}" for name in names)]
        for i, row in enumerate((r for r in stages["ppo"]["times"] if names[0] in r), start=1)
    ]
    return markdown_table(["iteration of PPO", "rollout, s", "score, s", "update, s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/true_shape"),
        help="folder that is emptied and filled with 4 GB (default: outputs/true_shape)",
    )  # fmt: skip
    parser.add_argument(
        "--override", dest="words", metavar="KEY=VALUE", action="append", default=[],
        help="override for all stages, such as model.quantization=nf4; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=2, choices=range(1, 5), help="of each stage (default: 2)"
    )
    args = options(str(__doc__), parser)
    results = measure(args)
    stages, limit = results["stages"], results["gigabytes_per_s"]
    per_token = 2 * results["parameters"] / 1e9 / limit
    write(
        args,
        "true_shape",
        "Qwen3.5-0.8B at its true shape",
        results,
        f"Random weights, {results['parameters'] / 1e6:.1f}M parameters of the language model "
        f"({LAYERS} layers, hidden size 1024, vocabulary 248,320, tied), loaded by `model=qwen0.8b "
        "model.name_or_path=FOLDER` and trained on the CPU with bf16 weights and autocast, in "
        f"batches of {BATCH} rows of the quickstart's data (PPO: {args.steps} iterations of 8 "
        f"responses of 16 tokens). All of it took {results['total_s']:.0f} s, the making of the "
        "checkpoint included.",
        "Memory by role, as parameters, gradients and AdamW's moments:",
        roles_table(stages),
        "Seconds and largest resident set by phase. start: from the command to the first batch or "
        "evaluation, imports and loading included; end: from the last one to the end of the "
        "command.",
        phases_table(stages),
        iterations_table(stages),
        f"The machine moves {limit:.1f} GB/s, so that reading all weights once for a step of "
        f"decoding takes {per_token:.2f} s at least, {16 * per_token:.1f} s for 16 tokens of all "
        "8 responses.",
        f"`export ppo/final --merge --dtype bfloat16`: {results['merge']['total_s']:.1f} s, peak "
        f"{results['merge']['peak_mb']:,.0f} MB, of which the weights in float32 are "
        f"{4 * results['parameters'] / 1e6:,.0f} MB.",
    )


if __name__ == "__main__":
    main()
