"""A user's sampler that fails or returns what does not fit ends the run with one line."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import ConfigError, LogitsError, RLHFError, SamplerError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.rollout import collector
from lightning_rlhf.rollout.collector import build_sampler, load_sampler
from lightning_rlhf.rollout.sampler import CheckedSampler, SamplingParams

NAME = "server.py:Server"
PROMPTS = Prompts(
    tokens=torch.tensor([[1, 7], [8, 9]]),
    mask=torch.tensor([[False, True], [True, True]]),
    index=torch.tensor([40, 41]),
)
RESPONSE_MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
GOOD = SampledResponses(
    tokens=torch.tensor([[1, 7, 2, 3, 4], [1, 7, 4, 0, 0], [8, 9, 5, 4, 0], [8, 9, 5, 5, 5]]),
    mask=torch.cat([PROMPTS.mask.repeat_interleave(2, dim=0), RESPONSE_MASK], dim=1),
    response_mask=RESPONSE_MASK, ended=torch.tensor([True, True, True, False]),
    logprobs=torch.where(RESPONSE_MASK, -0.5, 0.0), values=torch.zeros(4, 3),
    index=torch.tensor([40, 40, 41, 41]),
)  # fmt: skip
"""Two responses of at most 3 tokens to each of 2 prompts, in a vocabulary of 10."""


class Server:
    """Returns what it was given, or raises it."""

    is_exact = False

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def sample(self, *args: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def sample(answer: Any) -> SampledResponses:
    sampler = CheckedSampler(Server(answer), NAME, max_response_tokens=3, vocab_size=10)
    return sampler.sample(PROMPTS, 2, torch.Generator(), torch.arange(2))


def changed(field: str, *at: int, to: float) -> SampledResponses:
    """The good answer with one element of a field changed."""
    tensor: Tensor = getattr(GOOD, field).clone()
    tensor[at] = to
    return replace(GOOD, **{field: tensor})


def test_a_class_that_cannot_be_given_a_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"is_exact": True, "sample": lambda self, prompts, count, generator: None}
    monkeypatch.setattr(collector, "load_object", lambda *_: type("Old", (), members))
    with pytest.raises(ConfigError, match=r"ppo.rollout is 'old:Old', whose sample\(\) cannot be"):
        load_sampler("old:Old")


def with_response_mask(mask: Tensor) -> SampledResponses:
    """The good answer with other responses; `mask` agrees with them."""
    whole = torch.cat([GOOD.mask[:, :2], mask], dim=1)
    tokens = torch.zeros(4, whole.shape[1], dtype=torch.int64)
    tokens[:, :2] = GOOD.tokens[:, :2]
    return replace(GOOD, tokens=tokens, mask=whole, response_mask=mask, logprobs=None, values=None)


def lengths(*tokens: int, columns: int = 3) -> Tensor:
    return torch.arange(columns) < torch.tensor(tokens)[:, None]


GAP = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize("answer", [
    GOOD,
    replace(GOOD, logprobs=None, values=None),
    changed("logprobs", 1, 2, to=float("nan")),  # padding
    with_response_mask(lengths(3, 1, 2, 3, columns=5)),  # more padding than needed
])  # fmt: skip
def test_responses_that_fit_are_returned_as_they_are(answer: SampledResponses) -> None:
    assert sample(answer) is answer


@pytest.mark.parametrize(("answer", "found", "allowed"), [
    (None, "an object of type NoneType", "SampledResponses"),
    (replace(GOOD, tokens=GOOD.tokens[:, 1:]), "tokens of torch.int64 [4, 4] on cpu",
     "torch.int64 [4, 5] on cpu"),
    (replace(GOOD, ended=GOOD.ended.to("meta")), "ended of torch.bool [4] on meta", "torch.bool"),
    (with_response_mask(lengths(3, 1, 4, 3, columns=4)), "another number of tokens for response 2",
     "1 to ppo.max_response_tokens=3, the end token"),
    (with_response_mask(GAP), "a response_mask with a gap for response 1", "True from its first"),
    (changed("tokens", 3, 1, to=7), "tokens of another prompt for response 3", "the prompt's"),
    (changed("tokens", 1, 4, to=-1), "a token id outside of the vocabulary for response 1",
     "0 to 9, on padding too"),
    (changed("logprobs", 2, 1, to=0.002), "logprobs above 0 for response 2",
     "logarithms of probabilities, at most 0"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(answer: Any, found: str, allowed: str) -> None:
    with pytest.raises(SamplerError) as caught:
        sample(answer)
    message = str(caught.value)
    expected = f"ppo.rollout is '{NAME}', whose sample() returned {found}; allowed: {allowed}"
    assert message.startswith(expected)
    assert len(message.splitlines()) == 1


def test_an_exception_in_a_sampler_is_named() -> None:
    for known in (LogitsError(), torch.OutOfMemoryError()):  # which have a meaning of their own
        with pytest.raises(type(known)):
            sample(known)
    error = ConnectionError("http://gpu:8000 refused\nthe connection")
    shown = "ConnectionError: http://gpu:8000 refused the connection"
    with pytest.raises(SamplerError) as caught:
        sample(error)
    assert str(caught.value) == f"ppo.rollout is '{NAME}', whose sample() raised {shown}"
    assert caught.value.__cause__ is error


def test_a_user_s_sampler_is_wrapped_and_ours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    roles: Any = MagicMock(vocab_size=10)
    params = SamplingParams(max_response_tokens=3, temperature=1.0, end_token_ids=(4,))
    load: Callable[..., Any] = lambda *_: lambda roles, params: Server(None)  # noqa: E731
    monkeypatch.setattr(collector, "load_sampler", load)
    for name in ("native", "hf"):  # vllm is built by the stage
        assert not isinstance(build_sampler(name, roles, params, None), CheckedSampler)
    sampler = build_sampler(NAME, roles, params, None, key="own.rollout")
    assert sampler.is_exact is False
    with pytest.raises(RLHFError, match=f"^own.rollout is '{NAME}'"):
        sampler.sample(PROMPTS, 1, torch.Generator(), torch.arange(2))
