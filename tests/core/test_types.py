"""Records: frozen, of one length, cut by rows."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.core.records import (
    Experience,
    Preferences,
    Prompts,
    Record,
    Scores,
    known_mask,
    row_lengths,
)

from .conftest import F, T, drawn


def prompts(rows: int) -> Prompts:
    tokens = torch.arange(rows * 3).view(rows, 3)
    return Prompts(tokens=tokens, mask=tokens % 2 == 0, index=torch.arange(rows) * 10)


def same(a: Record, b: Record) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def test_rows_of_every_field_are_selected_and_repeated() -> None:
    found = prompts(4).select(torch.tensor([2, 0, 2]))
    assert found.tokens.tolist() == [[6, 7, 8], [0, 1, 2], [6, 7, 8]]
    assert found.mask.tolist() == [[T, F, T], [T, F, T], [T, F, T]]
    assert found.index.tolist() == [20, 0, 20]
    assert prompts(4).select(slice(1, 3)).index.tolist() == [10, 20]
    # Group estimators read consecutive rows as answers to one prompt.
    found = prompts(2).repeat(3)
    assert found.index.tolist() == [0, 0, 0, 10, 10, 10]
    assert found.tokens.tolist() == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3


def test_fields_of_different_width_are_cut_alike() -> None:
    pair = Preferences(
        chosen=torch.arange(6).view(2, 3), chosen_mask=torch.ones(2, 3, dtype=torch.bool),
        rejected=torch.arange(10).view(2, 5), rejected_mask=torch.ones(2, 5, dtype=torch.bool),
        prompt_tokens=torch.tensor([1, 2]), margin=torch.zeros(2),
    )  # fmt: skip
    tokens, mask = pair.stacked()
    assert tokens[:2, :3].tolist() == pair.chosen.tolist()
    assert tokens[2:].tolist() == pair.rejected.tolist()
    assert mask.sum(dim=1).tolist() == [3, 3, 5, 5]
    second = pair.select(slice(1, 2))
    assert second.chosen.tolist() == [[3, 4, 5]]
    assert second.rejected.tolist() == [[5, 6, 7, 8, 9]]


@drawn
@given(st.integers(0, 9), st.integers(1, 10))
def test_the_parts_make_up_the_whole(rows: int, size: int) -> None:
    whole = prompts(rows)
    parts = list(whole.split(size))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert len(parts) == -(-rows // size)
    assert not parts or same(Prompts.joined(parts), whole)


def test_a_field_that_is_not_there_stays_away() -> None:
    row = torch.arange(4.0)
    whole = Scores(component_scores=row[:, None], score=row, ref_logprobs=row[:, None])
    rows = torch.tensor([3, 1])
    for found in (whole.select(rows), whole.to("cpu"), whole.repeat(2), *whole.split(3)):
        assert found.vocabulary_kl is None
    assert whole.select(rows).score.tolist() == [3, 1]


def test_an_experience_that_is_counted_selects_its_counts_too() -> None:
    mask = torch.tensor([[F, T, T], [T, T, F], [F, T, F]])
    response_mask = torch.tensor([[T, T], [T, F], [T, F]])
    zeros = {f.name: torch.zeros(3, 2) for f in fields(Experience) if f.name != "counts"}
    tokens = torch.arange(9).view(3, 3)
    plain = Experience(**zeros | {"tokens": tokens, "mask": mask, "response_mask": response_mask})
    assert plain.responses.tolist() == [[1, 2], [4, 5], [7, 8]]  # the columns after the prompt
    found = replace(plain, counts=row_lengths(plain))
    assert found.counts is not None
    assert found.counts.tolist() == [[2, 2], [2, 1], [1, 1]]
    assert found.to("meta").counts is found.counts
    chosen = found.select(torch.tensor([2, 0]))
    assert row_lengths(chosen).tolist() == [[1, 1], [2, 2]]
    assert torch.equal(known_mask(chosen), chosen.response_mask)
    assert torch.equal(row_lengths(plain), found.counts)
