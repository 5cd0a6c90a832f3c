"""Totals of what a run has computed, over all resumes; metric files that follow its checkpoints."""

import re
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_rlhf.callbacks.loggers import MetricsFile, RunTensorBoard
from lightning_rlhf.callbacks.progress import position
from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.core.records import Preferences
from lightning_rlhf.core.results import IterationResult
from lightning_rlhf.io.storage import readable
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD
from lightning_rlhf.models.flops import weights_of
from lightning_rlhf.rollout.native import NativeSampler

PETA = 1e15
PREFIX = "compute/"
PEAK = f"{PREFIX}peak_memory"


class FileRows(Callback):
    """Removes the rows after the checkpoint that a run goes on from, and puts them on the disk
    before a checkpoint is written. For a module that logs its metrics with `self.log`."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile | RunTensorBoard):
                logger.rewind(position(trainer, pl_module))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile | RunTensorBoard):
                logger.flush()


class CountedRows(FileRows):
    """Rows of metrics with the totals of what the run has computed, over all resumes.

    Sums of whole numbers are exact up to 2^53, so that a resumed run continues them exactly.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        """Metric -> total so far, or the largest memory; empty before the first step."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        pl_module.logs_headline = False

    def state_dict(self) -> dict[str, Any]:
        return {"compute": self.totals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.totals = state_dict["compute"]

    def count(self, more: Mapping[str, float], peak_memory: int) -> dict[str, float]:
        """Add an iteration or step; return the metrics.

        more: what it computed, as `iteration_totals` and `step_totals` return it.
        peak_memory: largest memory of the process, in bytes.
        """
        found = {PREFIX + name: float(number) for name, number in more.items()}
        before = self.totals or dict.fromkeys([*found, PEAK], 0.0)
        self.totals = {name: before[name] + number for name, number in found.items()}
        self.totals[PEAK] = max(before[PEAK], float(peak_memory))
        return dict(self.totals)


def iteration_totals(module: Any, result: IterationResult, devices: int = 1) -> dict[str, float]:
    """Return what an iteration of PPO computed, by the name of its metric without the prefix.

        rollout    sampling [+ forward of the policy][+ forward of a critic apart]
        score      forward of the reference and of each reward model here
        update     (forward + backward of the policy) [+ the same of a critic apart], each epoch

    in operations of `models/flops.py`. A critic on the policy's trunk costs nothing, nor does a
    reward on another machine; a reward model with a tokenizer of its own is taken to read as many
    tokens as the policy. kl_estimator=full adds a forward pass of the policy to the score, or of
    the reference to the update. The policy reads once more what its sampler gives no numbers for,
    and only forward during ppo.critic_warmup. Every sampler is taken to compute with a cache, and
    all but the native one to read a prompt once for each response to it.

    module: a PPOModule after the iteration. devices: number of processes, each on its own device.
    """
    config, critic, collector = module.config, module.critic, module.collector
    masks = result.experience.mask, result.experience.response_mask
    lengths, responses = (mask.sum(dim=1).cpu() for mask in masks)
    tokens, wanted = int(lengths.sum()), int(responses.sum())
    policy, reference = (weights_of(module.roles, role) for role in (POLICY, REFERENCE))
    each = config.samples_per_prompt if isinstance(collector.sampler, NativeSampler) else 1
    rollout = policy.sampling(lengths - responses, responses, each)
    score = reference.forward(lengths, wanted)
    for model, role in module.reward.models.values():
        score += weights_of(model, role).forward(lengths)  # type: ignore[arg-type]
    policy_learns = module.iteration > config.critic_warmup
    update = (policy.update if policy_learns else policy.forward)(lengths, wanted)
    readings = 1 + len(module.reward.models) + collector.annotated
    if collector.annotated:
        rollout += policy.forward(lengths, wanted)
    if critic is not None and not critic.shares_trunk:
        readings += 1
        apart = weights_of(critic.roles, critic.role)
        rollout += apart.forward(lengths)
        update += apart.update(lengths)
    if config.kl_estimator == "full" and config.kl_in == "reward":
        readings += 1
        score += policy.forward(lengths, wanted)
    elif config.kl_estimator == "full":
        update += reference.forward(lengths, wanted)
    epochs = len(result.updates) / (len(lengths) // config.minibatch_size)
    update, trained = epochs * update, round(epochs * tokens)
    if module.ptx is not None and policy_learns:
        for number in range(len(result.updates)):
            batch = module.ptx.batch(module.iteration - 1, number)
            rows = batch.mask.sum(dim=1)
            trained += int(rows.sum())
            update += policy.update(rows, int(batch.target_mask.sum()))
    seconds = result.seconds
    return {
        "generated_tokens": wanted,
        "scored_tokens": readings * tokens,
        "trained_tokens": trained,
        "rollout_flops": rollout,
        "score_flops": score,
        "update_flops": update,
        "flops": rollout + score + update,
        "device_s": devices * (seconds.rollout + seconds.score + seconds.update),
    }


def step_totals(module: Any, batch: Any, seconds: float, devices: int = 1) -> dict[str, float]:
    """Return what a step of SFT, a reward model or DPO computed, likewise; seconds: its time.

    A reward model's output is taken at the last token of each row; DPO's reference adds a forward
    pass.
    """
    is_pair = isinstance(batch, Preferences)
    masks = (batch.chosen_mask, batch.rejected_mask) if is_pair else (batch.mask,)
    lengths = torch.cat([mask.sum(dim=1) for mask in masks]).cpu()
    if not is_pair:
        predicted = int(batch.target_mask.sum())
    else:
        in_prompts = 2 * int(batch.prompt_tokens.sum())
        predicted = 0 if module.role == REWARD else int(lengths.sum()) - in_prompts
    flops = weights_of(module.roles, module.role).update(lengths, predicted)
    if isinstance(module.config, DPOConfig) and not module.config.reference_free:
        flops += weights_of(module.roles, REFERENCE).forward(lengths, predicted)
    return {
        "trained_tokens": int(lengths.sum()), "flops": flops, "device_s": devices * seconds
    }  # fmt: skip


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far in bytes: of tensors on a GPU, else of the process.

    Linux's ru_maxrss starts at that of the process that started this one; VmHWM starts anew.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def sum_of(stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the totals of several stages together, and the largest of their peaks of memory."""
    names = {name: None for metrics in stages for name in metrics if name.startswith(PREFIX)}
    measured = {name: [m[name] for m in stages if name in m] for name in names}
    return {name: max(x) if name == PEAK else sum(x) for name, x in measured.items()}


def compute_line(metrics: Mapping[str, float], of: str = "") -> str:
    """Return the totals of a run in one line.

    of: words that say whose totals these are, with a space before them.
    """
    tokens = ", ".join(
        f"{metrics[f'{PREFIX}{name}_tokens']:,.0f} {name}"
        for name in ("generated", "scored", "trained")
        if f"{PREFIX}{name}_tokens" in metrics
    )
    return (
        f"compute{of}: tokens {tokens}; {metrics[f'{PREFIX}flops'] / PETA:.4g} PFLOP; "
        f"{metrics[f'{PREFIX}device_s']:,.1f} device seconds; "
        f"peak memory {readable(int(metrics[PEAK]))}"
    )
