"""Compare two processes with one process of one and of two threads, for stages of the package.

    .venv/bin/python benchmarks/processes.py [--quick]

The processes of all set-ups exist at the same time and compute a step in turn, so that whatever
slows the machine slows all of them. The machine needs two idle cores.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

import ours
from common import ROOT, Setting, calm, markdown_table
from lightning_rlhf.callbacks.metrics import (
    PPOMetrics,
    SharedMetrics,
    StepMetrics,
)
from lightning_rlhf.core.config import DPOConfig, RMConfig, SFTConfig
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import Demonstrations, Preferences
from lightning_rlhf.data.lengths import PromptTokens
from lightning_rlhf.evaluation.evaluate_policy import GREEDY
from lightning_rlhf.evaluation.policies import Task
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD, SFT, LoRASettings
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.supervised import DPOModule, RewardModule, SFTModule
from lightning_rlhf.parallel.replicas import ONE, Replicas, join_group
from lightning_rlhf.parallel.world import world
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.runs.accelerator import ReplicaStrategy
from machine import Clock, middle, options, write
from workloads import LONGEST, SHORTEST, Workload, build_model, low_tokens, parameters, prompts_of

MODEL = Workload(vocabulary=8192, hidden=512, layers=8, intermediate=1376, episodes=64, response=32)
QUICK = Workload(vocabulary=512, hidden=64, layers=2, intermediate=160, episodes=8, response=8)
SETUPS = {"one process": (1, 1), "two processes": (2, 1), "two threads": (1, 2)}
"""Set-up -> number of processes, and of threads of each."""
STAGES: dict[str, Callable[[], L.Callback]] = {
    "sft": StepMetrics, "sft, full weights": StepMetrics, "rm": StepMetrics, "dpo": StepMetrics,
    "ppo": PPOMetrics,
}  # fmt: skip
"""Stage -> callback that measures its steps, as a run has it."""
RESPONSES = {"rank": (16, 4, 32), "eval_policy": (16, 1, 8)}
"""Stage that does not train -> prompts, responses sampled to each, and responses at a time."""
EPOCHS, MINIBATCHES, MICROBATCH = 2, 2, 8
"""Passes of PPO over its responses, half of the default; updates of a pass; rows of a micro-batch
in all stages."""
LORA = LoRASettings(r=16, alpha=32, target_modules="all-linear")
BATCHES = {"sft": 32, "sft, full weights": 32, "rm": 16, "dpo": 16}
"""Stage -> demonstrations or pairs of an optimizer step."""


class Turns(L.Callback):
    """Callback that starts a step when the parent says so, and sends back its seconds."""

    def __init__(self, parent: Connection) -> None:
        self.parent = parent
        self.update = 0.0
        """Seconds of the updates of the current iteration of PPO."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if hasattr(pl_module, "learn"):
            learn = pl_module.learn

            def timed(batch: Any) -> Any:
                started = Clock.read()
                found = learn(batch)
                self.update = Clock.read() - started
                return found

            pl_module.learn = timed

    def on_train_batch_start(self, *_: Any) -> None:
        self.parent.recv()
        self.started = Clock.read()

    def on_train_batch_end(self, *_: Any) -> None:
        self.parent.send((Clock.read() - self.started, self.update))


def build(stage: str, workload: Workload, replicas: Replicas) -> tuple[L.LightningModule, Any]:
    """Return the module of a stage with a model of random weights, and a batch for it."""
    model = build_model(workload).eval().requires_grad_(stage == "sft, full weights")
    if stage == "ppo":
        setting = Setting(
            iterations=1, episodes=workload.episodes, response_tokens=workload.response,
            end_token=workload.vocabulary + 1, score=low_tokens, lr=1e-5, epochs=EPOCHS,
            minibatches=MINIBATCHES,
        )  # fmt: skip
        ppo = ours.build(model, setting, workload.critic)
        ppo.microbatch.rows = MICROBATCH
        ppo.replicas = ppo.collector.replicas = replicas
        return ppo, prompts_of(workload)
    roles, rows = Roles(model), BATCHES[stage]
    match stage:
        case "sft" | "sft, full weights":
            if stage == "sft":
                roles.add_adapter(SFT, LORA)
            return SFTModule(roles, section("sft", SFTConfig), replicas), demonstrations(
                workload, rows
            )
        case "rm":
            generator = torch.Generator().manual_seed(0)
            roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, generator)
            roles.add_adapter(REWARD, LORA)
            config = section("rm", RMConfig)
            return RewardModule(roles, config, seed=0, replicas=replicas), pairs(workload, rows)
        case _:
            roles.add_adapter(POLICY, LORA)
            return DPOModule(roles, section("dpo", DPOConfig), replicas), pairs(workload, rows)


def section(stage: str, kind: Callable[..., Any]) -> Any:
    """Return the default configuration of a stage."""
    keys: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/stages/{stage}.yaml"))
    own = {"lr": 2.0e-5} if stage == "dpo" else {}
    return kind(**keys | {"final": "last"} | own)


def respond(stage: str, workload: Workload, replicas: Replicas) -> Callable[[], object]:
    """Return a function that samples, scores and gathers the responses of a stage.

    In rank they are those of the policy; in eval_policy those of policy and SFT model, sampled and
    greedy.
    """
    prompts, count, at_once = RESPONSES[stage]
    batch = prompts_of(replace(workload, episodes=prompts))
    chat = SimpleNamespace(
        end_token_ids=(workload.vocabulary + 1,), pad_token_id=0, tokenizer=None,
        decode_response=lambda tokens: "",
    )  # fmt: skip
    config = SimpleNamespace(
        samples_per_prompt=count, batch_size=at_once, temperature=1.0, stop_strings=(),
        max_response_tokens=workload.response,
    )  # fmt: skip
    run = SimpleNamespace(
        settings=SimpleNamespace(stage=stage, seed=0, config=config), chat=chat,
        replicas=replicas, device=torch.device("cpu"),
    )  # fmt: skip
    tokens = real_tokens(batch.tokens, batch.mask)
    task = object.__new__(Task)  # which reads no data
    vars(task).update(
        run=run, batch=MicrobatchSize("batch_size", at_once), rows=[{"prompt": ""}] * prompts,
        prompts=[PromptTokens(row, number) for number, row in enumerate(tokens)], references=(),
        judge=None,
    )  # fmt: skip
    roles = Roles(build_model(workload).eval().requires_grad_(False))
    roles.add_adapter(POLICY, LORA)
    reward = Reward.of(lambda d: low_tokens(d.rollout.tokens, d.rollout.response_mask))

    def work() -> object:
        if stage == "rank":
            parts = task.sample("policy", roles, POLICY, 1.0, count)
        else:
            parts = []
            for role in (POLICY, REFERENCE):
                for temperature, samples in ((1.0, count), (GREEDY, 1)):
                    parts += task.sample(role, roles, role, temperature, samples)
        return task.scored(roles, reward, parts)

    return work


def texts(workload: Workload, rows: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, lengths and numbers of prompt tokens of texts of uneven length."""
    generator = torch.Generator().manual_seed(seed)
    longest = LONGEST + workload.response
    tokens = torch.randint(1, workload.vocabulary, (rows, longest), generator=generator)
    prompt = torch.randint(SHORTEST, LONGEST + 1, (rows,), generator=generator)
    response = torch.randint(workload.response // 2, workload.response + 1, (rows,),
                             generator=generator)  # fmt: skip
    return tokens, (prompt + response).sort().values, prompt


def demonstrations(workload: Workload, rows: int) -> Demonstrations:
    tokens, lengths, prompt = texts(workload, rows, seed=0)
    place = torch.arange(tokens.shape[1])
    mask = place < lengths[:, None]
    return Demonstrations(tokens=tokens, mask=mask, target_mask=mask & (place >= prompt[:, None]))


def pairs(workload: Workload, rows: int) -> Preferences:
    tokens, lengths, prompt = texts(workload, rows, seed=0)
    others, other_lengths, _ = texts(workload, rows, seed=1)
    place = torch.arange(tokens.shape[1])
    other_lengths = other_lengths.maximum(prompt + 1)
    return Preferences(
        chosen=tokens,
        chosen_mask=place < lengths[:, None],
        rejected=torch.where(place < prompt[:, None], tokens, others),
        rejected_mask=place < other_lengths[:, None],
        prompt_tokens=prompt,
        margin=torch.zeros(rows),
    )


def compute(
    stage: str, workload: Workload, steps: int, threads: int, place: Mapping[str, str],
    parent: Connection,
) -> None:  # fmt: skip
    """Compute some steps as one process of a set-up; place: environment of the process."""
    os.environ |= place
    calm()
    torch.set_num_threads(threads)
    replicas, together = ONE, {}
    if world().size > 1:
        limit = timedelta(minutes=10)
        replicas = join_group(world(), torch.device("cpu"), "gloo", "env://", limit)
        together = {"strategy": ReplicaStrategy()}
    torch.manual_seed(0)
    if stage in RESPONSES:
        work = respond(stage, workload, replicas)
        for _ in range(steps):
            parent.recv()
            started = Clock.read()
            work()
            parent.send((Clock.read() - started, 0.0))
        os._exit(0)
    module, batch = build(stage, workload, replicas)
    callbacks = [STAGES[stage]()] if replicas.is_first else []
    callbacks += [SharedMetrics(replicas)] if replicas.size > 1 else []
    trainer = L.Trainer(
        accelerator="cpu", devices=world().size, max_epochs=1, use_distributed_sampler=False,
        logger=False, callbacks=[*callbacks, Turns(parent)], enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, **together,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch] * steps, batch_size=None))
    os._exit(0)


def start(stage: str, workload: Workload, steps: int, size: int, threads: int) -> list[Connection]:
    """Start the processes of a set-up; return the connections to them."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        mine, its = context.Pipe()
        arguments = stage, workload, steps, threads, place if size > 1 else {}, its
        context.Process(target=compute, args=arguments, daemon=True).start()
        its.close()
        found.append(mine)
    return found


def in_turn(stage: str, workload: Workload, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return set-up -> seconds of each step, and of its updates, after one step to warm up.

    The seconds of a set-up are those of its slowest process.
    """
    setups = {name: start(stage, workload, repeats + 1, *setup) for name, setup in SETUPS.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "update": []} for name in SETUPS}
    for _ in range(repeats + 1):
        for name, connections in setups.items():
            for connection in connections:
                connection.send(None)
            seconds = [connection.recv() for connection in connections]
            found[name]["step"].append(max(step for step, _ in seconds))
            found[name]["update"].append(max(update for _, update in seconds))
    return {
        name: {part: numbers[1:] for part, numbers in parts.items()}
        for name, parts in found.items()
    }


def measure(workload: Workload, repeats: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return row of the table -> set-up -> seconds."""
    found = {}
    for stage in (*STAGES, *RESPONSES):
        found[stage] = in_turn(stage, workload, repeats)
        print(
            stage, {name: middle(parts["step"]) for name, parts in found[stage].items()}, flush=True
        )
    return found


def table(found: Mapping[str, Any]) -> str:
    rows = []
    for stage, setups in found.items():
        parts = (
            {"an iteration": "step", "its updates": "update"}
            if stage == "ppo"
            else {"all responses" if stage in RESPONSES else "a step": "step"}
        )
        for what, part in parts.items():
            seconds = {name: setups[name][part] for name in SETUPS}
            rows.append([
                f"{stage}: {what}", *(middle(numbers) for numbers in seconds.values()),
                ratio(seconds["one process"], seconds["two processes"]),
                ratio(seconds["one process"], seconds["two threads"]),
            ])  # fmt: skip
    header = ["", "one process, s", "two processes, s", "one process of two threads, s",
              "two processes are faster by", "two threads are faster by"]  # fmt: skip
    return markdown_table(header, rows)


def ratio(one: Sequence[float], other: Sequence[float]) -> str:
    """Return how many times as fast the other is, by the medians."""
    return f"{statistics.median(one) / statistics.median(other):.2f}"


def main() -> None:
    args = options(str(__doc__))
    workload = QUICK if args.quick else MODEL
    found = measure(workload, 2 if args.quick else 5)
    write(
        args,
        "processes",
        "Two processes and one",
        found,
        f"Random weights, {parameters(workload) / 1e6:.1f}M parameters ({workload.layers} layers, "
        f"hidden size {workload.hidden}, vocabulary {workload.vocabulary}) in fp32, prompts of "
        f"{SHORTEST} to {LONGEST} tokens, responses of at most {workload.response}; micro-batches "
        f"of {MICROBATCH} rows. PPO: {workload.episodes} responses, critic on the policy's trunk, "
        f"{EPOCHS * MINIBATCHES} updates an iteration. sft: 32 demonstrations a step; rm and dpo: "
        "16 pairs. LoRA of rank 16 but for full weights. rank: 64 responses, 32 at a time; "
        "eval_policy: 16 sampled and 16 greedy responses of policy and SFT model, 8 at a time; "
        "loading is not timed. Processes have one thread each, and exchange by gloo. "
        "Medians with the smallest and the largest; the set-ups compute a step in turn.",
        table(found),
    )


if __name__ == "__main__":
    main()
