"""Settings, measured facts and helpers that both sides of a benchmark share."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from lightning_rlhf.core.records import Prompts
from lightning_rlhf.runs.accelerator import keep_large_blocks

ROOT = Path(__file__).parents[1]
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # imported later, it reports a lack
LIBRARIES = ("torch", "transformers", "peft", "lightning", "accelerate", "trl")

Score = Callable[[Tensor, Tensor], Tensor]
"""Function of prompts with responses, [B, P+T], and the mask of response tokens, [B, T], that
returns scores, [B]."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One task and one set of PPO hyperparameters, the same for both sides."""

    iterations: int
    """Number of PPO iterations."""
    episodes: int
    """Number of responses per iteration."""
    response_tokens: int
    """Largest number of tokens of a response."""
    end_token: int
    """Token id that ends a response; an id outside of the vocabulary gives every response its full
    length."""
    score: Score
    """Reward function."""
    lr: float
    """Learning rate of the policy."""
    value_lr_factor: float = 1.0
    """Ratio of the critic's learning rate to the policy's."""
    lr_schedule: str = "linear"
    """Shape of the learning rates after the warm-up: constant, linear or cosine."""
    warmup_fraction: float = 0.0  # of the iterations
    epochs: int = 4
    minibatches: int = 4
    kl_coef: float = 0.05
    gamma: float = 1.0
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    clip_range_vf: float = 0.2
    vf_coef: float = 0.1
    temperature: float = 1.0
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    lora_rank: int = 16
    seed: int = 0

    @property
    def optimizer_steps(self) -> int:
        """Return the number of optimizer steps per iteration."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Measurements of one PPO iteration."""

    seconds: float
    """Duration in seconds, from the end of the previous iteration."""
    processor_seconds: float
    """Processor time in seconds, of all threads of this process."""
    gc_seconds: float
    """Seconds of it spent in Python's garbage collector."""
    optimizer_steps: int
    """Number of optimizer steps."""
    response_tokens: float
    """Mean number of tokens per response, end token included."""


OnIteration = Callable[[Iteration], None]
"""Function called after each iteration."""


class Clock:
    """A timer of iterations that also checks their number of optimizer steps.

    The time spent in `on_iteration` is not counted.
    """

    def __init__(self, setting: Setting, on_iteration: OnIteration) -> None:
        self.expected = setting.optimizer_steps
        self.on_iteration = on_iteration
        gc.callbacks.append(self.collect)
        self.start()

    def start(self) -> None:
        """Start an iteration."""
        self.steps, self.gc_seconds = 0, 0.0
        self.started, self.processor_started = time.perf_counter(), time.process_time()

    def collect(self, phase: str, info: object) -> None:
        """Add the time of a garbage collection; called at its start and end by `gc.callbacks`."""
        now = time.perf_counter()
        self.gc_seconds += now if phase == "stop" else -now

    def count(self, *_: object) -> None:
        """Count an optimizer step; to be registered as a hook of the optimizer."""
        self.steps += 1

    def finish(self, response_tokens: float) -> None:
        """End an iteration, report it and start the next one.

        Raises RuntimeError where the number of optimizer steps is not the expected one.
        """
        seconds = time.perf_counter() - self.started
        processor_seconds = time.process_time() - self.processor_started
        if self.steps != self.expected:
            raise RuntimeError(f"{self.steps} optimizer steps in an iteration, not {self.expected}")
        measured = Iteration(
            seconds=seconds, processor_seconds=processor_seconds, gc_seconds=self.gc_seconds,
            optimizer_steps=self.steps, response_tokens=response_tokens,
        )  # fmt: skip
        self.on_iteration(measured)
        self.start()

    def stop(self) -> None:
        """Stop timing garbage collections."""
        gc.callbacks.remove(self.collect)


def calm(*, keep_memory: bool = True) -> None:
    """Use one thread and silence the libraries' warnings.

    keep_memory: True also applies the allocator and denormal settings of the command line.
    """
    torch.set_num_threads(1)
    if keep_memory:
        keep_large_blocks()
        torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()


def random_prompts(
    batches: int, rows: int, *, vocabulary: int, shortest: int, longest: int, seed: int
) -> list[Prompts]:
    """Return batches of random left-padded prompts of uneven length, without token 0.

    shortest, longest: smallest and largest number of tokens; one prompt per batch is longest.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for batch in range(batches):
        lengths = torch.randint(shortest, longest + 1, (rows, 1), generator=generator)
        lengths[0] = longest
        mask = torch.arange(longest) >= longest - lengths
        tokens = torch.randint(1, vocabulary, (rows, longest), generator=generator)
        index = torch.arange(batch * rows, (batch + 1) * rows)
        found.append(Prompts(tokens=tokens.where(mask, 0), mask=mask, index=index))
    return found


def circumstances() -> dict[str, str]:
    """Return date, commit, machine and library versions of a measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores of which 1 was used, "
        f"{torch.get_num_threads()} thread, {platform.system()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        + f", Python {platform.python_version()}",
    }


def commit() -> str:
    """Return the commit of this working tree, with a note where src or conf have changes."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    )
    if found.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "src", "conf"], capture_output=True)
    return found.stdout.strip() + (" with changes" if changed.stdout else "")


INSTRUCTION_SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX"}
"""Vector instruction sets by their flags in /proc/cpuinfo; each includes those before it."""


def processor() -> str:
    """Return the processor's name, family, model and largest instruction set, where known."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    if "cpu family" not in facts:
        return facts["model name"]
    flags = facts.get("flags", "").split()
    sets = [name for flag, name in INSTRUCTION_SETS.items() if flag in flags][-1:]
    generation = [f"family {facts['cpu family']}", f"model {facts['model']}", *sets]
    return f"{facts['model name']} ({', '.join(generation)})"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a header and rows of cells as a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
