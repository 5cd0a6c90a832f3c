"""Checks that sampler, policy, update and reference agree on the log-probabilities of responses."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import torch

from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.types import Prompts, Rollout, SampledResponses
from lightning_rlhf.models.roles import POLICY, REFERENCE, Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.rollout.annotate import predict
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.policy_outputs import policy_outputs
from lightning_rlhf.rollout.sampler import Sampler
from lightning_rlhf.rollout.score import response_hidden
from lightning_rlhf.stages.preflight.check import Check, at_most, not_applicable, rms

TOKENS = 16
"""Largest number of tokens of a response that is sampled for the checks."""


def sample(module: PPOModule, prompts: Prompts) -> SampledResponses:
    """Return responses to the prompts by the run's sampler, two each where a run draws several.

    Their random numbers come from a generator that the run does not use. A sampler from outside the
    package samples up to ppo.max_response_tokens.
    """
    each = min(2, module.config.samples_per_prompt)
    return shortened(module.collector.sampler).sample(
        prompts, each, torch.Generator().manual_seed(0)
    )


def shortened(sampler: Sampler) -> Sampler:
    """Return a sampler of the package with responses of at most TOKENS tokens, others unchanged."""
    if not isinstance(sampler, NativeSampler | HFSampler):
        return sampler
    short, tokens = copy(sampler), min(TOKENS, sampler.params.max_response_tokens)
    short.params = replace(sampler.params, max_response_tokens=tokens)
    return short


def predictions(module: PPOModule, sampled: SampledResponses, limit: float) -> Iterator[Check]:
    """Yield the checks of log-probabilities, and so of ratio and KL, on sampled responses."""
    roles, config, mask = module.roles, module.config, sampled.response_mask
    again, _ = predict(sampled, roles, None, config.temperature, len(sampled))
    name = "sampled log-probabilities"
    if sampled.logprobs is None:
        yield not_applicable(name, "the sampler returns none; those of the model are computed")
    elif not module.collector.sampler.is_exact:
        off = rms((sampled.logprobs - again)[mask])
        yield not_applicable(name, f"{off:.2g} nats, not used: the sampler is not exact")
    else:
        yield at_most(name, rms((sampled.logprobs - again)[mask]), limit, "nats")
    rollout = module.collector.annotate(sampled)
    yield at_most("ratio", rms(ratio(module, rollout) - 1), limit)
    name = "KL to the reference"
    if not starts_as_reference(roles):
        yield not_applicable(name, "the policy's adapter is not 0: it has been trained before")
        return
    with roles.use_role(REFERENCE):
        reference, _ = predict(sampled, roles, None, config.temperature, len(sampled))
    yield at_most(name, rms((rollout.logprobs - reference)[mask]), limit, "nats")


def ratio(module: PPOModule, rollout: Rollout) -> torch.Tensor:
    """Return pi_now / pi_at_sampling at each response token, in micro-batches as an update has
    them."""
    found = []
    ordered = rollout.select(by_length(rollout.mask))
    for micro_batch in ordered.split(module.guard.microbatch.rows):
        hidden = response_hidden(module.roles, micro_batch)
        now = policy_outputs(module.roles, hidden, micro_batch, module.config).logprobs  # type: ignore[arg-type]
        found.append((now - micro_batch.logprobs[micro_batch.response_mask]).exp())
    return torch.cat(found)


def starts_as_reference(roles: Roles) -> bool:
    """Return whether the policy's adapter adds 0: every second factor of it is 0."""
    factors = [p for name, p in roles.named_parameters() if f"lora_B.{POLICY}." in name]
    return bool(factors) and not any(bool(p.any()) for p in factors)
