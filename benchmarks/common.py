"""What both sides of a benchmark are given, what each reports, and where it was measured."""

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

from lightning_rlhf.core.types import Prompts
from lightning_rlhf.stages.processor import keep_large_blocks

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "peft", "lightning", "accelerate", "trl")

Score = Callable[[Tensor, Tensor], Tensor]
"""From prompts with responses, [B, P+T], and the mask of response tokens, [B, T], to scores."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One problem and one recipe of PPO, the same for both sides."""

    iterations: int
    episodes: int
    """Responses an iteration."""
    response_tokens: int
    """A response is cut here."""
    end_token: int
    """Ends a response; an id that the model does not have makes every response full length."""
    score: Score
    lr: float
    value_lr_factor: float = 1.0
    """Learning rate of the critic over that of the policy."""
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
        """An iteration."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Facts of one iteration."""

    seconds: float
    """From the end of the iteration before."""
    gc_seconds: float
    """Of these, in Python's garbage collector."""
    score: float
    """Mean over responses."""
    kl: float
    """Policy to reference: mean over responses of the summed log-ratio, nats."""
    optimizer_steps: int
    response_tokens: float
    """Mean over responses, end token included."""


OnIteration = Callable[[Iteration], None]


class Clock:
    """Times iterations, and refuses one that did not take its optimizer steps.

    The time that `on_iteration` takes belongs to no iteration.
    """

    def __init__(self, setting: Setting, on_iteration: OnIteration) -> None:
        self.expected = setting.optimizer_steps
        self.on_iteration = on_iteration
        self.steps = 0
        self.gc_seconds = 0.0
        gc.callbacks.append(self.collect)
        self.started = time.perf_counter()

    def collect(self, phase: str, info: object) -> None:
        """Called by the garbage collector before and after it works."""
        now = time.perf_counter()
        self.gc_seconds += now if phase == "stop" else -now

    def count(self, *_: object) -> None:
        """To be hooked into the optimizer."""
        self.steps += 1

    def finish(self, *, score: float, kl: float, response_tokens: float) -> None:
        """The end of an iteration and the start of the next."""
        seconds = time.perf_counter() - self.started
        if self.steps != self.expected:
            raise RuntimeError(f"{self.steps} optimizer steps in an iteration, not {self.expected}")
        self.on_iteration(
            Iteration(
                seconds=seconds,
                gc_seconds=self.gc_seconds,
                score=score,
                kl=kl,
                optimizer_steps=self.steps,
                response_tokens=response_tokens,
            )
        )
        self.steps = 0
        self.gc_seconds = 0.0
        self.started = time.perf_counter()

    def stop(self) -> None:
        """After the last iteration."""
        gc.callbacks.remove(self.collect)


def calm(*, keep_memory: bool = True) -> None:
    """One thread, memory and denormals as our command line has them, no word from the libraries."""
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
    """Left-padded prompts of uneven length, of all tokens but 0."""
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
    """When, where and with what a result was measured."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores of which 1 was used, "
        f"{torch.get_num_threads()} thread, {platform.system()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        + f", Python {platform.python_version()}",
    }


def commit() -> str:
    """The commit of this working tree, and whether it has changes of its own."""
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
    """Rows of cells as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
