"""Measure the memory that a reward model adds to PPO, on the shared base and on its own base.

python benchmarks/reward_memory.py [--quick] [--device cpu]
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from common import calm, markdown_table
from counting import Memory
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.heads import RewardHeads
from lightning_rlhf.models.roles import POLICY, REWARD, Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.rewards.learned import LearnedReward
from lightning_rlhf.rewards.weighted import Reward
from machine import options, write
from memory import forget_peak, resident
from workloads import Workload, build_module, fit, parameters, prompts_of

BASE = Workload(
    vocabulary=32_768, hidden=768, layers=12, intermediate=2048, episodes=16, response=32
)
SMALL = Workload(episodes=8, response=16)
KINDS = ("none", "head", "own")
ROUNDS = 3
LORA = LoRASettings(r=16, alpha=32, target_modules="all-linear")


def with_reward(module: PPOModule, kind: str) -> Roles:
    """Give the module a reward model: an adapter and a head on the shared base, or on a copy of it.

    kind: "none", "head" (shared base) or "own" (copy of the base).

    Returns: the roles that hold the reward model.
    """
    if kind == "none":
        return module.roles  # the benchmark's own reward costs nothing
    roles = module.roles if kind == "head" else Roles(copy.deepcopy(plain(module)))
    generator = torch.Generator().manual_seed(0)
    roles.heads[REWARD] = RewardHeads.random(roles.hidden_size, 1, generator)
    roles.add_adapter(REWARD, LORA)
    roles.to(module.device)
    roles.heads[REWARD].requires_grad_(False)
    for parameter in roles.trained_by(REWARD):
        parameter.requires_grad_(False)
    module.roles.set_role(POLICY)
    rewards = partial(roles.rewards, role=REWARD)
    module.collector.reward = Reward.of(
        LearnedReward(rewards, 0.0, 1.0, 0.0, module.guard.microbatch)
    )
    return roles


def plain(module: PPOModule) -> Any:
    """Return a new language model of the base's size, without adapters, frozen."""
    model = module.roles.causal_lm
    return type(model)(model.config).eval().requires_grad_(False)


def peak(workload: Workload, kind: str, device: torch.device) -> dict[str, float]:
    """Return the MB that one iteration needs in a new process, all weights included.

    "tensors" covers weights and live new tensors, "resident" the growth of the resident set.
    """
    context = multiprocessing.get_context("spawn")
    ours, other = context.Pipe()
    process = context.Process(target=alone, args=(workload, kind, device, other))
    process.start()
    other.close()
    found: dict[str, float] = ours.recv()
    process.join()
    return found


def alone(workload: Workload, kind: str, device: torch.device, talk: Connection) -> None:
    """Measure one iteration; the main function of the process started by `peak`."""
    calm()
    gc.collect()
    before = resident("VmRSS") if device.type == "cpu" else 0.0
    forget_peak()
    module = build_module(workload, device, microbatch_size=8)
    owner = with_reward(module, kind)
    fit(module, prompts_of(workload), device)
    on_gpu = device.type == "cuda"
    highest = torch.cuda.max_memory_allocated(device) / 1e6 if on_gpu else resident("VmHWM")
    if before is None or highest is None:
        raise SystemExit("this system does not tell how much memory a process has (VmHWM)")
    with Memory() as memory:
        fit(module, prompts_of(workload), device)
    weights = {p.data_ptr(): p.nbytes for p in (*module.parameters(), *owner.parameters())}
    tensors = (sum(weights.values()) + memory.peak) / 1e6
    talk.send({"resident": highest - before, "tensors": tensors})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    workload = SMALL if args.quick else BASE
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(1 if args.quick else ROUNDS):
        for kind in KINDS:
            found[kind].append(peak(workload, kind, args.device))
    return {"parameters": parameters(workload), "peak_mb": found}


def table(results: dict[str, Any]) -> str:
    peaks = results["peak_mb"]
    names = {
        "none": "none (a function)",
        "head": "adapter and head on the policy's base",
        "own": "a model of its own, of the same size",
    }
    rows = []
    for kind, found in peaks.items():
        cells = []
        for what in ("tensors", "resident"):
            here = [peak[what] for peak in found]
            alone_mb = median(peak[what] for peak in peaks["none"])
            cells += [
                f"{median(here):.0f} [{min(here):.0f}-{max(here):.0f}]",
                f"{100 * (median(here) / alone_mb - 1):+.1f}%",
            ]
        rows.append([names[kind], *cells])
    header = ["reward model", "tensors, MB", "over none", "resident set, MB", "over none"]
    return markdown_table(header, rows)


def main() -> None:
    args = options(str(__doc__))
    results = measure(args)
    workload = SMALL if args.quick else BASE
    write(
        args,
        "reward_memory",
        "Memory of a reward model",
        results,
        f"One iteration of PPO (rollout, score, one update of {workload.episodes} responses of "
        f"{workload.response} tokens, micro-batches of 8) on a model of "
        f"{results['parameters'] / 1e6:.0f}M parameters, fp32, the policy a LoRA of rank 16, in a "
        "process of its own. Tensors: all weights, and the most bytes of new tensors alive "
        "together. Resident set: its largest less that before the model was made, on a GPU what "
        "torch has allocated; it holds what the allocator keeps as well. Median "
        f"[smallest-largest] of {len(results['peak_mb']['none'])}, in turn.",
        table(results),
    )


if __name__ == "__main__":
    main()
