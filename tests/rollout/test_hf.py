"""Sampling by the library: the tokens of the native sampler."""

from typing import Any

import pytest
import torch

from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import BatchSampler, HFSampler, SamplingParams

from .conftest import END

SETTINGS: dict[str, Any] = {"max_response_tokens": 24, "temperature": 0.7, "end_token_ids": END}


def drawn(
    kind: type[BatchSampler], roles: Roles, prompts: Prompts, share: list[int]
) -> SampledResponses:
    """Two responses to each prompt of a share, by the numbers of a whole batch."""
    with roles.use_role(POLICY):
        generator = torch.Generator().manual_seed(3)
        sampler = kind(roles, SamplingParams(**SETTINGS))
        return sampler.sample(prompts, 2, generator, torch.tensor(share))


def test_the_library_gives_the_tokens_of_the_native_sampler(roles: Roles, prompts: Prompts) -> None:
    """Whatever the model's own settings say, for a share of a batch too."""
    own = roles.causal_lm.generation_config
    own.top_k, own.repetition_penalty = 2, 3.0
    found = drawn(HFSampler, roles, prompts, [*range(6)])
    expected = drawn(NativeSampler, roles, prompts, [*range(6)])
    assert torch.equal(found.response_mask, expected.response_mask)
    assert torch.equal(found.ended, expected.ended)
    assert torch.equal(
        found.responses[found.response_mask], expected.responses[found.response_mask]
    )
    assert found.ended.sum() > 0
    assert found.logprobs is None
    assert roles.causal_lm.generation_config is own
    part, rows = drawn(HFSampler, roles, prompts, [1, 4]), torch.tensor([2, 3, 8, 9])
    width = part.response_mask.shape[1]
    assert torch.equal(part.response_mask, found.response_mask[rows, :width])
    mask = part.response_mask
    assert torch.equal(part.responses[mask], found.responses[rows, :width][mask])


@pytest.mark.parametrize("roles", ["qwen3"], indirect=True)
def test_a_text_that_stops_a_response_ends_it(roles: Roles, crowd: Prompts, chat: Any) -> None:
    """As in the native sampler, which decides it token by token."""
    texts = {"stop_strings": ("x", "ab"), "tokenizer": chat.tokenizer}
    params = SamplingParams(**(SETTINGS | texts | {"end_token_ids": chat.end_token_ids}))
    share, generator = torch.arange(len(crowd)), torch.Generator()
    found, expected = (
        kind(roles, params).sample(crowd, 1, generator.manual_seed(3), share)
        for kind in (HFSampler, NativeSampler)
    )
    assert torch.equal(found.response_mask, expected.response_mask)
    assert torch.equal(found.ended, expected.ended)
    assert 10 < found.ended.sum() < len(crowd)
