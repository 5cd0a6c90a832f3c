"""Sampling by transformers' own generate(), for models that the native loop does not support."""

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

from lightning_rlhf.core.errors import LogitsError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.sampler import SamplingParams


class HFSampler:
    """Samples from the active role; the same distribution as `NativeSampler`, but slower.

    All draws of a batch come from one generator, so that a response depends on the lengths of the
    others.
    """

    is_exact = True

    def __init__(self, roles: Roles, params: SamplingParams) -> None:
        self.roles = roles
        self.params = params

    def draw(self, responses: int, generator: torch.Generator) -> int:
        """Return the seed of a batch, whatever its number of responses."""
        return int(torch.randint(2**62, (), generator=generator))

    @torch.no_grad()
    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator
    ) -> SampledResponses:
        """Return responses without log-probabilities and values, as `Sampler.sample`."""
        roles, params = self.roles, self.params
        prompts = prompts.repeat(samples_per_prompt)
        width = prompts.tokens.shape[1]
        stop = None if params.stop is None else _ResponseStop(params.stop, width)
        model = roles.causal_lm
        models_own = model.generation_config
        devices = [] if roles.device.type == "cpu" else [roles.device]
        with torch.random.fork_rng(devices, device_type=roles.device.type):
            torch.manual_seed(self.draw(len(prompts), generator))
            # The model's own settings would fill in those that are not set here.
            model.generation_config = GenerationConfig(
                do_sample=True,
                temperature=float(params.temperature),
                top_k=0,
                top_p=1.0,
                max_new_tokens=params.max_response_tokens,
                eos_token_id=list(params.end_token_ids),
                pad_token_id=params.end_token_ids[0],
            )
            try:
                tokens = model.generate(
                    input_ids=prompts.tokens,
                    attention_mask=prompts.mask.long(),
                    logits_processor=LogitsProcessorList([_Finite()]),
                    stopping_criteria=StoppingCriteriaList([] if stop is None else [stop]),
                )
            finally:
                model.generation_config = models_own
        ends = _ends(tokens[:, width:], params)
        response_mask = ends.long().cumsum(dim=1) - ends.long() == 0
        return SampledResponses(
            tokens=tokens,
            mask=torch.cat([prompts.mask, response_mask], dim=1),
            response_mask=response_mask,
            ended=ends.any(dim=1),
            logprobs=None,
            values=None,
            index=prompts.index,
        )


def _ends(responses: Int[Tensor, "B T"], params: SamplingParams) -> Bool[Tensor, "B T"]:
    """Return True where a token ends its response, by its id or by the criterion `stop`."""
    ends = torch.isin(responses, torch.tensor(list(params.end_token_ids), device=responses.device))
    if params.stop is not None:
        lengths = range(1, responses.shape[1] + 1)
        ends |= torch.stack([params.stop(responses[:, :n], None) for n in lengths], dim=1)
    return ends


class _Finite(LogitsProcessor):
    """Raises LogitsError for logits from which nothing can be sampled."""

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        if scores.isnan().any() or scores.isposinf().any():
            raise LogitsError
        return scores


class _ResponseStop(StoppingCriteria):
    """Applies a stopping criterion to the response alone."""

    def __init__(self, stop: StoppingCriteria, width: int) -> None:
        self.stop = stop
        self.width = width

    def __call__(self, input_ids: Int[Tensor, "B S"], scores: Tensor, **kwargs: object) -> Tensor:
        return self.stop(input_ids[:, self.width :], scores)
