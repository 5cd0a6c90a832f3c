"""Decoding in fixed shapes samples what the growing loop samples."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_rlhf.core.types import Prompts
from lightning_rlhf.kernels.decoder import family
from lightning_rlhf.models.roles import POLICY, Roles
from lightning_rlhf.rollout.static import StaticDecoding

from .conftest import END, sample


@pytest.fixture(autouse=True)
def _on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rlhf.rollout.static.DEVICES", ("cpu",))


@pytest.mark.parametrize("changes", [{}, {"samples_per_prompt": 2}, {"max_response_tokens": 1}])
def test_the_responses_are_those_of_the_growing_loop(
    roles: Roles, prompts: Prompts, changes: dict[str, Any]
) -> None:
    with roles.use_role(POLICY):
        expected = sample(roles, prompts, **changes)
        if family(roles.causal_lm) is None:
            with pytest.warns(UserWarning, match=r"ppo\.cuda_graphs=true is not used: the fast"):
                found = sample(roles, prompts, is_static=True, **changes)
        else:
            found = sample(roles, prompts, is_static=True, **changes)
    assert torch.equal(found.response_mask, expected.response_mask)
    assert torch.equal(found.ended, expected.ended)
    mask = expected.mask
    assert torch.equal(found.tokens[mask], expected.tokens[mask])
    for name in ("logprobs", "values"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5
        )


def test_it_stops_soon_after_every_row_has_ended(roles: Roles, prompts: Prompts) -> None:
    if family(roles.causal_lm) is None:
        pytest.skip("decoded by the growing loop")
    with roles.use_role(POLICY):
        found = sample(roles, prompts, is_static=True, max_response_tokens=100)
    assert found.ended.all()
    longest = int(found.response_mask.sum(1).max())
    assert found.response_mask.shape[1] == longest < 100  # what was decoded beyond is cut off
    last = found.tokens[:, prompts.tokens.shape[1] :][:, longest - 1]
    assert set(last[found.response_mask[:, -1]].tolist()) <= set(END)


def test_no_warning_where_it_is_not_asked_for_or_the_device_is_another(
    roles: Roles, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(), patch.object(StaticDecoding, "run") as run:
        warnings.simplefilter("error")
        sample(roles, prompts, max_response_tokens=2)
        monkeypatch.setattr("lightning_rlhf.rollout.static.DEVICES", ("cuda",))
        sample(roles, prompts, max_response_tokens=2, is_static=True)
    assert not run.called
