"""Log-probabilities of a sampler are taken over only if it vouches for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.collector import as_responses, decode_responses
from lightning_rlhf.rollout.score import annotate

from .conftest import sample


def rows() -> MicrobatchSize:
    return MicrobatchSize("the number of rows annotated at a time", 6)


def test_what_a_server_measured_is_computed_again(roles: Roles, prompts: Prompts) -> None:
    """Its weights may round otherwise; here its log-probabilities are off by a whole nat."""
    roles.set_role(POLICY)
    exact = sample(roles, prompts, temperature=0.7)
    off = replace(exact, logprobs=torch.where(exact.response_mask, exact.logprobs - 1, 0))
    again = annotate(
        off, roles, None, is_exact=False, temperature=0.7, policy_rows=rows(), batch_size=2
    )
    torch.testing.assert_close(again.logprobs, exact.logprobs, atol=2e-5, rtol=0)
    taken = annotate(
        off, roles, None, is_exact=True, temperature=0.7, policy_rows=rows(), batch_size=2
    )
    assert torch.equal(taken.logprobs, off.logprobs)


def test_a_response_comes_with_the_row_of_its_prompt() -> None:
    responses = as_responses([[1], [1], [1]], [[2, 3], [4], [5]], pad_id=0)
    responses = replace(responses, index=torch.tensor([2, 0, 2]))
    data = [{"prompt": name} for name in ("first", "second", "third")]
    chat: Any = SimpleNamespace(decode_response=lambda tokens: " ".join(map(str, tokens)))
    decoded = decode_responses(responses, data, chat)
    assert [row["prompt"] for row in decoded.rows] == ["third", "first", "third"]
    assert decoded.responses == ["2 3", "4", "5"]
