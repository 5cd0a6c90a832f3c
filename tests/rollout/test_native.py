"""Generation: what is recorded at sampling is what the model computes once more."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import TrainingError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.kernels import layers
from lightning_rlhf.models.config import POLICY, VALUE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import HFSampler, SamplingParams

from .conftest import END, sample

Draw = Callable[[Tensor], None]


def roll_out(roles: Roles, prompts: Prompts, **changes: Any) -> SampledResponses:
    with roles.use_role(POLICY):
        return sample(roles, prompts, **changes)


@torch.no_grad()
def alone(roles: Roles, tokens: Tensor, mask: Tensor) -> Tensor:
    """Last hidden states of one row without its padding, by the plain model: no cache, no mask."""
    with roles.use_role(POLICY):
        model = roles.causal_lm
        return model(tokens[mask][None], output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("longest", [1, 24])
def test_what_was_recorded_is_what_each_row_gives_alone(
    roles: Roles, prompts: Prompts, longest: int
) -> None:
    rollout = roll_out(roles, prompts, max_response_tokens=longest)
    for i in range(len(prompts)):
        n = int(rollout.response_mask[i].sum())
        hidden = alone(roles, rollout.tokens[i], rollout.mask[i])[-n - 1 : -1]
        said = rollout.responses[i, :n]
        distribution = torch.log_softmax(roles.head(hidden) / 0.7, dim=-1)
        expected = distribution[torch.arange(n), said]
        torch.testing.assert_close(rollout.logprobs[i, :n], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            rollout.values[i, :n], roles.heads[VALUE](hidden)[:, 0], atol=1e-5, rtol=0
        )


def test_a_response_goes_up_to_its_first_end_token(roles: Roles, prompts: Prompts) -> None:
    rollout = roll_out(roles, prompts)
    assert {bool(ended) for ended in roll_out(roles, prompts, max_response_tokens=4).ended} == {
        True,
        False,
    }
    for short in (rollout, roll_out(roles, prompts, max_response_tokens=4)):
        width = short.response_mask.shape[1]
        for i in range(len(prompts)):
            said = short.responses[i].tolist()
            ends = [t for t, token in enumerate(said) if token in END]
            length = ends[0] + 1 if ends else width  # the end token is part of the response
            expected = torch.arange(width) < length
            assert torch.equal(short.response_mask[i], expected)
            assert short.ended[i].item() == bool(ends)
            assert short.logprobs[i, length:].tolist() == [0.0] * (width - length)
            assert short.values[i, length:].tolist() == [0.0] * (width - length)


def test_all_numbers_are_drawn_beforehand(roles: Roles, prompts: Prompts) -> None:
    """What a generator gives after a rollout does not depend on how long the responses were."""
    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    rollout = roll_out(roles, prompts, max_response_tokens=100, generator=generator)
    assert rollout.ended.all()
    assert 100 > rollout.response_mask.shape[1] == rollout.response_mask.sum(1).max()
    torch.rand(len(prompts), 100, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_a_response_does_not_depend_on_its_batch_nor_on_its_padding(
    roles: Roles, make_prompts: Callable[..., Prompts], draw: Draw
) -> None:
    rows = [[7, 8, 9, 10, 11, 12], [13], [1, 14, 1], [15, 16, 17, 1]]
    uniforms = torch.rand(4, 24, generator=torch.Generator().manual_seed(5))
    draw(uniforms)
    together = roll_out(roles, make_prompts(*rows))
    padded = roll_out(roles, make_prompts(*rows, extra=5))
    for i, row in enumerate(rows):
        draw(uniforms[i : i + 1])
        single = roll_out(roles, make_prompts(row))
        draw(uniforms[[i, 3 - i]])
        other_company = roll_out(roles, make_prompts(row, rows[3 - i], extra=2))
        n = int(together.response_mask[i].sum())
        said = together.responses[i, :n]
        for rollout, j in ((padded, i), (single, 0), (other_company, 0)):
            assert int(rollout.response_mask[j].sum()) == n
            assert torch.equal(rollout.responses[j, :n], said)
            torch.testing.assert_close(
                rollout.logprobs[j, :n], together.logprobs[i, :n], atol=1e-5, rtol=0
            )
            torch.testing.assert_close(
                rollout.values[j, :n], together.values[i, :n], atol=1e-5, rtol=0
            )
            assert rollout.ended[j] == together.ended[i]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_as_frequent_as_the_softmax_at_this_temperature(
    roles: Roles, make_prompts: Callable[..., Prompts], draw: Draw, temperature: float
) -> None:
    """Evenly spread numbers in place of random ones: each frequency is exact to one count."""
    n = 500
    draw(((torch.arange(n) + 0.5) / n)[:, None])
    prompts = make_prompts(*[[7, 8, 9]] * n)
    rollout = roll_out(roles, prompts, max_response_tokens=1, temperature=temperature)
    found = torch.bincount(rollout.responses[:, 0], minlength=61)
    hidden = alone(roles, torch.tensor([7, 8, 9]), torch.ones(3, dtype=torch.bool))[-1]
    expected = n * torch.softmax(roles.head(hidden).double() / temperature, dim=-1)
    assert (found - expected).abs().max() <= 1.01
    assert found.max() > 1.2 * n / 61  # the model has preferences


def test_samples_of_one_prompt_are_those_of_the_prompt_repeated(
    roles: Roles, prompts: Prompts
) -> None:
    """They share a reading of the prompt, and nothing else."""
    shared = roll_out(roles, prompts, samples_per_prompt=3)
    repeated = roll_out(roles, prompts.repeat(3))
    for name in ("tokens", "mask", "response_mask", "ended", "index"):
        assert torch.equal(getattr(shared, name), getattr(repeated, name)), name
    torch.testing.assert_close(shared.logprobs, repeated.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(shared.values, repeated.values, atol=1e-5, rtol=0)
    assert len({tuple(row) for row in shared.responses[:3].tolist()}) == 3


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_rows_that_ended_may_leave_the_batch_at_any_time(
    roles: Roles, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    """0: never; 1: at once."""
    usual = roll_out(roles, prompts)
    monkeypatch.setattr("lightning_rlhf.rollout.native.KEPT", kept)
    changed = roll_out(roles, prompts)
    for name in ("mask", "response_mask", "ended"):
        assert torch.equal(getattr(usual, name), getattr(changed, name)), name
    said = usual.response_mask
    assert torch.equal(usual.responses[said], changed.responses[said])
    torch.testing.assert_close(usual.logprobs, changed.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(usual.values, changed.values, atol=1e-5, rtol=0)


def test_where_onednn_multiplies_rows_leave_the_batch_so_that_their_numbers_are_few(
    roles: Roles, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU their products are compiled for each: multiples of 8, and 4, 2, 1."""
    monkeypatch.setattr(layers, "fp32_by_onednn", lambda: True)
    many = prompts.repeat(-(-40 // len(prompts))).select(torch.arange(40))
    seen: list[int] = []

    def value(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return roles.heads[VALUE](hidden)

    with torch.autocast("cpu", torch.bfloat16):
        rollout = roll_out(roles, many, value_head=value)
    assert set(seen) <= {40, 24, 16, 8, 4, 2, 1}
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 2
    said = rollout.response_mask.sum(1)
    for count, column in zip(seen, range(said.max()), strict=True):
        assert count >= int((said > column).sum())
    ends = rollout.responses.gather(1, said[:, None] - 1).squeeze(1)
    assert torch.equal(torch.isin(ends, torch.tensor(END)), rollout.ended)


@pytest.mark.parametrize("sampler", [NativeSampler, HFSampler])
def test_a_policy_that_has_diverged_is_one_error(
    roles: Roles, prompts: Prompts, sampler: type[NativeSampler | HFSampler]
) -> None:
    with torch.no_grad():
        next(p for n, p in roles.named_parameters() if f".{POLICY}." in n).fill_(math.nan)
    params = SamplingParams(max_response_tokens=4, temperature=1.0, end_token_ids=END)
    with pytest.raises(TrainingError, match="NaN or infinite"), roles.use_role(POLICY):
        sampler(roles, params).sample(prompts, 1, torch.Generator(), torch.arange(6))
