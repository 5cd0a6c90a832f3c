"""Whatever a file holds becomes rows or one DataError."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.formats import FORMATS
from lightning_rlhf.data.readers import Rows, read

read_demonstrations: Any = partial(read, "demonstrations")
read_preferences: Any = partial(read, "preferences")
read_prompts: Any = partial(read, "prompts")

READERS: dict[str, Any] = {
    "demonstrations": read_demonstrations,
    "preferences": read_preferences,
    "prompts": read_prompts,
}
READ = st.sampled_from(list(READERS.values()))
QUICK = settings(
    derandomize=True,
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TEXTS = st.text(max_size=5) | st.sampled_from(
    ["\n\nHuman: a\n\nAssistant: b", "\n\nHuman:", "\n\nAssistant: x", "a", "user", "assistant"]
)
TURNS = st.dictionaries(st.sampled_from(["role", "content", "x"]), TEXTS | LEAVES, max_size=3)
VALUES = st.recursive(
    LEAVES | TEXTS | st.lists(TURNS, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = st.sampled_from(["prompt", "response", "messages", "chosen", "rejected", "margin", "x"])
ROWS = st.dictionaries(FIELDS, VALUES, max_size=4) | VALUES
Read = Callable[[str, Any], Rows[Any]]


def rows_or_error(read: Read, file: Path) -> int | None:
    """How many rows; None for an error, which names the file in one short line."""
    try:
        count = len(read(str(file), "stop"))
    except DataError as error:
        said = str(error)
    else:
        assert count == len(read(str(file), "skip"))
        return count
    assert file.name in said
    assert len(said.splitlines()) == 1
    return None


@QUICK
@given(read=READ, content=st.binary(max_size=200), ending=st.sampled_from(["", ".gz"]))
def test_any_bytes(tmp_path: Path, read: Read, content: bytes, ending: str) -> None:
    file = tmp_path / f"x.jsonl{ending}"
    file.write_bytes(content)
    rows_or_error(read, file)
    file.write_bytes(gzip.compress(content)[: len(content)])
    rows_or_error(read, file)


@settings(QUICK, max_examples=40)
@given(read=READ, content=st.binary(max_size=200))
def test_any_bytes_as_parquet(tmp_path: Path, read: Read, content: bytes) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1" + content + b"PAR1")
    rows_or_error(read, file)


@settings(QUICK, max_examples=200)
@given(read=READ, rows=st.lists(ROWS, max_size=3))
def test_any_values(tmp_path: Path, read: Read, rows: list[Any]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    count = rows_or_error(read, file)
    assert count is None or 0 < count <= len(rows)


@settings(QUICK, max_examples=60)
@given(
    read=READ,
    content=st.binary(max_size=60) | st.text('[]{}",:\n\r a1', max_size=60).map(str.encode),
    ending=st.sampled_from(["json", "csv", "txt"]),
)
def test_any_bytes_as_text(tmp_path: Path, read: Read, content: bytes, ending: str) -> None:
    file = tmp_path / f"x.{ending}"
    start = {"json": b'[{"text": "a"},', "csv": b"text,prompt\n", "txt": b""}[ending]
    for whole in (content, start + content):
        file.write_bytes(whole)
        rows_or_error(read, file)


FORM_VALUES = VALUES | st.lists(st.fixed_dictionaries({"from": TEXTS, "value": TEXTS}), max_size=3)


@settings(QUICK, max_examples=150)
@given(data=st.data(), kind=st.sampled_from(sorted(READERS)))
def test_any_values_of_any_form(tmp_path: Path, data: st.DataObject, kind: Any) -> None:
    """In rows that have all columns of a form, and so are read as it."""
    form = data.draw(st.sampled_from([form for form in FORMATS if kind in form.kinds]))
    columns = form.reads
    rows = st.fixed_dictionaries(dict.fromkeys(columns, FORM_VALUES))
    file = tmp_path / "x.jsonl"
    lines = data.draw(st.lists(rows, min_size=1, max_size=2))
    file.write_text("".join(json.dumps(row) + "\n" for row in lines))

    rows_or_error(partial(READERS[kind], format=form.name), file)


@settings(QUICK, max_examples=60)
@given(read=READ, content=st.binary(min_size=1, max_size=50), place=st.integers(0, 80))
def test_a_good_file_with_bytes_in_it(
    tmp_path: Path, read: Read, content: bytes, place: int
) -> None:
    file = tmp_path / "x.jsonl"
    good = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2
    file.write_bytes(good[:place] + content + good[place:])
    rows_or_error(read, file)


def test_good_rows_are_read(tmp_path: Path) -> None:
    """The search above is no search for errors alone."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    for reader in READERS.values():
        assert rows_or_error(reader, file) == 1
    with pytest.raises(DataError):
        read_prompts(str(tmp_path / "none.jsonl"), "skip")
