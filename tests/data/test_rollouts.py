"""A recorded iteration comes back from its file bit for bit, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import DataError, StorageError
from lightning_rlhf.core.types import Experience, UpdateStats
from lightning_rlhf.data.parquet import FACTS
from lightning_rlhf.data.rollouts import (
    PER_TOKEN,
    Recorded,
    file_of,
    machine,
    read_recorded,
    recorded_iterations,
    stats,
    write_recorded,
)

LENGTHS = ((2, 3), (4, 1), (1, 5))
"""Tokens of the prompt and of the response of each row; the widths are one more than any."""
B, P, T = len(LENGTHS), 5, 6
AWKWARD = (1 / 3, -0.0, 1e-45, -3.4e38, 1 + 2**-23)
"""A number that is no decimal, a zero with a sign, the smallest, the largest, the one after 1."""


def numbers(seed: int) -> Tensor:
    return torch.randn(B, T, generator=torch.Generator().manual_seed(seed))


def recorded(**changes: Any) -> Recorded:
    """Three responses with two components of the reward."""
    prompt = torch.tensor([[t >= P - p for t in range(P)] for p, _ in LENGTHS])
    mask = torch.tensor([[t < r for t in range(T)] for _, r in LENGTHS])
    per_token = {
        field: torch.where(mask, numbers(seed), 0) for seed, field in enumerate(PER_TOKEN.values())
    }
    per_token["advantages"][2, : len(AWKWARD)] = torch.tensor(AWKWARD)
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    experience = Experience(
        tokens=torch.arange(B * (P + T)).reshape(B, P + T),  # on padding too
        mask=torch.cat([prompt, mask], dim=1),
        response_mask=mask,
        component_scores=torch.tensor([[1 / 3, 2.0], [0.1, -1.0], [0.0, 5.0]]),
        score=torch.tensor([7 / 3, -0.9, 5.0]),
        ended=torch.tensor([True, False, True]),
        index=torch.tensor([5, 0, 5]),
        **per_token,
    )
    found = {
        "experience": experience,
        "kl_coef": 0.1 + 0.2,  # 0.30000000000000004
        "shuffle": generator.get_state(),
        "iteration": 12,
        "prompts": ["a", "ü\n", "a"],
        "responses": ["", "<b>", "x\0"],
        "components": ["words", "head"],
        "has_critic": True,
        "updates": [{"loss": 1 / 3}, {"loss": math.inf}],
        "parameters": "f" * 64,
        "machine": {"torch": "2", "device": "cpu"},
    }
    return Recorded(**found | changes)


def written(folder: Path, **changes: Any) -> Path:
    path = file_of(folder, 12)
    write_recorded(path, recorded(**changes))
    return path


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Zeros with another sign are others."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    before, after = recorded(), read_recorded(written(tmp_path))
    for field in fields(Experience):
        name = field.name
        found, expected = getattr(after.experience, name), getattr(before.experience, name)
        assert same_bits(found, expected), name
    assert same_bits(after.shuffle, before.shuffle)
    others = [f.name for f in fields(Recorded) if f.name not in ("experience", "shuffle")]
    for name in others:
        assert getattr(after, name) == getattr(before, name), name


def test_the_minibatches_are_drawn_as_before(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    found = read_recorded(written(tmp_path)).generator()
    assert torch.equal(torch.randperm(64, generator=found), torch.randperm(64, generator=generator))


def test_no_number_is_taken_for_one(tmp_path: Path) -> None:
    """The facts of an update that went wrong."""
    facts = read_recorded(written(tmp_path, updates=[{"loss": math.nan}])).updates
    assert facts is not None
    assert math.isnan(facts[0]["loss"])


def test_an_iteration_that_was_broken_off_has_no_outcome(tmp_path: Path) -> None:
    after = read_recorded(written(tmp_path, updates=None, parameters=None))
    assert (after.updates, after.parameters) == (None, None)


def test_without_a_critic_there_are_no_values(tmp_path: Path) -> None:
    experience = replace(recorded().experience, old_values=torch.zeros(B, T))
    path = written(tmp_path, experience=experience, has_critic=False)
    assert "values" not in pq.read_schema(path).names
    after = read_recorded(path)
    assert not after.has_critic
    assert same_bits(after.experience.old_values, experience.old_values)


def test_it_is_what_pandas_reads(tmp_path: Path) -> None:
    """Lists of real tokens alone, without padding and without missing numbers."""
    table = pandas.read_parquet(written(tmp_path))
    assert list(table["index"]) == [5, 0, 5]
    assert [len(x) for x in table["prompt_tokens"]] == [2, 4, 1]
    for column in ("response_tokens", *PER_TOKEN):
        assert [len(x) for x in table[column]] == [3, 1, 5], column
    for column in PER_TOKEN:
        assert {x.dtype.name for x in table[column]} == {"float32"}, column
    # Row 1: columns 1 to 4 of a prompt of width 5, then one token; 11 tokens are before it.
    assert list(table["prompt_tokens"][1]) == [12, 13, 14, 15]
    assert list(table["response_tokens"][1]) == [16]
    assert table["parts"][1] == {"words": pytest.approx(0.1), "head": -1.0}
    assert list(table["ended"]) == [True, False, True]
    assert list(table["prompt"]) == ["a", "ü\n", "a"]


def test_the_facts_of_an_update_are_its_numbers() -> None:
    names = [field.name for field in fields(UpdateStats)]
    update = UpdateStats(**{name: torch.tensor(i / 3) for i, name in enumerate(names)})
    assert stats([update]) == [{n: torch.tensor(i / 3).item() for i, n in enumerate(names)}]


def test_files_are_found_by_their_number(tmp_path: Path) -> None:
    assert recorded_iterations(tmp_path) == []
    written(tmp_path)
    for name in ("000003.parquet", "1000000.parquet", "other.parquet", "000004.tmp"):
        (tmp_path / "rollouts" / name).touch()
    assert recorded_iterations(tmp_path) == [3, 12, 1_000_000]


def test_writing_leaves_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_does_not_fit_is_named(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    """And the one before it stays."""
    path = written(tmp_path)
    before = path.read_bytes()
    told = rf"^{path} was not written: File too large\. It needs \d+\.\d kB, and .* 1\.0 kB \("
    with pytest.raises(StorageError, match=told), largest_file(1000):
        written(tmp_path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def changed(path: Path, change: Any) -> None:
    """The file with another table and the same metadata."""
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def without(name: str) -> Any:
    return lambda table: table.drop_columns([name])


def with_column(name: str, values: Any) -> Any:
    return lambda t: t.set_column(t.column_names.index(name), name, pa.array(values))


DAMAGE = {
    "a column is gone": (without("kl"), "it has no kl"),
    "a list is longer than the others": (
        with_column("kl", [[1.0] * 3, [1.0] * 2, [1.0] * 5]), "kl has not one number",
    ),
    "a column of lists has none": (with_column("kl", [1, 2, 3]), "cast from int64 to list"),
    "the parts are no objects": (with_column("parts", [1, 2, 3]), "cannot be read as an iteration"),
    "a number is missing": (with_column("score", [1.0, None, 2.0]), "1 numbers are missing"),
    "another file": (
        lambda table: table.replace_schema_metadata({}), "not written by record=true",
    ),
    "a tampered head": (
        lambda table: table.replace_schema_metadata({FACTS: b'{"iteration": 12}'}),
        "it has no prompt_width",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path)
    change, reason = DAMAGE[damage]
    changed(path, change)
    with pytest.raises(DataError) as caught:
        read_recorded(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read as an iteration"):
        read_recorded(path)


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    """In the bits of a number, which are still those of a number."""
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    place = content.find(torch.tensor(7 / 3).numpy().tobytes())
    assert place > 0
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as an iteration"):
        read_recorded(path)


def test_the_facts_of_the_machine_have_the_processes_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert machine(cpu).keys() == {"torch", "device", "threads"}
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    assert machine(cpu)["processes"] == "2"
