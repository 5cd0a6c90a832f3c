"""Compute the memory of a process by role and set-up for models of 0.8B to 32B, without weights.

    .venv/bin/python benchmarks/memory_plan.py

Each row is the plan of `lightning-rlhf plan` with the overrides of SETUPS. A second table says for
each model and number of GPUs the first of WAYS that fits, with the seconds of an iteration of PPO
by arithmetic (`seconds_of`). Nothing is measured.
`lightning-rlhf plan stage=ppo model=...` prints that of any other model and configuration.
"""

from __future__ import annotations

from itertools import product
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from common import markdown_table
from lightning_rlhf.library import configuration
from lightning_rlhf.models.build_roles import cache_bytes
from lightning_rlhf.models.loading import empty_model
from lightning_rlhf.runs.stage import Settings
from lightning_rlhf.stages.memory_plan import MemoryPlan, plan_run
from machine import options, write
from true_shape import SHAPE

QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
SHAPES: dict[str, PretrainedConfig] = {
    "Qwen3.5-0.8B": Qwen3_5TextConfig(**SHAPE),
    "Qwen3-1.7B": Qwen3Config(
        **QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, tie_word_embeddings=True,
    ),
    "Qwen3-8B": Qwen3Config(
        **QWEN3, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, tie_word_embeddings=False,
    ),
    "Qwen3-32B": Qwen3Config(
        **QWEN3, hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64,
        num_attention_heads=64, tie_word_embeddings=False,
    ),
}  # fmt: skip
CHECKPOINTING = "model.gradient_checkpointing=true"
COMMON = ("model=hub", "trainer=gpu", "data=files")
SETUPS = {
    "sft, LoRA, bf16": ("sft", CHECKPOINTING),
    "sft, LoRA, int8": ("sft", CHECKPOINTING, "model.quantization=int8"),
    "sft, LoRA, nf4": ("sft", CHECKPOINTING, "model.quantization=nf4"),
    "sft, full weights": ("sft", CHECKPOINTING, "sft.finetune=full"),
    "rm, LoRA, bf16": ("rm", CHECKPOINTING),
    "rm, LoRA, int8": ("rm", CHECKPOINTING, "model.quantization=int8"),
    "rm, LoRA, nf4": ("rm", CHECKPOINTING, "model.quantization=nf4"),
    "rm, full weights": ("rm", CHECKPOINTING, "rm.finetune=full"),
    "dpo, bf16": ("dpo", CHECKPOINTING),
    "dpo, int8": ("dpo", CHECKPOINTING, "model.quantization=int8"),
    "dpo, nf4": ("dpo", CHECKPOINTING, "model.quantization=nf4"),
    "ppo, bf16, without checkpointing": ("ppo",),
    "ppo, bf16": ("ppo", CHECKPOINTING),
    "ppo, bf16, 2 processes, each": ("ppo", CHECKPOINTING, "trainer.devices=2"),
    "ppo, bf16, 4 processes, each": ("ppo", CHECKPOINTING, "trainer.devices=4"),
    "ppo, bf16, critic=model": ("ppo", CHECKPOINTING, "ppo.critic=model"),
    "ppo, int8": ("ppo", CHECKPOINTING, "model.quantization=int8"),
    "ppo, int8, 2 processes, each": (
        "ppo", CHECKPOINTING, "model.quantization=int8", "trainer.devices=2"
    ),
    "ppo, nf4": ("ppo", CHECKPOINTING, "model.quantization=nf4"),
    "ppo, nf4, 2 processes, each": (
        "ppo", CHECKPOINTING, "model.quantization=nf4", "trainer.devices=2"
    ),
    "ppo, nf4, critic=adapter": (
        "ppo", CHECKPOINTING, "model.quantization=nf4", "ppo.critic=adapter"
    ),
}  # fmt: skip
"""Name of a row -> stage and overrides; all but one with gradient checkpointing."""
BATCH = (
    "ppo.rollout_batch_size=512", "ppo.minibatch_size=128", "ppo.generation_batch_size=64",
    "ppo.max_response_tokens=512", CHECKPOINTING,
)  # fmt: skip
WAYS = {
    "LoRA": ((), ("model.quantization=nf4",), ("trainer.strategy=fsdp",)),
    "full": (("ppo.finetune=full",), ("ppo.finetune=full", "trainer.strategy=fsdp")),
}
"""Weights that are trained -> overrides of the set-ups, those that are simpler first."""
DEVICE = 77e9
"""Bytes of a GPU of 80 GiB that a process may plan with."""
FLOPS, BANDWIDTH = 0.4 * 989e12, 0.6 * 3.35e12
"""Operations, and bytes of its memory, that an H100 is taken to reach a second."""
LINK = {1: 300e9, 8: 40e9}
"""Machines -> bytes a second that a collective is taken to reach in one, or between several."""
EXCHANGED = ("sft, LoRA, bf16", "sft, full weights", "ppo, bf16")
"""Rows whose processes' exchanges are computed too."""


def settings_of(name: str, folder: Path, setup: tuple[str, ...]) -> Settings:
    """Return the configuration of a row; folder: one with the model's config.json."""
    stage, *words = setup
    model = (f"model.name={name}", f"model.name_or_path={folder}")
    return configuration(stage, *COMMON, *model, f"{stage}.microbatch_size=8", *words)


def row(name: str, plan: MemoryPlan) -> list[str]:
    """Return a row of the table, in GB."""
    roles, update = plan.roles.values(), plan.update(plan.rows)
    numbers = (
        plan.roles["base"].weights,
        sum(role.weights for role in roles) - plan.roles["base"].weights,
        sum(role.gradients for role in roles),
        sum(role.optimizer for role in roles),
        plan.rollout.cache, plan.rollout.logits + plan.rollout.activations + plan.rollout.weights,
        update.activations, update.logits, plan.peak(plan.rows),
    )  # fmt: skip
    return [name, *(f"{number / 1e9:.2f}" for number in numbers)]


def exchanged(plan: MemoryPlan, settings: Settings) -> list[str]:
    """Return the bytes of the gradients of an update, and of PPO's records in an iteration, MB."""
    gradients = f"{sum(role.gradients for role in plan.roles.values()) / 1e6:,.1f}"
    config = settings.config
    if settings.stage != "ppo":
        return [gradients, "1", "-"]
    of_response = 9 * settings.data.max_prompt_tokens + 22 * config.max_response_tokens + 4 + 29
    records = config.rollout_batch_size * of_response
    updates = config.ppo_epochs * (config.rollout_batch_size // config.minibatch_size)
    return [gradients, str(updates), f"{records / 1e6:.2f}"]


def seconds_of(plan: MemoryPlan, settings: Settings, numbers: int, gpus: int) -> list[float]:
    """Return the seconds of sampling, scoring, updates and exchanges of an iteration of PPO.

        pass     = 2 N tokens / FLOPS                     of the responses of one process
        sampling = pass of the prompts + T (weights a piece + keys and values) / BANDWIDTH
        scoring  = 2 passes: reference and reward
        updates  = epochs (forward, recomputed forward, 1 pass back, or 2 for full weights)
        exchange = gradients of each update, and each weight that fsdp gathers, over LINK

    numbers: N, the parameters of the model. Attention's operations are left out.
    """
    config, own, prompt = settings.config, settings.model, settings.data.max_prompt_tokens
    rows, length = config.rollout_batch_size / gpus, config.max_response_tokens
    forward = 2 * numbers * rows * (prompt + length) / FLOPS
    shape = AutoConfig.from_pretrained(own.name_or_path).get_text_config()
    cache = rows * (prompt + length / 2) * cache_bytes(shape, torch.bfloat16)
    base, shards = 2 * numbers, settings.shards
    read = ceil(rows / config.generation_batch_size) * base + cache
    sampling = forward * prompt / (prompt + length) + length * read / BANDWIDTH
    back = 2 if config.finetune == "full" else 1
    updates = config.ppo_epochs * (config.rollout_batch_size // config.minibatch_size)
    summed = 2 * updates * sum(role.gradients for role in plan.roles.values())
    gathers = 1 + (2 + 2 * config.ppo_epochs) * ceil(rows / plan.rows)
    bytes_sent = (summed + gathers * base * shards) * (1 - 1 / gpus)
    link = LINK[min(8, ceil(gpus / 8))]
    return [sampling, 2 * forward, config.ppo_epochs * (2 + back) * forward, bytes_sent / link]


def fitting(name: str, folder: Path, numbers: int) -> list[list[str]]:
    """Return the rows of a model in the table of set-ups; one that fits no GPU has no times."""
    rows = []
    for gpus, (trained, ways) in product((1, 8, 64), WAYS.items()):
        machines = f"trainer.devices={min(gpus, 8)}", f"trainer.num_nodes={ceil(gpus / 8)}"
        for words in ways:
            settings = settings_of(name, folder, ("ppo", *BATCH, *machines, *words))
            plan = plan_run(settings)
            peak = plan.peak(plan.rows)
            if peak <= DEVICE:
                break
        times = seconds_of(plan, settings, numbers, gpus) if peak <= DEVICE else []
        shown = [f"{x:.1f}" for x in times] or ["does not fit", "", "", ""]
        overrides = " ".join((*machines, *words))
        rows.append([f"{name}, {trained}", str(gpus), overrides, f"{peak / 1e9:.0f}", *shown])
    return rows


def main() -> None:
    args = options(str(__doc__))
    parts, traffic, set_ups = [], [], []
    for name, shape in list(SHAPES.items())[: 1 if args.quick else None]:
        with TemporaryDirectory() as folder:
            shape.save_pretrained(folder)
            runs = {row: settings_of(name, Path(folder), s) for row, s in SETUPS.items()}
            plans = {row: plan_run(settings) for row, settings in runs.items()}
            model = empty_model(runs["ppo, bf16"].model)
            count = sum(p.numel() for p in model.parameters())
            set_ups += fitting(name, Path(folder), count)
        header = [f"{name}: {count / 1e9:.2f}B parameters", "base", "adapters, heads, own models",
                  "gradients", "optimizer", "rollout: cache", "rollout: logits, activations",
                  "update: activations", "update: logits", "peak"]  # fmt: skip
        parts.append(markdown_table(header, [row(what, plan) for what, plan in plans.items()]))
        traffic += [[f"{name}, {what}", *exchanged(plans[what], runs[what])] for what in EXCHANGED]
    header = ["", "gradients of an update, MB", "updates an iteration", "records an iteration, MB"]
    ppo, data = runs["ppo, bf16"].config, runs["ppo, bf16"].data
    write(
        args,
        "memory_plan",
        "Memory by role and set-up, computed",
        {"tables": parts, "exchanged": traffic, "set_ups": set_ups},
        "GB (10^9 bytes) of one process by `lightning-rlhf plan` (docs/preflight.md), on shapes "
        "without weights; nothing here was measured. Defaults of conf with trainer=gpu and "
        "data=files, and model.gradient_checkpointing=true where a row does not say otherwise: "
        f"{ppo.rollout_batch_size} responses of {ppo.max_response_tokens} tokens to prompts of "
        f"{data.max_prompt_tokens} tokens, micro-batches of {ppo.microbatch_size} rows; in sft, rm "
        f"and dpo prompts of {data.max_prompt_tokens} and responses of {data.max_response_tokens} "
        f"tokens, micro-batches of {runs['sft, LoRA, bf16'].config.microbatch_size} rows or pairs. "
        "LoRA of rank 16 in fp32 on every linear layer, frozen weights in bf16 or quantised. rm "
        "and dpo hold the SFT model's adapter and their own, ppo those of SFT model, reward model "
        "and policy. peak = weights + gradients + optimizer + the larger of rollout and update.",
        *parts,
        "Bytes that processes exchange: gradients are summed in each update, records exchanged "
        "twice an iteration; docs/scaling.md has the formulas and their test.",
        markdown_table(header, traffic),
        "The first set-up that fits GPUs of 80 GiB (77 GB of each), with the seconds of an "
        "iteration of PPO by arithmetic (`seconds_of`), on H100s at 40% of 989 TFLOP/s, 60% of "
        f"3.35 TB/s, 300 GB/s in a machine and 40 between several: {' '.join(BATCH)}.",
        markdown_table(
            ["model, trained", "GPUs", "overrides", "peak of a process, GB", "sampling, s",
             "scoring, s", "updates, s", "exchange, s"], set_ups,
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
