"""Runs of the check of a GPU: where and how they are made, and what they measure."""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_rlhf.callbacks.compute import iteration_totals, peak_memory, step_totals
from lightning_rlhf.core.errors import RLHFError, first_line
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.results import RESULT, IterationResult
from lightning_rlhf.kernels.patch import rounding_of
from lightning_rlhf.models.loading import scale_bytes
from lightning_rlhf.parallel.world import world
from lightning_rlhf.stages.memory_plan import by_role
from true_shape import DATA

TINY, TRUE = "tiny", "0.8b"
"""Names of the shapes: model=tiny in fp32, and Qwen3.5-0.8B with random weights in bf16."""
PRECISION = {TINY: "32-true", TRUE: "bf16-mixed"}
DTYPE = {TINY: torch.float32, TRUE: torch.bfloat16}
STEPS = {
    TINY: {
        "sft": ("epochs=1", "batch_size=8", "microbatch_size=8"),
        "rm": ("epochs=1", "batch_size=8", "microbatch_size=8", "calibration_samples=4"),
        "dpo": ("epochs=1", "batch_size=8", "microbatch_size=8"),
        "ppo": ("iterations=2", "rollout_batch_size=16", "minibatch_size=16", "microbatch_size=8",
                "ppo_epochs=1", "max_response_tokens=12"),
    },
    TRUE: {
        "sft": ("epochs=1", "batch_size=16", "microbatch_size=8"),
        "rm": ("epochs=1", "batch_size=8", "microbatch_size=4", "calibration_samples=4"),
        "dpo": ("epochs=1", "batch_size=8", "microbatch_size=4"),
        "ppo": ("iterations=3", "rollout_batch_size=32", "minibatch_size=16", "microbatch_size=8",
                "ppo_epochs=1", "max_response_tokens=64"),
    },
}  # fmt: skip
"""Shape -> stage -> sizes of its run, keys of the stage's section."""
KINDS = {"sft": "demonstrations", "rm": "preferences", "dpo": "preferences", "ppo": "prompts"}
COUNT = {TINY: 16, TRUE: 64}
"""Number of rows of each file of data."""
JOINED = {TINY: 1, TRUE: 10}
"""Number of the quickstart's rows of which one is made: about 10 and 100 tokens."""
LONGEST = {TINY: 32, TRUE: 256}
"""Largest number of tokens of a response in the data, and of one that a reward model is centred by.
"""
LEAST = 0.1
"""Smallest number to which a difference is taken relative."""
MOST_OTHER = 0.02
"""Largest share of responses that rounding may change."""


class CheckError(RLHFError):
    """A row has computed something else than it should."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a row has measured."""

    equality: str = ""
    """Agreement with the CPU."""
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Phase -> tokens a second."""
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Phase -> necessary floating-point operations a second, all GPUs together."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Phase -> bytes of weights read a second."""
    peak_bytes: int = 0
    """Largest memory of the tensors on the first GPU; 0 where it was not measured."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Role -> bytes of its weights, gradients and optimizer."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Data type -> FLOP/s of a large product; "memory" -> bytes a second."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the rows compute, and where their files are."""

    device: torch.device
    words: tuple[str, ...]
    """Overrides of a configuration that choose the device."""
    arguments: Callable[[str], dict[str, Any]]
    """Function that returns the arguments of lightning.Trainer for the device at a precision."""
    gpus: int
    """Number of GPUs."""
    folder: Path
    """Folder of checkpoint, data and runs."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of the check; None where it is not set."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the check."""

    name: str
    shape: str
    work: Callable[[Place, Row, float], Found]
    """Function of the place, the row and the seconds that it may take."""
    seconds: float
    """Usual duration, without which the row is not started."""
    stage: str = "ppo"
    words: tuple[str, ...] = ()
    """Further overrides."""
    on_all: bool = False
    """True if it computes on all GPUs."""
    needs: tuple[str, ...] = ()
    """Modules that it imports, or programs that it starts, and that may be missing."""


def overrides(place: Place, row: Row) -> tuple[str, ...]:
    """Return the overrides of a row's run, but for the device; its data are written."""
    folder, kind = place.folder, KINDS[row.stage]
    model: tuple[str, ...] = ("model=tiny",)
    if row.shape == TRUE:
        model = ("model=qwen0.8b", f"model.name_or_path={checkpoint(place)}")
    reward = ("reward=random",) if row.stage == "ppo" else ()
    return (
        *model, "data=files", *write_data(folder, row.shape, kind), *reward, *row.words,
        "policy.checkpoint=base", f"data.max_response_tokens={LONGEST[row.shape]}",
        f"outputs={folder / 'outputs'}",
        *(f"{row.stage}.{size}" for size in STEPS[row.shape][row.stage]),
    )  # fmt: skip


def checkpoint(place: Place) -> Path:
    """Return the folder of the checkpoint of the true shape. Raises CheckError without one."""
    if not (folder := place.folder / "model").is_dir():
        raise CheckError(f"{folder} is missing: the row that makes it was not run, or failed")
    return folder


def write_data(folder: Path, shape: str, kind: str) -> list[str]:
    """Write rows of the quickstart's data, joined to longer ones; return their overrides."""
    file, words = {"demonstrations": "sft"}.get(kind, kind), []
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", COUNT[shape]), ("val", 4)):
        lines = (DATA / f"{file}_{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines[: count * JOINED[shape]]]
        groups = [rows[i :: len(rows) // JOINED[shape]] for i in range(len(rows) // JOINED[shape])]
        joined = [{key: " ".join(row[key] for row in group) for key in rows[0]} for group in groups]
        path = folder / f"{shape}_{file}_{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in joined))
        words.append(f"data.{kind}.{split}={path}")
    return words


class Measure(L.Callback):
    """Callback that measures a run, and writes what it found as JSON where it is given a file."""

    def __init__(self, file: str | None = None) -> None:
        self.found: dict[str, Any] = {"first": None, "phases": [], "fault": None}
        if file is not None and world().rank == 0:
            atexit.register(lambda: Path(file).write_text(json.dumps(self.found)))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self.found["roles"] = {
            role: sum(p.nbytes * (4 if p.requires_grad else 1) + scale_bytes(p) for p in own)
            for role, own in by_role(pl_module).items()
        }

    def on_train_batch_start(self, *_: Any) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        result = outputs[RESULT]
        seconds = time.perf_counter() - self.started
        self.found["phases"].append(phases(result, pl_module, batch, seconds))
        self.found["first"] = self.found["first"] or first_numbers(result)
        self.found["peak"] = peak_memory(pl_module.device)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, Exception):
            self.found["fault"] = why(exception)


def first_numbers(result: Any) -> dict[str, Any]:
    """Return the responses, the loss and the gradient norm of a step."""
    step, tokens = result, []
    if isinstance(result, IterationResult):
        step, experience = result.updates[0], result.experience
        tokens = real_tokens(experience.tokens.cpu(), experience.mask.cpu())
    return {"tokens": tokens, "loss": step.loss.item(), "grad_norm": step.grad_norm.item()}


def phases(
    result: Any, module: Any, batch: Any, seconds: float
) -> dict[str, tuple[float, float, float, float]]:
    """Return seconds, tokens, operations and bytes of weights read of each phase of a step."""
    if not isinstance(result, IterationResult):
        totals = step_totals(module, batch, seconds)
        return {"step": (seconds, totals["trained_tokens"], totals["flops"], 0.0)}
    totals, of = iteration_totals(module, result), result.seconds
    weights = [p.nbytes for n, p in module.roles.causal_lm.named_parameters() if "lora_" not in n]
    read = result.experience.response_mask.shape[1] * sum(weights)
    return {
        "rollout": (of["rollout"], totals["generated_tokens"], totals["rollout_flops"], read),
        "score": (of["score"], totals["scored_tokens"], totals["score_flops"], 0.0),
        "update": (of["update"], totals["trained_tokens"], totals["update_flops"], 0.0),
    }


def summary(measured: Mapping[str, Any], equality: str) -> Found:
    """Return what a run measured; its first step warms up and is not counted."""
    steps = measured["phases"][1:] or measured["phases"]
    sums = {phase: [sum(x) for x in zip(*(s[phase] for s in steps), strict=True)]
            for phase in steps[0]}  # fmt: skip
    rates = [{p: x[i] / x[0] for p, x in sums.items() if x[i]} for i in (1, 2, 3)]
    return Found(
        equality=equality, tokens_per_s=rates[0], flops_per_s=rates[1], bytes_per_s=rates[2],
        peak_bytes=measured["peak"], roles=measured["roles"],
    )  # fmt: skip


def agreement(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return how the first step agrees with that of the CPU.

    Loss and gradient norm are compared where all responses are equal.
    Raises CheckError where it does not agree.
    """
    texts = []
    if pairs := list(zip(found["tokens"], expected["tokens"], strict=True)):
        other = sum(a != b for a, b in pairs)
        texts = [f"{len(pairs) - other} of {len(pairs)} responses"]
        if other > MOST_OTHER * len(pairs):
            raise CheckError(f"{other} of {len(pairs)} responses are not those of the CPU")
        if other:
            return texts[0]
    limit = rounding_of(torch.float32, 2)
    for name in ("loss", "grad_norm"):
        a, b = found[name], expected[name]
        apart = abs(a - b) / max(abs(b), LEAST)
        texts.append(f"{name} to {apart:.0e}")
        if not apart <= limit:
            raise CheckError(f"{name} is {a:.6g}, {b:.6g} on the CPU; allowed: {limit:g} apart")
    return ", ".join(texts)


def why(error: Exception) -> str:
    """Return the reason of a failure in one line, by the type of the error."""
    kind = "" if isinstance(error, RLHFError) else f"{type(error).__name__}: "
    return kind + first_line(error)
