"""Reward of one component, or of several with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.core.config import Term
from lightning_rlhf.core.errors import RewardError, counted, quoted
from lightning_rlhf.core.records import DecodedResponses
from lightning_rlhf.core.shaping import AS_IT_IS
from lightning_rlhf.io.user_code import user_number

Source = Callable[[DecodedResponses], Float[Tensor, " B"] | Sequence[float | None]]
"""Function that returns one number for each response."""


@dataclass(frozen=True)
class Reward:
    """Reward that PPO maximises: components, each with its term in the weighted sum."""

    terms: tuple[Term, ...]
    """Terms of the sum, one per component."""
    sources: tuple[Source, ...]
    """Functions that compute the components, in the order of `terms`."""

    @classmethod
    def of(cls, source: Source) -> Reward:
        """Return the reward of a single component, unchanged."""
        return cls(AS_IT_IS, (source,))

    @property
    def models(self) -> dict[str, tuple[nn.Module, str]]:
        """Return name -> (model, its role) of each component that a model computes here."""
        found = {}
        for term, source in zip(self.terms, self.sources, strict=True):
            model = getattr(source, "model", source)  # of a TextReward its TextModel
            if isinstance(module := getattr(model, "module", None), nn.Module):
                found[term.name] = module, str(getattr(model, "role", ""))
        return found

    @torch.no_grad()
    def __call__(self, decoded: DecodedResponses) -> Float[Tensor, "B K"]:
        """Return the number of each component for each response, before weights.

        Raises:
            RewardError: a number is missing or not finite; names component, prompt and response.
        """
        columns = [
            checked(source(decoded), decoded, term.name)
            for term, source in zip(self.terms, self.sources, strict=True)
        ]
        return torch.stack(columns, dim=1)


def checked(found: Any, decoded: DecodedResponses, name: str) -> Float[Tensor, " B"]:
    """Return the numbers that a component gave, in fp32 on the device of the responses.

    Raises RewardError unless they are one finite number for each response.
    """
    if hasattr(found, "tolist") and not isinstance(found, Tensor):  # an array
        found = found.tolist()
    is_list = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.dim() > 0)
    if not is_list or len(found) != len(decoded):
        given = f"{quoted(found)} for {counted(len(decoded), 'response')}"
        raise RewardError(f"reward {name!r} gave {given}; allowed: a list of one number for each")
    if isinstance(found, Tensor) and found.dim() != 1:
        raise not_finite(f"a tensor {list(found.shape)}", decoded, 0, name)
    if not isinstance(found, Tensor):
        numbers = []
        for i, one in enumerate(found):
            try:
                numbers.append(user_number(one))
            except (OverflowError, RuntimeError, TypeError, ValueError):
                raise not_finite(quoted(one), decoded, i, name) from None
        found = torch.tensor(numbers)
    found = found.to(decoded.rollout.tokens.device, torch.float32)
    finite = found.isfinite()
    if not finite.all():
        i = int(finite.int().argmin())
        raise not_finite(quoted(found[i].item()), decoded, i, name)
    return found


def not_finite(shown: str, decoded: DecodedResponses, i: int, name: str) -> RewardError:
    """Return the error that names what a component gave for the i-th response."""
    return RewardError(
        f"reward {name!r} gave {shown} for the response {quoted(decoded.responses[i])} to the "
        f"prompt {quoted(decoded.rows[i]['prompt'])}; allowed: a finite number"
    )
