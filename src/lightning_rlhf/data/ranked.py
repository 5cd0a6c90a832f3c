"""Rows of training data from scored responses: preference pairs, best-of-N, accepted responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from typing import Any, Literal

from lightning_rlhf.data.formats import native
from lightning_rlhf.data.rows import BadRow

Row = dict[str, Any]
Pairs = Literal["best_worst", "all"]


@dataclass(frozen=True)
class RankedRows:
    """Rows in the form that stage=sft, stage=rm and stage=dpo read."""

    preferences: list[Row] = field(default_factory=list)
    """{"prompt", "chosen", "rejected", "margin"}, with the difference of the scores as margin."""
    demonstrations: list[Row] = field(default_factory=list)
    """{"prompt", "response", "score"}: the best response to each prompt."""
    accepted: list[Row] = field(default_factory=list)
    """{"prompt", "response", "score"}: each response of at least the score to be accepted."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of responses that no row has, by reason."""


def rank(
    samples: Sequence[Mapping[str, Any]],
    *,
    pairs: Pairs,
    min_margin: float,
    accept_above: float | None,
) -> RankedRows:
    """Return the rows from samples with the keys index, messages, response, ended and score.

    Responses that did not end, and such as the readers of the data refuse, are left out; so are
    repetitions of a response to the same prompt. Of equal scores the response that was sampled
    first counts as the better one.

    samples: those of one prompt, which `index` numbers, next to each other.
    pairs: "best_worst" pairs the best response of a prompt with the worst one, "all" each two.
    min_margin: smallest difference of the scores of a pair; equal scores make none.
    accept_above: score from which a response is accepted; None accepts none.
    """
    rows = RankedRows()
    for _, group in groupby(samples, key=lambda sample: sample["index"]):
        usable = sorted(_usable(group, rows.left_out), key=lambda s: s["score"], reverse=True)
        if not usable:
            continue
        rows.demonstrations.append(_demonstration(usable[0]))
        if accept_above is not None:
            rows.accepted.extend(_demonstration(s) for s in usable if s["score"] >= accept_above)
        two = combinations(usable, 2) if pairs == "all" else [(usable[0], usable[-1])]
        for better, worse in two:
            margin = better["score"] - worse["score"]
            if margin > 0 and margin >= min_margin:
                row = _preference(better, worse, margin)
                try:
                    native(row, "preferences")
                except BadRow as bad:  # they differ in white space alone
                    rows.left_out[bad.reason] += 1
                else:
                    rows.preferences.append(row)
    return rows


def _usable(
    group: Iterator[Mapping[str, Any]], left_out: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the samples that a row may have, each response once; count the others."""
    seen = set()
    for sample in group:
        if not sample["ended"]:
            left_out["cut at max_response_tokens"] += 1
        elif sample["response"] in seen:
            left_out["repeated response"] += 1
        else:
            seen.add(sample["response"])
            try:
                native(_demonstration(sample), "demonstrations")
            except BadRow as bad:
                left_out[bad.reason] += 1
            else:
                yield sample


def _demonstration(sample: Mapping[str, Any]) -> Row:
    return {
        "prompt": _prompt(sample),
        "response": sample["response"],
        "score": sample["score"],
    }


def _preference(better: Mapping[str, Any], worse: Mapping[str, Any], margin: float) -> Row:
    return {
        "prompt": _prompt(better),
        "chosen": better["response"],
        "rejected": worse["response"],
        "margin": margin,
    }


def _prompt(sample: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """Return the prompt: the text of a single user turn, or all turns."""
    (first, *others) = turns = sample["messages"]
    return turns if others or first["role"] != "user" else first["content"]
