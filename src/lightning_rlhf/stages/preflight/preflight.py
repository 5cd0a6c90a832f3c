"""The checks of a run before its first update: which apply, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.errors import LogitsError, PreflightError, RewardError
from lightning_rlhf.core.wording import counted
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.models.fingerprint import fingerprint, tolerance
from lightning_rlhf.models.roles import REFERENCE, SFT, Roles
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.preflight.check import LIMITS, Check, Verdict, at_most, rms
from lightning_rlhf.stages.preflight.memory_plan import (
    MemoryPlan,
    Planned,
    bytes_of_number,
    plan_memory,
)
from lightning_rlhf.stages.preflight.padding import (
    padding_of_critic,
    padding_of_dpo,
    padding_of_pairs,
    padding_of_policy,
    padding_of_rewards,
    padding_of_sft,
)
from lightning_rlhf.stages.preflight.parameters import roles_of, trainable
from lightning_rlhf.stages.preflight.predictions import predictions, sample
from lightning_rlhf.stages.preflight.table import print_report
from lightning_rlhf.stages.prepare import Prepared
from lightning_rlhf.stages.stage import Settings

LOOKED_AT, ROWS = 64, 4
"""Number of training rows among which the shortest are taken for the checks, and how many are."""
STYLES = {"warning": "yellow", "failed": "bold yellow"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of a run."""

    checks: tuple[Check, ...]
    plan: MemoryPlan | None
    """Memory that the run needs; None for a module of another kind than those of the package."""
    seconds: float

    def of(self, *verdicts: Verdict) -> list[Check]:
        """Return the checks with one of these verdicts."""
        return [check for check in self.checks if check.verdict in verdicts]


def preflight(
    ready: Prepared, module: L.LightningModule, data: StageData, *, resumed: bool = False
) -> None:
    """Check a run before its first update as the key `preflight` says; print what was found.

    It changes no weight and no random state.

    resumed: whether a checkpoint is about to be loaded: models are not computed with then.

    Raises: PreflightError where a check fails and preflight is strict, or is all that is wanted.
    """
    mode = ready.settings.preflight
    if mode == "off" or not isinstance(getattr(module, "roles", None), Roles):
        return
    with Working("preflight"):
        report = examine(ready, module, data, resumed=resumed)
    failed = report.of("failed")
    if mode in ("strict", "only") or failed or report.of("warning"):
        print_report(report.checks, report.plan)
    count, tried = len(report.of("passed")), len(report.checks) - len(report.of("not applicable"))
    passed = counted(count, "check") if count == tried else f"{count} of {tried} checks"
    print_line(f"preflight: {passed} passed in {report.seconds:.1f} s")
    if failed and mode != "warn":
        raise PreflightError(f"preflight: {'; '.join(map(stated, failed))}")
    for check in report.of("warning", "failed"):
        print_line(f"warning: preflight: {stated(check)}", STYLES[check.verdict])


def stated(check: Check) -> str:
    """Return a check as text: name, measured and allowed value."""
    return f"{check.name} is {check.measured}; allowed: {check.allowed}"


@torch.no_grad()
def examine(
    ready: Prepared, module: L.LightningModule, data: StageData, *, resumed: bool
) -> Report:
    """Return all checks that apply to a stage; arguments as for `preflight`."""
    started, device = time.perf_counter(), ready.device
    module.to(device)
    with isolate_rng(), computing_as(ready.settings, device):
        plan = None
        if isinstance(module, Planned):
            trainer = ready.settings.trainer
            sharing = trainer.devices if device.type == "cpu" else 1
            plan = plan_memory(module, data, device, processes=trainer.processes, sharing=sharing)
        checks = [*of_inputs(ready, module, data), *trainable(module)]
        memory = [plan.check()] if plan else []
        if not resumed:
            checks += of_fingerprints(ready, roles_of(module))
            try:
                checks += of_models(module, data, device)
            except torch.OutOfMemoryError:
                short = f"not enough for {ROWS} short rows"
                memory = [Check("memory", short, "more free memory on the device", "failed")]
        checks += memory
    return Report(checks=tuple(checks), plan=plan, seconds=time.perf_counter() - started)


def computing_as(settings: Settings, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which Lightning computes at the run's precision."""
    if settings.trainer.precision == "bf16-mixed":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def of_inputs(ready: Prepared, module: L.LightningModule, data: StageData) -> Iterator[Check]:
    """Yield the checks of the tokenizer and of the longest sequence against the model."""
    roles, tokens = roles_of(module), len(ready.tokenizer)
    fits: Verdict = "passed" if tokens <= roles.vocab_size else "failed"
    yield Check("vocabulary", f"{tokens:,} tokens", f"<= {roles.vocab_size:,}", fits)
    longest = max(example.length for example in (*data.train, *data.val))
    if isinstance(module, PPOModule):
        longest += module.config.max_response_tokens
    limit = getattr(roles.causal_lm.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None:
        within: Verdict = "passed" if longest <= limit else "warning"
        yield Check("positions", f"{longest:,} tokens", f"<= {limit:,}", within)


def of_fingerprints(ready: Prepared, roles: Roles) -> Iterator[Check]:
    """Yield the checks that reference and reward models are those that their checkpoints hold."""
    for name, final in ready.parents.items():
        role = REFERENCE if name == SFT else name
        expected = fingerprint(final, "self") if role == REFERENCE or role in roles.heads else None
        if expected is None:
            continue
        found = roles.probe(role)
        off = rms(found - expected) / rms(expected)
        yield at_most(f"fingerprint: {role}", off, tolerance(roles, final))


def of_models(module: L.LightningModule, data: StageData, device: torch.device) -> Iterator[Check]:
    """Yield the checks that compute with the models of a stage, on a few short rows."""
    limit = LIMITS[min(4, bytes_of_number(roles_of(module)))]
    rows = sorted(data.train[:LOOKED_AT], key=lambda example: example.length)[: 2 * ROWS : 2]
    batch: Any = data.collate(rows).to(device)
    match module:
        case SFTModule():
            yield padding_of_sft(module, batch, limit)
        case RewardModule():
            yield padding_of_pairs(module, batch, limit)
        case DPOModule():
            yield padding_of_dpo(module, batch, limit)
        case PPOModule():
            try:
                sampled = sample(module, batch)
            except LogitsError as error:
                yield Check("sampled log-probabilities", str(error), "finite numbers", "failed")
                return
            yield from predictions(module, sampled, limit)
            yield padding_of_policy(module, sampled, limit)
            yield padding_of_critic(module, sampled, limit)
            try:
                yield from padding_of_rewards(module, sampled, limit)
            except RewardError as error:
                yield Check("padding: reward", str(error), "a finite number", "failed")
