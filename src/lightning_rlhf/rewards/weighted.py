"""Reward of one component, or of several with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.core.shaping import AS_IT_IS, Term
from lightning_rlhf.core.types import DecodedResponses
from lightning_rlhf.core.wording import counted, quoted

Source = Callable[[DecodedResponses], Float[Tensor, " B"] | Sequence[float | None]]
"""Function that returns one number for each response."""
Flops = Callable[[Int[Tensor, " B"], int], float]
"""Function from the lengths of rows, in tokens, and the number of forward passes over them to the
floating-point operations of a reward model. A source may have one as its attribute `flops`."""


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
    def reading(self) -> tuple[Flops, ...]:
        """Return the operations of each component that reads the responses with a model here."""
        found = (getattr(source, "flops", None) for source in self.sources)
        return tuple(flops for flops in found if flops is not None)

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
    if len(found) != len(decoded):
        raise RewardError(
            f"reward {name!r} gave {counted(len(found), 'number')} for "
            f"{counted(len(decoded), 'response')}; allowed: "
            "one for each"
        )
    if not isinstance(found, Tensor):
        for i, number in enumerate(found):
            is_number = isinstance(number, int | float) or hasattr(number, "__float__")
            require_finite_score(is_number, number, decoded, i, name)
        found = torch.tensor(
            [_as_float(number, decoded, i, name) for i, number in enumerate(found)]
        )
    require_finite_score(found.dim() == 1, f"a tensor {list(found.shape)}", decoded, 0, name)
    found = found.to(decoded.rollout.tokens.device, torch.float32)
    finite = found.isfinite()
    if not finite.all():
        i = int(finite.int().argmin())
        require_finite_score(False, found[i].item(), decoded, i, name)
    return found


def _as_float(number: Any, decoded: DecodedResponses, i: int, name: str) -> float:
    try:
        return float(number)
    except (OverflowError, TypeError, ValueError):
        require_finite_score(False, number, decoded, i, name)
        raise


def require_finite_score(
    holds: bool, found: Any, decoded: DecodedResponses, i: int, name: str
) -> None:
    """Raise RewardError, naming what a component gave for the i-th response, unless `holds`."""
    if not holds:
        shown = found if isinstance(found, str) else quoted(found)
        raise RewardError(
            f"reward {name!r} gave {shown} for the response {quoted(decoded.responses[i])} to the "
            f"prompt {quoted(decoded.rows[i]['prompt'])}; allowed: a finite number"
        )
