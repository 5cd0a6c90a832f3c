"""Compare the speed of an update and a rollout of PPO with the limits of the machine.

python benchmarks/limits.py [--quick] [--device cpu]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import markdown_table
from counting import Products, flop_counter, random_factor
from lightning_rlhf.core.records import Experience, Prompts
from lightning_rlhf.modules.ppo import TRAINING, PPOModule
from lightning_rlhf.rollout.score import response_hidden, response_logprobs
from machine import (
    best_rate,
    fastest,
    in_turn,
    middle,
    options,
    rates,
    rates_table,
    write,
)
from workloads import WORKLOADS, build_module, experience_of, parameters, prompts_of, within_fit

FORMULA = (
    "Floating-point operations are those of matrix products, 2 a multiplication with its addition, "
    "counted by torch's FlopCounterMode row by row without padding; attention is counted in full, "
    "not its causal half. About, for N weights under the adapter, A of the adapter, S tokens of "
    "which T are of the response, hidden size d and vocabulary V: update = 4 N S (forward, and "
    "the gradient of the inputs; the weights have none) + 6 A S (the adapter beside the weights) + "
    "4 T d V; rollout = 2 N S + 2 T d V (the adapter in the weights)."
)


def measure(device: torch.device, quick: bool) -> dict[str, Any]:
    """Return seconds and floating-point operations of an update and a rollout, and the machine's
    rates."""
    workload = WORKLOADS["tiny" if quick else "8m"]
    found = rates(device, quick)
    module = build_module(workload, device)

    def work(prompts: Prompts) -> dict[str, Any]:
        experience = experience_of(module, prompts)
        works: dict[str, Callable[[], object]] = {
            "update": lambda: module.update(experience),
            "rollout": lambda: module.collector.roll_out(prompts, module.generator(TRAINING, 0)),
        }
        flops = {"update": update_flops(module, experience)}
        flops["rollout"] = rollout_flops(module, experience)
        times = in_turn(works, 3 if quick else 7, device)
        return {
            name: {
                "seconds": times[name],
                "flops": flops[name],
                "products_s": products_alone(work, device, 0.002 if quick else 0.01),
            }
            for name, work in works.items()
        }

    phases = within_fit(module, prompts_of(workload), device, work)
    bytes_read = decoding_bytes(module)
    phases["rollout"]["memory_s"] = bytes_read / found["gigabytes_per_s"] / 1e9
    return {"rates": found, "parameters": parameters(workload), "phases": phases}


def update_flops(module: PPOModule, experience: Experience) -> int:
    """Return the floating-point operations of forward and backward, counted row by row."""
    total = 0
    for row in experience.split(1):
        with flop_counter() as counter, sdpa_kernel(SDPBackend.MATH):
            hidden = response_hidden(module.roles, row)
            # With learn_entropy the same products are taken in the backward pass; the counter does
            # not see a gradient that is computed inside a forward pass.
            logprobs, _ = response_logprobs(module.roles, hidden, row, 1.0, learn_entropy=True)
            logprobs.sum().backward()
        total += counter.get_total_flops()
    return total


@torch.no_grad()
def rollout_flops(module: PPOModule, experience: Experience) -> int:
    """Return the floating-point operations of the forward pass with merged adapter, row by row."""
    total = 0
    for row in experience.split(1):
        with (
            module.roles.merged(),
            flop_counter() as counter,
            sdpa_kernel(SDPBackend.MATH),
        ):
            response_logprobs(module.roles, response_hidden(module.roles, row), row, 1.0)
        total += counter.get_total_flops()
    return total


def decoding_bytes(module: PPOModule) -> int:
    """Return the bytes of weights read while sampling: all weights once per token position.

    The cache of keys and values is not included.
    """
    model = module.roles.causal_lm
    weights = {p.data_ptr(): p.nbytes for n, p in model.named_parameters() if "lora_" not in n}
    return module.config.max_response_tokens * sum(weights.values())


def products_alone(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the seconds of the matrix products of `work` alone, each timed by itself.

    budget: seconds of measurement per kind of product.
    """
    with Products() as seen:
        work()
    total = 0.0
    for (product, a, b, dtype), count in seen.counts.items():
        x, y = (random_factor(f, dtype, device) for f in (a, b))
        total += count * fastest(partial(product, x, y), device, budget)
    return total


def main() -> None:
    args = options(str(__doc__))
    results = measure(args.device, args.quick)
    rate = best_rate(results["rates"])
    square = results["rates"]["products"]["square"]["float32"]
    rows = []
    for name, phase in results["phases"].items():
        best = min(phase["seconds"])
        limits = [phase["flops"] / square / 1e9, phase["flops"] / rate / 1e9, phase["products_s"]]
        rows.append(
            [name, f"{phase['flops'] / 1e9:.1f}", middle(phase["seconds"])]
            + [f"{phase['flops'] / best / 1e9:.1f}"]
            + [f"{limit:.3f} ({best / limit:.2f} x)" for limit in limits]
            + [f"{phase['memory_s']:.3f}" if "memory_s" in phase else "-"]
        )
    header = ["", "necessary GFLOP", "seconds", "GFLOP/s reached",
              "at the rate of the square (time / limit)", "at the best rate (time / limit)",
              "its matrix products alone (time / limit)", "reading the weights, s"]  # fmt: skip
    write(
        args,
        "limits",
        "How near the limit",
        results,
        rates_table(results["rates"]),
        f"Memory: {results['rates']['gigabytes_per_s']:.1f} GB/s. All rates are the best of "
        "several trials.",
        f"One update and one rollout of 32 episodes, {results['parameters'] / 1e6:.2f}M "
        "parameters, fp32, prompts of 16 to 32 tokens and responses of 48. Median "
        "[smallest-largest]; time / limit is of the smallest, as the rates are the best.",
        markdown_table(header, rows),
        FORMULA,
        "The matrix products alone are those that the update or the rollout really takes (padding "
        "and computing anew included), each repeated by itself with factors of the same sizes "
        "and strides.",
    )


if __name__ == "__main__":
    main()
