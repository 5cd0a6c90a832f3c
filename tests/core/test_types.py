"""Records: frozen, of one length, cut by rows."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.core.records import (
    CountedExperience,
    Experience,
    Preferences,
    Prompts,
    Record,
    Rollout,
    Scores,
    known_mask,
    row_lengths,
    with_lengths,
)

from .conftest import F, T, drawn


def prompts(rows: int) -> Prompts:
    tokens = torch.arange(rows * 3).view(rows, 3)
    return Prompts(tokens=tokens, mask=tokens % 2 == 0, index=torch.arange(rows) * 10)


def scores(rows: int) -> Scores:
    row = torch.arange(rows, dtype=torch.float32)
    return Scores(
        component_scores=row[:, None], score=row, ref_logprobs=row[:, None].expand(rows, 2)
    )


def same(a: Record, b: Record) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def test_select_takes_rows_of_every_field() -> None:
    found = prompts(4).select(torch.tensor([2, 0, 2]))
    assert found.tokens.tolist() == [[6, 7, 8], [0, 1, 2], [6, 7, 8]]
    assert found.mask.tolist() == [[T, F, T], [T, F, T], [T, F, T]]
    assert found.index.tolist() == [20, 0, 20]
    assert isinstance(found, Prompts)
    assert prompts(4).select(slice(1, 3)).index.tolist() == [10, 20]


def test_fields_of_different_width_are_cut_alike() -> None:
    pair = Preferences(
        chosen=torch.arange(6).view(2, 3),
        chosen_mask=torch.ones(2, 3, dtype=torch.bool),
        rejected=torch.arange(10).view(2, 5),
        rejected_mask=torch.ones(2, 5, dtype=torch.bool),
        prompt_tokens=torch.tensor([1, 2]),
        margin=torch.zeros(2),
    )
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
    assert all(0 < len(part) <= size for part in parts)
    for name in ("tokens", "mask", "index"):
        joined = torch.cat([getattr(part, name) for part in parts] or [getattr(whole, name)])
        assert torch.equal(joined, getattr(whole, name))
    if parts:
        assert same(Prompts.joined(parts), whole)


def test_repeat_keeps_the_copies_of_a_sequence_together() -> None:
    # Group estimators read consecutive rows as answers to one prompt.
    found = prompts(2).repeat(3)
    assert found.index.tolist() == [0, 0, 0, 10, 10, 10]
    assert found.tokens.tolist() == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert found.mask.tolist() == [[T, F, T]] * 3 + [[F, T, F]] * 3
    assert isinstance(found, Prompts)
    assert same(prompts(3).repeat(1), prompts(3))


def test_a_field_that_is_not_there_stays_away() -> None:
    whole = scores(4)
    rows = torch.tensor([3, 1])
    for found in (whole.select(rows), whole.to("cpu"), whole.repeat(2), *whole.split(3)):
        assert found.vocabulary_kl is None
    assert whole.select(rows).score.tolist() == [3, 1]
    assert len(whole.repeat(2)) == 8


def test_to_moves_every_field_and_keeps_the_original() -> None:
    # "meta" is a device that every machine has.
    whole = prompts(2)
    moved = whole.to("meta")
    assert {getattr(moved, f.name).device.type for f in fields(moved)} == {"meta"}
    assert {getattr(whole, f.name).device.type for f in fields(whole)} == {"cpu"}
    assert isinstance(moved, Prompts)
    assert same(whole.to(torch.device("cpu"), non_blocking=True), whole)


def test_responses_are_the_columns_after_the_prompt() -> None:
    rollout = Rollout(
        tokens=torch.tensor([[9, 8, 1, 2, 3]]),
        mask=torch.tensor([[F, T, T, T, F]]),
        response_mask=torch.tensor([[T, T, F]]),
        ended=torch.tensor([T]),
        logprobs=torch.zeros(1, 3),
        values=torch.zeros(1, 3),
        index=torch.tensor([0]),
    )
    assert rollout.responses.tolist() == [[1, 2, 3]]


def experience(**masks: torch.Tensor) -> Experience:
    """Three rows of two response tokens at most after one of the prompt, all numbers 0."""
    zeros = {f.name: torch.zeros(3, 2) for f in fields(Experience)}
    return Experience(**zeros | {"tokens": torch.zeros(3, 3, dtype=torch.long)} | masks)


def test_an_experience_that_is_counted_selects_its_counts_too() -> None:
    mask = torch.tensor([[F, T, T], [T, T, F], [F, T, F]])
    response_mask = torch.tensor([[T, T], [T, F], [T, F]])
    plain = experience(mask=mask, response_mask=response_mask)
    found = with_lengths(plain)
    assert isinstance(found, CountedExperience)
    assert found.counts.tolist() == [[2, 2], [2, 1], [1, 1]]
    chosen = found.select(torch.tensor([2, 0]))
    assert row_lengths(chosen).tolist() == [[1, 1], [2, 2]]
    assert torch.equal(known_mask(chosen), chosen.response_mask)
    assert torch.equal(row_lengths(plain), found.counts)


def test_a_record_of_a_class_of_ones_own_keeps_it() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(Experience):
        note: str

    mine = Mine(**vars(experience()), note="kept")
    assert with_lengths(mine) is mine
