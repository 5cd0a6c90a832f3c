"""The effect of replayed updates on each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.wording import counted
from lightning_rlhf.data.rollouts import Recorded
from lightning_rlhf.report.token_text import signed


@dataclass(frozen=True, kw_only=True)
class ReplayedToken:
    """One token of a response: its numbers at sampling and after the iteration's updates."""

    text: str
    advantage: float
    kl: float
    """log p - log q of this token, policy p at sampling against the reference q, nats."""
    kl_after: float
    """log p - log q of this token for the policy p after the updates, nats."""
    ratio: float
    """Probability after the updates divided by that at sampling."""
    clipped: bool
    """True if the ratio is outside the clip range."""
    value: float | None
    """V(s_t) of the critic; None without a critic."""
    value_after: float | None


@dataclass(frozen=True, kw_only=True)
class ReplayedResponse:
    """One response of the batch."""

    row: int
    """Index of the response in the batch and in its file, from 0."""
    prompt: str
    score: float
    component_scores: Mapping[str, float]
    """Number of each component of the reward, by name."""
    ended: bool
    tokens: tuple[ReplayedToken, ...]

    @property
    def change(self) -> float:
        """Return the mean over tokens of |log ratio|, nats."""
        return fmean(abs(token.kl_after - token.kl) for token in self.tokens)


def most_changed(
    recorded: Recorded,
    logprobs: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"] | None,
    *,
    show: Callable[[Sequence[int]], str],
    clip_range: tuple[float, float],
    count: int,
) -> list[ReplayedResponse]:
    """Return the `count` responses whose probabilities the updates changed most.

    Responses with a number that is not finite come first.
    logprobs, values: predictions after the updates; logprobs in nats.
    show: function that returns tokens as text.
    clip_range: lowest and highest ratio that is not clipped.
    """
    experience = recorded.experience
    mask = experience.response_mask
    low, high = clip_range
    numbers = {
        "advantage": experience.advantages,
        "kl": experience.kl,
        "kl_after": logprobs - experience.ref_logprobs,
        "ratio": (logprobs - experience.old_logprobs).exp(),
    }
    if values is not None:
        numbers |= {"value": experience.old_values, "value_after": values}
    columns = {
        name: [row[real].tolist() for row, real in zip(x, mask, strict=True)]
        for name, x in numbers.items()
    }
    responses = []
    for row, ids in enumerate(real_tokens(experience.responses, mask)):
        tokens = []
        for t, token in enumerate(ids):
            found = {name: column[row][t] for name, column in columns.items()}
            tokens.append(
                ReplayedToken(
                    text=show([token]),
                    clipped=not low <= found["ratio"] <= high,
                    **({"value": None, "value_after": None} | found),
                )
            )
        responses.append(
            ReplayedResponse(
                row=row,
                prompt=recorded.prompts[row],
                score=float(experience.score[row]),
                component_scores=dict(
                    zip(recorded.components, experience.component_scores[row].tolist(), strict=True)
                ),
                ended=bool(experience.ended[row]),
                tokens=tuple(tokens),
            )
        )
    return sorted(responses, key=_rank)[:count]


def _rank(response: ReplayedResponse) -> float:
    """Return the sort key of a response, lowest first: not finite, then the most changed."""
    numbers = (response.change, response.score, *(token.advantage for token in response.tokens))
    return -response.change if all(map(math.isfinite, numbers)) else -math.inf


def heading(response: ReplayedResponse) -> str:
    """Return the numbers of a whole response in one line."""
    parts = [f"{name} {signed(part)}" for name, part in response.component_scores.items()]
    return ", ".join(
        [
            f"response {response.row}: score {signed(response.score)}",
            *(parts if len(parts) > 1 else []),
            counted(len(response.tokens), "token"),
            "ended" if response.ended else "cut off",
            f"KL {signed(sum(t.kl for t in response.tokens))} to "
            f"{signed(sum(t.kl_after for t in response.tokens))} nats",
            f"mean |log ratio| {response.change:.4f}",
        ]
    )


COLUMNS = (
    "token",
    "advantage",
    "KL before",
    "KL after",
    "ratio",
    "clipped",
    "value before",
    "value after",
)


def cells(token: ReplayedToken) -> list[str]:
    """Return the cells of the token for COLUMNS; the last two are empty without a critic."""
    values = [signed(x) for x in (token.value, token.value_after) if x is not None]
    return [
        repr(token.text),
        signed(token.advantage),
        f"{token.kl:+z.4f}",
        f"{token.kl_after:+z.4f}",
        f"{token.ratio:.4f}",
        "clipped" if token.clipped else "",
        *values,
    ]


def legend(responses: Sequence[ReplayedResponse]) -> dict[str, str]:
    """Return the meaning of each number; those of the critic only where there is one."""
    critic = {"value": "what the critic expected from there on, before and after the updates"}
    has_critic = responses[0].tokens[0].value is not None
    return {
        "advantage": "above 0 the update wanted the token likelier, below 0 less likely",
        "KL": "log-probability less the reference's, at sampling (before) and after the updates; "
        "nats, of a response the sum",
        "ratio": "probability after the updates over that at sampling",
        "clipped": "the ratio has left the clip range",
        **(critic if has_critic else {}),
        "mean |log ratio|": "how much the updates changed a response, per token",
    }


def order(shown: int, batch: int) -> str:
    """Return a sentence on which responses of the batch are shown."""
    return (
        f"{shown} of {batch} responses: first those with a number that is not finite, then from "
        "the largest mean |log ratio| down"
    )
