"""Sampling by transformers' own generate(), for models that the native loop does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lightning_rlhf.core.errors import DivergedError
from lightning_rlhf.core.types import Prompts, Rollout
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.draft import DIVERGED, REMEDY
from lightning_rlhf.rollout.score import response_hidden, response_logprobs, spread


@torch.no_grad()
def generate(
    roles: Roles,
    prompts: Prompts,
    *,
    value: Callable[[Float[Tensor, "B d"]], Float[Tensor, " B"]],
    max_response_tokens: int,
    temperature: float,
    end_token_ids: Sequence[int],
    samples_per_prompt: int = 1,
    stop: StoppingCriteria | None = None,
    generator: torch.Generator,
) -> Rollout:
    """As the native `generate`: the same distribution from other random numbers, and slower.

    Log-probabilities and values come from reading the responses once more. All draws of a batch
    come from one generator, so that a response depends on how long the others go on.
    """
    prompts = prompts.repeat(samples_per_prompt)
    width = prompts.tokens.shape[1]
    model, end = roles.causal_lm, torch.tensor(list(end_token_ids), device=roles.device)
    ours, theirs = (
        _settings(max_response_tokens, temperature, end_token_ids),
        model.generation_config,
    )
    devices = [] if roles.device.type == "cpu" else [roles.device]
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        model.generation_config = ours  # what it has there would fill what ours leaves open
        try:
            tokens = model.generate(
                input_ids=prompts.tokens,
                attention_mask=prompts.mask.long(),
                logits_processor=LogitsProcessorList([_Finite()]),
                stopping_criteria=StoppingCriteriaList(
                    [] if stop is None else [_Behind(stop, width)]
                ),
            )
        finally:
            model.generation_config = theirs
    over = _ends(tokens[:, width:], end, stop)
    response_mask = over.long().cumsum(dim=1) - over.long() == 0
    nothing = torch.zeros(response_mask.shape, device=roles.device)
    rollout = Rollout(
        tokens=tokens,
        mask=torch.cat([prompts.mask, response_mask], dim=1),
        response_mask=response_mask,
        ended=over.any(dim=1),
        logprobs=nothing,
        values=nothing,
        index=prompts.index,
    )
    hidden = response_hidden(roles, rollout)
    logprobs, _ = response_logprobs(roles, hidden, rollout, temperature)
    return replace(
        rollout,
        logprobs=spread([logprobs], response_mask),
        values=spread([value(hidden)], response_mask),
    )


def _ends(
    responses: Int[Tensor, "B T"], end: Int[Tensor, " E"], stop: StoppingCriteria | None
) -> Bool[Tensor, "B T"]:
    """Where a token ends its response: as one of `end`, or by what `stop` finds up to it."""
    over = torch.isin(responses, end)
    if stop is not None:
        lengths = range(1, responses.shape[1] + 1)
        over |= torch.stack([stop(responses[:, :n], None) for n in lengths], dim=1)
    return over


class _Finite(LogitsProcessor):
    """Refuses logits from which nothing can be sampled."""

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        if scores.isnan().any() or scores.isposinf().any():
            raise DivergedError(f"{DIVERGED}. {REMEDY}")
        return scores


class _Behind(StoppingCriteria):
    """Looks at what stands behind the prompt only."""

    def __init__(self, stop: StoppingCriteria, width: int) -> None:
        self.stop = stop
        self.width = width

    def __call__(self, input_ids: Int[Tensor, "B S"], scores: Tensor, **kwargs: object) -> Tensor:
        return self.stop(input_ids[:, self.width :], scores)


def _settings(
    max_response_tokens: int, temperature: float, end_token_ids: Sequence[int]
) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=float(temperature),
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_response_tokens,
        eos_token_id=list(end_token_ids),
        pad_token_id=end_token_ids[0],
    )
