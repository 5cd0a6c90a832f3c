"""Measure the memory of a reward model in PPO, and of training by stage=dpo beside stage=rm.

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
from omegaconf import OmegaConf

from common import ROOT, calm, markdown_table, random_prompts
from counting import Memory
from lightning_rlhf.core.config import DPOConfig, RMConfig
from lightning_rlhf.core.records import Preferences
from lightning_rlhf.models.config import POLICY, REWARD, LoRASettings
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import DPOModule, RewardModule
from lightning_rlhf.rewards.weighted import LearnedReward, Reward
from machine import options, write
from memory import forget_peak, resident
from workloads import (
    LONGEST,
    SHORTEST,
    Workload,
    build_model,
    build_module,
    fit,
    parameters,
    prompts_of,
)

BASE = Workload(
    vocabulary=32_768, hidden=768, layers=12, intermediate=2048, episodes=16, response=32
)
SMALL = Workload(episodes=8, response=16)
IN_PPO = {
    "none": "none (a function)",
    "head": "adapter and head on the policy's base",
    "own": "a model of its own, of the same size",
}
"""Kind of reward model in PPO -> its description."""
BY_PAIRS = {"rm": "`stage=rm`", "dpo": "`stage=dpo`"}
"""Stage that learns from pairs -> its description."""
MICROBATCH = 8
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
    roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, generator)
    roles.add_adapter(REWARD, LORA)
    roles.to(module.device)
    roles.heads[REWARD].requires_grad_(False)
    for parameter in roles.trained_by(REWARD):
        parameter.requires_grad_(False)
    module.roles.set_role(POLICY)
    rewards = partial(roles.rewards, role=REWARD)
    module.collector.reward = Reward.of(LearnedReward(rewards, 0.0, 1.0, 0.0, module.microbatch))
    return roles


def pairs_module(workload: Workload, stage: str, device: torch.device) -> RewardModule | DPOModule:
    """Return a stage that trains an adapter from pairs, with the defaults of its section."""
    roles = Roles(build_model(workload).eval().requires_grad_(False))
    keys: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/stages/{stage}.yaml"))
    keys |= {"batch_size": workload.episodes, "microbatch_size": MICROBATCH, "final": "last"}
    keys["lr"] = 1.0e-4
    if stage == "dpo":
        roles.add_adapter(POLICY, LORA)
        return DPOModule(roles, DPOConfig(**keys)).to(device)
    generator = torch.Generator().manual_seed(0)
    roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, generator)
    roles.add_adapter(REWARD, LORA)
    return RewardModule(roles, RMConfig(**keys), seed=0).to(device)


def pairs_of(workload: Workload) -> Preferences:
    """Return one batch of random pairs, whose prompts and responses have uneven lengths."""
    sides = random_prompts(
        2,
        workload.episodes,
        vocabulary=workload.vocabulary,
        shortest=SHORTEST + 1,
        longest=LONGEST + workload.response,
        seed=0,
    )
    (chosen, rejected), masks = (
        [torch.flip(x, (1,)) for x in both]  # padding on the right
        for both in zip(*((side.tokens, side.mask) for side in sides), strict=True)
    )
    shortest = torch.minimum(*(mask.sum(dim=1) for mask in masks))
    return Preferences(
        chosen=chosen,
        chosen_mask=masks[0],
        rejected=rejected,
        rejected_mask=masks[1],
        prompt_tokens=(shortest - 1).clamp(max=LONGEST),
        margin=torch.zeros(workload.episodes),
    )


def plain(module: PPOModule) -> Any:
    """Return a new language model of the base's size, without adapters, frozen."""
    model = module.roles.causal_lm
    return type(model)(model.config).eval().requires_grad_(False)


def peak(workload: Workload, kind: str, device: torch.device) -> dict[str, float]:
    """Return the MB that a training step needs in a new process, all weights included.

    kind: one of IN_PPO or BY_PAIRS.

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
    """Measure a training step; the main function of the process started by `peak`."""
    calm()
    gc.collect()
    before = resident("VmRSS") if device.type == "cpu" else 0.0
    forget_peak()
    module: Any
    owner: Any
    batch: Any
    if kind in BY_PAIRS:
        owner = module = pairs_module(workload, kind, device)
        batch = pairs_of(workload)
    else:
        module = build_module(workload, device, microbatch_size=MICROBATCH)
        owner, batch = with_reward(module, kind), prompts_of(workload)
    fit(module, batch, device)
    on_gpu = device.type == "cuda"
    highest = torch.cuda.max_memory_allocated(device) / 1e6 if on_gpu else resident("VmHWM")
    if before is None or highest is None:
        raise SystemExit("this system does not tell how much memory a process has (VmHWM)")
    with Memory() as memory:
        fit(module, batch, device)
    weights = {p.data_ptr(): p.nbytes for p in (*module.parameters(), *owner.parameters())}
    tensors = (sum(weights.values()) + memory.peak) / 1e6
    talk.send({"resident": highest - before, "tensors": tensors})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    workload = SMALL if args.quick else BASE
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in (*IN_PPO, *BY_PAIRS)}
    for _ in range(1 if args.quick else ROUNDS):
        for kind, peaks in found.items():
            peaks.append(peak(workload, kind, args.device))
    return {"parameters": parameters(workload), "peak_mb": found}


def table(results: dict[str, Any], names: dict[str, str], what: str) -> str:
    """Return the peaks of the kinds in `names`, with their ratio to the first of them."""
    peaks = {kind: results["peak_mb"][kind] for kind in names}
    first, *_ = peaks.values()
    rows = []
    for kind, found in peaks.items():
        cells = []
        for part in ("tensors", "resident"):
            here, there = ([peak[part] for peak in some] for some in (found, first))
            cells += [
                f"{median(here):.0f} [{min(here):.0f}-{max(here):.0f}]",
                f"{median(here) / median(there):.3f}",
            ]
        rows.append([names[kind], *cells])
    header = [what, "tensors, MB", "ratio to the first", "resident set, MB", "ratio to the first"]
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
        f"{workload.response} tokens, micro-batches of {MICROBATCH}) on a model of "
        f"{results['parameters'] / 1e6:.0f}M parameters, fp32, the policy a LoRA of rank 16, in a "
        "process of its own. Tensors: all weights, and the most bytes of new tensors alive "
        "together. Resident set: its largest less that before the model was made, on a GPU what "
        "torch has allocated; it holds what the allocator keeps as well. Median "
        f"[smallest-largest] of {len(results['peak_mb']['none'])}, in turn.",
        table(results, IN_PPO, "reward model"),
        "The same of the two stages that learn from pairs: one update of an adapter on the same "
        f"{workload.episodes} pairs, whose sides have up to {LONGEST + workload.response} tokens. "
        "DPO's reference is the base without the adapter. DPO computes logits of all response "
        "tokens, 64 MB of them at a time; a reward model computes none.",
        table(results, BY_PAIRS, "stage"),
    )


if __name__ == "__main__":
    main()
