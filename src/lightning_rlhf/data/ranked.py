"""Rows of training data from scored responses: preference pairs, best-of-N, accepted responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from typing import Any, Literal

from lightning_rlhf.data.formats import Kind, formats_of
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
    samples: Sequence[Mapping[str, Any]], *,
    pairs: Pairs, min_margin: float, accept_above: float | None,
) -> RankedRows:  # fmt: skip
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
        usable, seen = [], set()
        for sample in group:
            # The text of a single user turn, or all turns.
            turns = sample["messages"]
            is_text = len(turns) == 1 and turns[0]["role"] == "user"
            prompt, response = turns[0]["content"] if is_text else turns, sample["response"]
            row = {"prompt": prompt, "response": response, "score": sample["score"]}
            reason = None if sample["ended"] else "cut at max_response_tokens"
            reason = reason or ("repeated response" if response in seen else None)
            seen |= {response} if sample["ended"] else set()
            if reason := reason or _refusal(row, "demonstrations"):
                rows.left_out[reason] += 1
            else:
                usable.append(row)
        usable.sort(key=lambda row: -row["score"])
        rows.demonstrations.extend(usable[:1])
        if accept_above is not None:
            rows.accepted.extend(row for row in usable if row["score"] >= accept_above)
        best_worst = [(usable[0], usable[-1])] if usable else []
        for better, worse in combinations(usable, 2) if pairs == "all" else best_worst:
            margin = better["score"] - worse["score"]
            if margin <= 0 or margin < min_margin:
                continue
            sides = {"chosen": better["response"], "rejected": worse["response"]}
            row = {"prompt": better["prompt"], **sides, "margin": margin}
            if reason := _refusal(row, "preferences"):  # they differ in white space alone
                rows.left_out[reason] += 1
            else:
                rows.preferences.append(row)
    return rows


def _refusal(row: Row, kind: Kind) -> str | None:
    """Return why the readers of the data refuse a row; None if they read it."""
    try:
        formats_of("native", kind)[0].read(row, kind)
    except BadRow as bad:
        return bad.reason
    return None
