"""The checks of a run before its first update, and what follows from them."""

import time
from collections.abc import Iterator
from copy import copy
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from jaxtyping import Bool, Int
from lightning.pytorch.utilities.seed import isolate_rng
from rich import get_console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core import errors, masking
from lightning_rlhf.core.records import Preferences, Prompts, Rollout, SampledResponses
from lightning_rlhf.data.batches import StageData
from lightning_rlhf.io import console, storage
from lightning_rlhf.kernels.layers import computing_dtype
from lightning_rlhf.models.config import BASE, CRITIC, POLICY, REFERENCE, REWARD
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import supervised
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.rollout import collector, score
from lightning_rlhf.rollout.sampler import BatchSampler, synchronise
from lightning_rlhf.runs.run import Run
from lightning_rlhf.stages.memory_plan import MemoryPlan, by_role, plan_built, plan_shown

Verdict = Literal["passed", "warning", "failed", "not applicable"]
STYLES = {"passed": "green", "warning": "yellow", "failed": "bold red", "not applicable": "dim"}
LOOKED_AT, ROWS, TOKENS, MORE = 64, 4, 16, 3
"""Number of training rows among which the shortest are taken for the checks, and how many are; the
most tokens of a response that is sampled for them; columns of padding that are added on a side."""
LIMITS = {4: 1e-3, 2: 0.1}
"""Bytes of a number in the computation -> largest difference between two ways to compute it.

It is the root mean square over tokens or rows, in nats or units of reward. In fp32 another order of
sums moves a log-probability by 1e-6 to 1e-4, most in linear attention, which carries its rounding
from token to token. In 16 bits a number is rounded to 2^-9 of its size, and a logit of 20 moves by
0.04 at each rounding. A fault such as a wrong temperature, a shifted position or a padding token
that is read moves it by 0.1 to several nats.
"""


@dataclass(frozen=True)
class Check:
    """One thing that was checked before the first update."""

    name: str
    """Name of the check, a row of the table in docs/preflight.md."""
    measured: str
    """Measured value with its unit, or the reason why nothing is measured."""
    allowed: str
    """Allowed values; empty where nothing is measured."""
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.name} is {self.measured}; allowed: {self.allowed}"


def preflight(
    ready: Run, module: L.LightningModule, data: StageData, *, resumed: bool = False
) -> None:
    """Check a run before its first update as the key `preflight` says; print what was found.

    It changes no weight and no random state.

    resumed: whether a checkpoint is about to be loaded: models are not computed with then.

    Raises: PreflightError where a check fails and preflight is strict, or is all that is wanted.
    """
    mode, started = ready.settings.preflight, time.perf_counter()
    if mode == "off" or not isinstance(getattr(module, "roles", None), Roles):
        return
    with console.Working("preflight"):
        checks, plan = examine(ready, module, data, resumed=resumed)
    failed = [check for check in checks if check.verdict == "failed"]
    faults = [*(check for check in checks if check.verdict == "warning"), *failed]
    is_shown = mode in ("strict", "only") or bool(faults)
    if is_shown:
        names = ("check", "measured", "allowed", "verdict")
        columns = (Column(name, overflow="fold") for name in names)
        table = Table(*columns, title="preflight", title_justify="left")
        for check in checks:
            *cells, verdict = astuple(check)
            table.add_row(*map(Text, cells), Text(verdict, STYLES[verdict]))
        get_console().print(table)
        if plan is not None:
            get_console().print(plan_shown(plan))
    count = sum(check.verdict == "passed" for check in checks)
    passed = f"{count} of {len(checks)} checks" if faults else errors.counted(count, "check")
    show = console.print_line if is_shown else console.print_detail
    show(f"preflight: {passed} passed in {time.perf_counter() - started:.1f} s")
    if failed and mode != "warn":
        raise errors.PreflightError(f"preflight: {'; '.join(map(str, failed))}")
    for check in faults:
        console.print_line(f"warning: preflight: {check}", STYLES["warning"])


@torch.no_grad()
def examine(
    ready: Run, module: L.LightningModule, data: StageData, *, resumed: bool
) -> tuple[list[Check], MemoryPlan | None]:
    """Return all checks that apply to a stage, and its memory plan; arguments as for `preflight`.

    There is no plan of a module of another kind than those of the package.
    """
    device, trainer = ready.device, ready.settings.trainer
    module.to(device)
    checks, plan = [*trainable(module)], plan_built(ready, module, data)
    memory = [] if plan is None else [of_memory(plan, f"{module.stage}.microbatch_size")]
    is_mixed = trainer.precision == "bf16-mixed"
    with isolate_rng(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed):
        try:
            checks += [] if resumed else of_models(module, data, device)
        except torch.OutOfMemoryError:
            short = f"not enough for {ROWS} short rows"
            memory = [Check("memory", short, "more free memory on the device", "failed")]
    return [*checks, *memory], plan


def of_memory(plan: MemoryPlan, key: str) -> Check:
    """Return the check that a run fits into its device; key: that of the micro-batch's size."""
    peak, largest = plan.peak(plan.rows), plan.largest()
    verdict: Verdict = "passed" if peak <= plan.device else "warning" if largest else "failed"
    fits = "of which not even 1 fits" if largest is None else f"of at most {largest}"
    measured = f"{storage.readable(peak)} with {key}={plan.rows}"
    return Check(
        "memory", measured, f"<= {storage.readable(plan.device)}, with a size {fits}", verdict
    )


def trainable(module: Any) -> Iterator[Check]:
    """Yield a check of the trainable parameters of each role."""
    roles = by_role(module)
    for role, group in roles.items():
        size = sum(p.numel() for p in group)
        some = sum(p.numel() for p in group if p.requires_grad)
        allowed: tuple[str, ...] = ("none", "all")
        if isinstance(module, PPOModule | supervised.DPOModule):
            whole = POLICY if module.roles.frozen is None else BASE
            allowed = ("all",) if role in (whole, CRITIC) else ("none",)
        elif isinstance(module, supervised.RewardModule) and role == REWARD:
            allowed = ("all",)
        counts = {"none": 0, "all": size}
        verdict: Verdict = "passed" if some in map(counts.get, allowed) else "failed"
        yield Check(f"trainable: {role}", f"{some:,} of {size:,}", " or ".join(allowed), verdict)
    if not any(p.requires_grad for group in roles.values() for p in group):
        yield Check("trainable: any role", "none", "some", "failed")


def of_models(module: Any, data: StageData, device: torch.device) -> Iterator[Check]:
    """Yield the checks that compute with the models of a stage, on a few short rows."""
    limit = LIMITS[min(4, computing_dtype(module.roles.reference.causal_lm).itemsize)]
    rows = sorted(data.train[:LOOKED_AT], key=lambda example: example.length)[: 2 * ROWS : 2]
    batch: Any = data.collate(rows).to(device)
    if isinstance(module, PPOModule):
        try:
            batch = sample(module, batch)
        except errors.LogitsError as error:
            yield Check("ratio", str(error), "finite numbers", "failed")
            return
        yield from of_policy(module, batch, limit)
        yield from of_own_models(module, batch, limit)
    elif not isinstance(module, supervised.SupervisedModule):
        return
    is_pair = isinstance(batch, Preferences)
    tokens, mask = batch.stacked() if is_pair else (batch.tokens, batch.mask)
    yield padding(BASE, module.roles, tokens, mask, limit)


def sample(module: PPOModule, prompts: Prompts) -> SampledResponses:
    """Return responses to the prompts by the run's sampler, two each where a run draws several.

    Their random numbers come from a generator that the run does not use. Those of the package's
    samplers have at most TOKENS tokens, those of another up to ppo.max_response_tokens.
    """
    each, sampler = min(2, module.config.samples_per_prompt), module.collector.sampler
    synchronise(sampler, module.weights_version)
    if isinstance(sampler, BatchSampler):
        tokens = min(TOKENS, sampler.params.max_response_tokens)
        short = copy(sampler)
        short.params = replace(sampler.params, max_response_tokens=tokens)
        sampler = short
    share = torch.arange(len(prompts), device=prompts.tokens.device)
    return sampler.sample(prompts, each, torch.Generator().manual_seed(0), share)


def of_policy(module: PPOModule, sampled: SampledResponses, limit: float) -> Iterator[Check]:
    """Yield the checks that the policy is the one that sampled, and a new one the reference."""
    roles, rollout = module.roles, module.collector.annotate(sampled)
    reference = roles.reference
    yield at_most("ratio", ratio(module, rollout) - 1, limit)
    name, factors = "KL to the reference", f"lora_B.{POLICY}."
    # A new adapter adds 0, as every second factor of it is 0.
    if any(bool(p.any()) for name, p in roles.named_parameters() if factors in name):
        reason = "the policy's adapter is not 0: it has been trained before"
        yield Check(name, reason, "", "not applicable")
        return
    with reference.use_role(REFERENCE):
        heat, size = module.config.temperature, len(sampled)
        expected, _ = score.predict(sampled, reference, None, heat, size)
    yield at_most(name, (rollout.logprobs - expected)[sampled.response_mask], limit, "nats")


def ratio(module: PPOModule, rollout: Rollout) -> Tensor:
    """Return pi_now / pi_at_sampling at each response token, in micro-batches as an update has
    them."""
    found = []
    ordered = rollout.select(masking.by_length(rollout.mask))
    for micro_batch in ordered.split(module.microbatch.rows):
        hidden = score.response_hidden(module.roles, micro_batch)
        now = score.policy_outputs(module.roles, hidden, micro_batch, module.config).logprobs  # type: ignore[arg-type]
        found.append((now - micro_batch.logprobs[micro_batch.response_mask]).exp())
    return torch.cat(found)


def of_own_models(module: PPOModule, sampled: SampledResponses, limit: float) -> Iterator[Check]:
    """Yield a padding check of each model of PPO with a base of its own: a critic, reward models.

    The responses of a batch are read together and one by one; functions and servers are not called.
    """
    critic, reward = module.critic, module.collector.reward
    shared = (module.roles, module.roles.reference)
    if critic is not None and critic.roles not in shared:
        yield padding(CRITIC, critic.roles, sampled.tokens, sampled.mask, limit)
    decoded = collector.decode_responses(sampled, module.collector.prompts["train"], module.chat)
    tokens, mask = wider(sampled.tokens, sampled.mask)
    response_mask = F.pad(sampled.response_mask, (0, MORE))
    wide = replace(sampled, tokens=tokens, mask=mask, response_mask=response_mask)
    for term, source in zip(reward.terms, reward.sources, strict=True):
        name = f"padding: {term.name}"
        if reward.models.get(term.name, shared)[0] in shared:
            continue
        try:
            together = torch.as_tensor(source(replace(decoded, rollout=wide)))
            rows = (decoded.select(row) for row in torch.arange(len(decoded))[:, None])
            alone = torch.cat([torch.as_tensor(source(row)) for row in rows])
            yield at_most(name, relative(together, alone), limit)
        except errors.RewardError as error:
            yield Check(name, str(error), "a finite number", "failed")


def padding(
    name: str, roles: Roles, tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], limit: float
) -> Check:
    """Compare the log-probabilities of padded rows with those of each row without padding.

    Rows begin with a real token in training, and padding after the last one holds another.
    """
    wide, targets = wider(*masking.from_first_real(tokens, mask))
    wide, targets = wide[:, MORE:], targets[:, MORE:]
    rows = [row[own][None] for row, own in zip(tokens, mask, strict=True)]
    logprobs = partial(supervised.target_logprobs, roles)
    alone = [logprobs(row, torch.ones_like(row, dtype=torch.bool)) for row in rows]
    off = relative(logprobs(wide, targets), torch.cat(alone))
    return at_most(f"padding: {name}", off, limit, "nats")


def wider(
    tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return rows with MORE columns of padding on each side.

    All padding holds a token of the texts, which a model that reads it would notice.
    """
    filler = int(tokens[mask].amax())
    tokens = torch.where(mask, tokens, filler)
    return F.pad(tokens, (MORE, MORE), value=filler), F.pad(mask, (MORE, MORE))


def relative(found: Tensor, expected: Tensor) -> Tensor:
    """Return (found - expected) / max(1, root mean square of `expected`); NaN stays NaN."""
    return (found - expected) / expected.double().square().mean().sqrt().clamp(min=1.0)


def at_most(name: str, off: Tensor, limit: float, unit: str = "") -> Check:
    """Return a check that fails where the root mean square of `off` is above `limit` or NaN."""
    found, unit = float(off.cpu().double().square().mean().sqrt()), f" {unit}" if unit else ""
    verdict: Verdict = "passed" if found <= limit else "failed"
    return Check(name, f"{found:.2g}{unit}", f"<= {limit:.2g}{unit}", verdict)
