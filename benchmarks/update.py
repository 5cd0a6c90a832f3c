"""What the fast layers save, and what else an update depends on: with each and without it.

python benchmarks/update.py [--quick] [--device cpu] [--clock cpu]
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from common import markdown_table
from counting import Memory
from lightning_rlhf.core import logprobs, masking
from lightning_rlhf.core.config import KernelChoice
from lightning_rlhf.core.records import Experience, Prompts
from lightning_rlhf.kernels import decoder, decoding, lora
from lightning_rlhf.kernels import layers as kernel_layers
from lightning_rlhf.kernels.layers import ChunkedDeltaNet, FastLayer, FusedRMSNorm, library_class
from lightning_rlhf.kernels.lora import FusedLoRALinear
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import ppo
from lightning_rlhf.modules.ppo import TRAINING, PPOModule
from lightning_rlhf.rollout import score
from lightning_rlhf.rollout.native import position_ids
from lightning_rlhf.rollout.score import response_logprobs
from machine import in_turn, middle, options, seconds, write
from workloads import WORKLOADS, build_module, experience_of, prompts_of, within_fit

MICROBATCH = 8
KERNELS = {
    "tiny-eos": (8, 32),
    "vocab32k-eos": (8,),
    "hybrid": (8,),
    "8m": (8,),
    "8m-bf16": (8,),
}
"""Workload -> sizes of a micro-batch with which the groups of fast layers are measured."""
SIZES = {2048: 1024, 32768: 512, 248320: 128}
"""Vocabulary -> tokens."""
WIDTH = 64
FAST = "all fast"


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the targets and entropy as the formulas say, by autograd."""
    table = torch.log_softmax(logits.float(), -1)
    return table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)


class EveryPosition:
    """The trunk reads left-padded rows with a mask; every position gets logits."""

    def hidden(self, roles: Roles, batch: Experience) -> Tensor:
        self.all = roles.causal_lm.base_model(
            input_ids=batch.tokens,
            attention_mask=batch.mask.long(),
            position_ids=position_ids(batch.mask),
            use_cache=False,
        ).last_hidden_state
        return self.responses(self.all, batch)

    def logprobs(
        self, roles: Roles, hidden: Tensor, batch: Experience, temperature: float, **_: Any
    ) -> tuple[Tensor, Tensor]:
        logits = self.responses(roles.head(self.all), batch)
        return plain(logits / temperature, batch.responses[batch.response_mask])

    @staticmethod
    def responses(x: Tensor, batch: Experience) -> Tensor:
        length = batch.response_mask.shape[1]
        return x[:, -length - 1 : -1][batch.response_mask]


def everywhere(roles: Roles, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Hidden states of all positions, of which the wanted ones are taken."""
    return roles.hidden(tokens)[wanted]


@contextmanager
def recomputed(module: PPOModule) -> Iterator[None]:
    """Recompute layers as model.gradient_checkpointing=true does."""
    module.roles.recompute_layers()
    try:
        yield
    finally:
        for layer in module.roles.causal_lm.base_model.layers:
            del layer.forward


@contextmanager
def kernels(module: PPOModule, choice: KernelChoice) -> Iterator[None]:
    """Compute with model.kernels=choice."""
    roles = module.roles
    before = roles._kernel_choice
    roles._kernel_choice = choice
    roles._set_kernels()
    try:
        yield
    finally:
        roles._kernel_choice = before
        roles._set_kernels()


@contextmanager
def by_library(module: PPOModule, *kinds: type[FastLayer]) -> Iterator[None]:
    """Give layers of these kinds the classes of their library."""
    layers = [layer for layer in module.roles.modules() if isinstance(layer, kinds)]
    classes = [type(layer) for layer in layers]
    for layer in layers:
        layer.__class__ = library_class(layer)
    try:
        yield
    finally:
        for layer, kind in zip(layers, classes, strict=True):
            layer.__class__ = kind


@contextmanager
def library_attention(module: PPOModule) -> Iterator[None]:
    """Compute attention and its gradient as transformers does."""
    kernel_layers.use_fast_sdpa(module.roles.causal_lm, fast=False)
    try:
        yield
    finally:
        kernel_layers.use_fast_sdpa(module.roles.causal_lm, fast=True)


def together(*contexts: Callable[[], Any]) -> Callable[[], Any]:
    """Return a context of all of them."""

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return inside


def groups(module: PPOModule) -> dict[str, Callable[[], Any]]:
    """Return the groups of fast layers that are switched off, with the context that does it."""
    norms = partial(by_library, module, FusedRMSNorm)
    packed = partial(patch.object, Roles, "hidden_at", everywhere)
    torch_products = partial(patch.object, kernel_layers, "fp32_by_onednn", bool)
    peft = partial(by_library, module, FusedLoRALinear)
    chunks = partial(by_library, module, ChunkedDeltaNet)
    sdpa = partial(library_attention, module)
    return {
        FAST: nullcontext,
        "norms off": norms,
        "packing off": packed,
        "oneDNN's fp32 products off": torch_products,
        "fused LoRA off": peft,
        "short chunks of the delta rule off": chunks,
        "16-bit attention gradient off": sdpa,
        "norms, packing, chunks and attention off": together(norms, packed, chunks, sdpa),
        "LoRA and oneDNN off": together(peft, torch_products),
        "all plain": partial(kernels, module, "plain"),
    }


def rollout_groups(module: PPOModule) -> dict[str, Callable[[], Any]]:
    """Return as `groups` what a rollout is sampled by."""
    step = partial(patch.object, decoding, "decode_step", lambda *_: None)
    merged = partial(patch.object, decoder, "merged_adapters", nullcontext)
    return {
        FAST: nullcontext,
        "decoding step off": step,
        "merged adapters off": merged,
        "weights in oneDNN's layout off": partial(
            patch.object, lora, "can_be_packed", lambda weight: False
        ),
        "decoding step and merged adapters off": together(step, merged),
        "all plain": partial(kernels, module, "plain"),
    }


def iteration_groups() -> dict[str, Callable[[], Any]]:
    """Return what depends on the lengths of responses, which differ in every iteration."""
    return {
        FAST: nullcontext,
        "lengths not rounded up": partial(
            patch.object, kernel_layers, "compiles_by_shape", lambda x: False
        ),
    }


def kernel_groups(
    name: str, microbatch: int, repeats: int, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of updates, rollouts and iterations with each group off."""
    workload = WORKLOADS[name]
    module = build_module(workload, device, microbatch_size=microbatch)

    def work(prompts: Prompts) -> dict[str, dict[str, list[float]]]:
        experience = experience_of(module, prompts)

        def update(turn: int) -> None:
            module.update(experience)

        def rollout(turn: int) -> None:
            module.collector.roll_out(prompts, module.generator(TRAINING, 0))

        def iteration(turn: int) -> None:
            module.update(experience_of(module, prompts, turn))

        with kernels(module, "fast"):
            return {
                "update": in_contexts(groups(module), update, repeats, device),
                "rollout": in_contexts(rollout_groups(module), rollout, repeats, device),
                "iteration": in_contexts(iteration_groups(), iteration, repeats, device),
            }

    precision = "bf16-mixed" if workload.dtype == torch.bfloat16 else "32-true"
    return within_fit(module, prompts_of(workload), device, work, precision)


def in_contexts(
    contexts: dict[str, Callable[[], Any]],
    work: Callable[[int], object],
    repeats: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Return the seconds of `work(turn)` in each context, in turn, after one that warms up.

    Entering and leaving a context takes none of them.
    """
    found: dict[str, list[float]] = {name: [] for name in contexts}
    for turn in range(repeats + 1):
        gc.collect()
        for name, context in contexts.items():
            with context():
                took = seconds(partial(work, turn), device)
            if turn:
                found[name].append(took)
    return found


def kernels_table(results: dict[str, Any], what: str) -> str:
    """Return the seconds and the ratios to all fast, round by round, as Markdown."""
    rows = []
    for name, found in results.items():
        base = found[what][FAST]
        for group, times in found[what].items():
            ratios = [a / b for a, b in zip(times, base, strict=True)]
            rows.append([name, group, middle(times), middle(ratios, ".2f")])
    return markdown_table(["workload", "changed", "seconds", "over all fast"], rows)


def by_autograd(
    roles: Roles, hidden: Tensor, batch: Experience, temperature: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Of response tokens alone, without chunks and without a gradient of our own."""
    return plain(roles.head(hidden) / temperature, batch.responses[batch.response_mask])


def keeping_logits(
    roles: Roles, hidden: Tensor, batch: Experience, temperature: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """The way that can give the entropy a gradient too, as for ppo.ent_coef above 0."""
    return response_logprobs(roles, hidden, batch, temperature, learn_entropy=True)


def as_they_come(mask: Tensor) -> Tensor:
    """The rows unsorted."""
    return torch.arange(len(mask), device=mask.device)


@contextmanager
def microbatches(module: PPOModule, size: int) -> Iterator[None]:
    """Inside, so many responses a forward and backward pass."""
    microbatch = module.microbatch
    before, microbatch.rows = microbatch.rows, size
    try:
        yield
    finally:
        microbatch.rows = before


@contextmanager
def every_position() -> Iterator[None]:
    """Inside, the update as it is first written: padded rows, logits everywhere, autograd."""
    naive = EveryPosition()
    with (
        patch.object(masking, "by_length", as_they_come),
        patch.object(ppo, "response_hidden", naive.hidden),
        patch.object(score, "response_logprobs", naive.logprobs),
    ):
        yield


def variants(module: PPOModule) -> dict[str, Callable[[], Any]]:
    """What else is changed -> the context that does it."""
    return {
        "as it is": nullcontext,
        "layers computed once more": lambda: recomputed(module),
        "rows unsorted": lambda: patch.object(masking, "by_length", as_they_come),
        "logits of 64 tokens at a time": lambda: patch.object(
            logprobs, "CHUNK_ELEMENTS", 64 * module.roles.vocab_size
        ),
        "logits kept, or computed again": lambda: patch.object(
            score, "response_logprobs", keeping_logits
        ),
        "log_softmax by autograd": lambda: patch.object(score, "response_logprobs", by_autograd),
        "logits at every position, padded": every_position,
        "micro-batches of 2": lambda: microbatches(module, 2),
        "one micro-batch of 32": lambda: microbatches(module, 32),
    }


def whole_updates(name: str, repeats: int, device: torch.device) -> dict[str, Any]:
    """Seconds, memory and gradient of an update of each variant."""
    workload = WORKLOADS[name]
    module = build_module(workload, device, microbatch_size=MICROBATCH)

    module.config = replace(module.config, max_grad_norm=1e9)

    def work(prompts: Prompts) -> dict[str, Any]:
        experience = experience_of(module, prompts)
        contexts = variants(module)
        works = {v: within(c, lambda: module.update(experience)) for v, c in contexts.items()}
        times = in_turn(works, repeats, device)
        found: dict[str, Any] = {}
        expected: Tensor | None = None
        for variant, context in contexts.items():
            with context(), Memory() as memory:
                module.accumulate(experience)
            gradient = gradient_of(module)
            expected = gradient if expected is None else expected
            found[variant] = {
                "seconds": times[variant],
                "peak_mb": memory.peak / 1e6,
                "gradient_error": float((gradient - expected).norm() / expected.norm()),
            }
        return found

    return within_fit(module, prompts_of(workload), device, work)


def within(context: Callable[[], Any], work: Callable[[], object]) -> Callable[[], None]:
    """`work` inside a fresh `context`."""

    def inside() -> None:
        with context():
            work()

    return inside


def gradient_of(module: PPOModule) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def one_head(vocabulary: int, tokens: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """`token_logprobs` beside the formulas: seconds, memory, values and gradients."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, WIDTH, generator=generator).to(device)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(device).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)

    def ours() -> tuple[Tensor, Tensor]:
        return logprobs.token_logprobs(
            hidden, targets, lambda h: h @ head.T, temperature=1.0, vocab_size=vocabulary,
            frozen_head=True,
        )  # fmt: skip

    sides = {"ours": ours, "plain": lambda: plain(hidden @ head.T, targets)}

    def run(side: str) -> list[Tensor]:
        hidden.grad = None
        found, entropy = sides[side]()
        found.sum().backward()
        assert hidden.grad is not None
        return [found.detach(), entropy.detach(), hidden.grad]

    result: dict[str, Any] = {}
    numbers: dict[str, list[Tensor]] = {}
    for side in sides:
        with Memory() as memory:
            numbers[side] = run(side)
        result[side] = {"peak_mb": memory.peak / 1e6, "largest_mb": memory.largest / 1e6}
    times = in_turn({side: partial(run, side) for side in sides}, repeats, device)
    for side in sides:
        result[side]["seconds"] = times[side]
    result["error"] = {
        name: float((a - b).abs().max() / b.abs().max())
        for name, a, b in zip(
            ("logprob", "entropy", "gradient"), numbers["ours"], numbers["plain"], strict=True
        )
    }
    return result


def updates_table(results: dict[str, Any]) -> str:
    rows = []
    for name, found in results.items():
        base = statistics.median(found["as it is"]["seconds"])
        for variant, facts in found.items():
            ratio = statistics.median(facts["seconds"]) / base
            rows.append(
                [
                    name,
                    variant,
                    middle(facts["seconds"]),
                    f"{ratio:.2f}",
                    f"{facts['peak_mb']:.0f}",
                    f"{facts['gradient_error']:.0e}",
                ]
            )
    header = ["workload", "changed", "seconds", "over as it is", "peak MB of new tensors",
              "gradient differs by"]  # fmt: skip
    return markdown_table(header, rows)


def heads_table(results: dict[str, Any]) -> str:
    rows = []
    for size, found in results.items():
        ours, other = found["ours"], found["plain"]
        ratio = statistics.median(other["seconds"]) / statistics.median(ours["seconds"])
        rows.append(
            [size, middle(ours["seconds"]), middle(other["seconds"]), f"{ratio:.2f}"]
            + [f"{side['peak_mb']:.0f}" for side in (ours, other)]
            + [" / ".join(f"{error:.0e}" for error in found["error"].values())]
        )
    header = ["vocabulary x tokens", "ours, s", "formulas, s", "formulas / ours", "ours, peak MB",
              "formulas, peak MB", "largest difference: logprob / entropy / gradient"]  # fmt: skip
    return markdown_table(header, rows)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    repeats = 3 if args.quick else 5
    names = ["tiny-eos"] if args.quick else ["tiny-eos", "vocab32k-eos", "8m"]
    sizes = {2048: 256} if args.quick else SIZES
    sizes_of = {"tiny-eos": (8,)} if args.quick else KERNELS
    return {
        "kernels": {
            f"{name}, micro-batches of {size}": kernel_groups(name, size, repeats, args.device)
            for name, sizes_here in sizes_of.items()
            for size in sizes_here
        },
        "updates": {name: whole_updates(name, repeats, args.device) for name in names},
        "heads": {f"{v} x {n}": one_head(v, n, repeats, args.device) for v, n in sizes.items()},
    }


def main() -> None:
    args = options(str(__doc__))
    results = measure(args)
    write(
        args,
        "update",
        "What the fast layers of an update save",
        results,
        "One update of PPO, forward, backward and optimizer step, on 32 responses: prompts of 16 "
        "to 32 tokens, responses of 20 tokens on the mean and at most 48 (`-eos`) or all of 48, in "
        f"micro-batches of {MICROBATCH} sorted by length. Median [smallest-largest], the variants "
        "in turn, after one round that warms up. Of the gradient, the norm of the difference over "
        "its own norm.",
        "With groups of fast layers off, and with all off, which is `model.kernels=plain`; ratios "
        "are of the same round.",
        kernels_table(results["kernels"], "update"),
        "Rollouts of the same responses, likewise.",
        kernels_table(results["kernels"], "rollout"),
        "Rollout and update with responses drawn anew in each round, so that their lengths differ:",
        kernels_table(results["kernels"], "iteration"),
        "With something else changed:",
        updates_table(results["updates"]),
        f"`token_logprobs` on hidden states of width {WIDTH}, forward and backward, beside "
        "log_softmax, gather and entropy as the formulas say. Differences are over the largest "
        "number.",
        heads_table(results["heads"]),
        "Memory: the most bytes of new tensors alive together; what an operation takes and gives "
        "back within itself is not seen.",
    )


if __name__ == "__main__":
    main()
