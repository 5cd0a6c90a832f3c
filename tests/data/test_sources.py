"""Rows that are too long, columns that cannot be read, and what a message says of each."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data import readers, sources
from lightning_rlhf.data.readers import read

read_demonstrations: Any = partial(read, "demonstrations")
read_preferences: Any = partial(read, "preferences")
read_prompts: Any = partial(read, "prompts")

GOOD = {"prompt": "a", "response": "b", "chosen": "b", "rejected": "c"}
ONE_BYTE = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0]))
NO_UTF8 = pa.Array.from_buffers(pa.string(), 1, [None, ONE_BYTE, pa.py_buffer(b"\xff")])
FAR = pa.array([2**62], pa.timestamp("ms"))
"""A date that Python does not have."""


def parquet(folder: Path, **columns: Any) -> str:
    file = folder / "x.parquet"
    pq.write_table(pa.table(columns), file)
    return str(file)


def error(read: Any, source: str, on_bad_row: str = "stop") -> str:
    with pytest.raises(DataError) as caught:
        read(source, on_bad_row)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def long_lines(folder: Path, monkeypatch: pytest.MonkeyPatch, end: bytes) -> bytes:
    """Lines 1 and 3 are good, line 2 has 101 bytes where 100 are allowed."""
    for module in (readers, sources):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    good = json.dumps(GOOD).encode()
    assert len(good) < 100
    row = json.dumps(GOOD | {"prompt": "c"}).encode()
    return good + end + b'{"prompt": "' + b"a" * (88 - len(end) + 1) + end + row


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_long_line_is_a_bad_row(
    end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = long_lines(tmp_path, monkeypatch, end)
    assert [len(line) for line in content.splitlines(keepends=True)][1] == 101
    for name, data in {"x.jsonl": content, "x.jsonl.gz": gzip.compress(content)}.items():
        file = tmp_path / name
        file.write_bytes(data)
        said = error(read_demonstrations, str(file))
        assert f"{name}, line 2: the line is too long (more than 100 bytes" in said
        rows = read_demonstrations(str(file), "skip")
        assert (rows.numbers, rows.left_out) == ((1, 3), Counter({"the line is too long": 1}))


def test_a_file_without_a_line_end_is_not_read_whole(tmp_path: Path) -> None:
    """It has 100 GB, none of which are on the disk."""
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"{")
    os.truncate(file, 100 * 10**9)
    said = error(read_prompts, str(file))
    assert "x.jsonl, line 1: the line is too long (more than 16,777,216 bytes" in said


@pytest.mark.parametrize("field", ["prompt", "chosen", "rejected"])
def test_a_long_text_is_a_bad_row(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlhf.data.rows.MAX_CHARACTERS", 5)
    rows = [GOOD | {field: "é" * 5}, GOOD | {field: "é" * 6}]
    source = parquet(tmp_path, **{name: [row[name] for row in rows] for name in GOOD})
    said = error(read_preferences, source)
    assert f"row 2: field '{field}' is too long (6 characters; allowed: 5)" in said


def test_columns_that_are_not_needed_are_not_read(tmp_path: Path) -> None:
    source = parquet(tmp_path, prompt=["a"], response=["b"], x=NO_UTF8, y=FAR)
    assert len(read_demonstrations(source, "stop")) == 1


@pytest.mark.parametrize(
    ("read", "columns", "named"),
    [
        (read_demonstrations, {"prompt": ["a"], "response": NO_UTF8}, "'response'"),
        (read_preferences, {"prompt": FAR, "chosen": ["a"], "rejected": ["b"]}, "'prompt'"),
        (read_prompts, {"prompt": ["a"], "x": FAR}, "'x'"),  # a reward may want it
    ],
)
def test_a_value_that_cannot_be_read_is_named(
    read: Any, columns: dict[str, Any], named: str, tmp_path: Path
) -> None:
    source = parquet(tmp_path, **columns)
    assert f"x.parquet, row 1: column {named} cannot be read (" in error(read, source)


def test_a_row_whose_value_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    """Rows before and after it, in the same batch, are read."""
    offsets = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 1, 2, 3)))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffb")])
    source = parquet(tmp_path, prompt=["a", "b", "c"], response=texts)
    rows = read_demonstrations(source, "skip")
    assert [row.response for row in rows.rows] == ["a", "b"]
    assert rows.numbers == (1, 3)
    assert rows.left_out == Counter({"column 'response' cannot be read": 1})


def test_a_table_without_a_column_or_a_row(tmp_path: Path) -> None:
    assert "holds no row" in error(read_prompts, parquet(tmp_path))
    nothing = pa.array([], pa.string())
    assert "holds no row" in error(read_prompts, parquet(tmp_path, prompt=nothing))


def test_columns_that_are_not_read_are_told_where_one_is_missing(tmp_path: Path) -> None:
    source = parquet(tmp_path, question=["a"], answer=["b"])
    assert "'response' is missing (found 'question', 'answer'" in error(read_demonstrations, source)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    one = pa.array(["a"])
    pq.write_table(pa.Table.from_arrays([one, one, one], ["prompt", "response", "prompt"]), file)
    assert "x.parquet has two columns 'prompt'" in error(read_demonstrations, str(file))


def test_a_value_of_the_hub_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset(pa.table({"prompt": ["a"], "response": NO_UTF8, "x": NO_UTF8}))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: table)
    said = error(read_demonstrations, "org/name")
    assert "data set org/name, split train, row 1 cannot be read: " in said
    prompts = table.rename_column("response", "y")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: prompts.select_columns("x"))
    assert "org/name, split train, row 1 cannot be read: " in error(read_demonstrations, "org/name")


@pytest.mark.parametrize(("row", "advised"), [({"prompt": ""}, True), ({"x": 1}, False)])
def test_skipping_is_advised_where_the_columns_fit(
    row: dict[str, Any], advised: bool, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(row) + "\n")
    said = error(read_prompts, str(file))
    assert "x.jsonl, line 1: field 'prompt' is " in said
    assert ("data.on_bad_row=skip" in said) == advised


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


HI = turn("user", "Hi")
PARTS = [{"type": "text", "text": "Hello"}]
CALLS = [{"id": "1", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([HI, turn("assistant", PARTS)], "(messages[1].content is a list of parts; allowed: one"),
        ([turn("user", 5), HI], "(messages[0].content is int)"),
        (
            [HI, turn("assistant", None, tool_calls=CALLS)],
            "(messages[1].content is NoneType, and messages[1].tool_calls stands for it",
        ),
        (
            [HI, turn("robot", "x"), turn("assistant", "y")],
            "(found 'robot' in messages[1].role; known",
        ),
        ([HI, {"from": "gpt", "value": "x"}], "(messages[1] has 'from', 'value')"),
        ([HI, "x"], "(messages[1] is str)"),
        ([HI, turn("assistant", " ")], "empty or blank (messages[1].content)"),
    ],
)
def test_a_message_is_named_by_its_place(messages: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    assert said in error(read_demonstrations, str(file))


@pytest.mark.parametrize(
    ("rejected", "said"),
    [
        ([turn("user", "Ho"), turn("assistant", "x")], "(turn 1 is not the same)"),
        (
            [HI, turn("assistant", "x"), HI, turn("assistant", "y")],
            "(turn 2 is not the same)",
        ),
    ],
)
def test_pairs_that_differ_before_the_last_turn_say_where(
    rejected: Any, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"chosen": [HI, turn("assistant", "a")], "rejected": rejected}))
    assert f"differ before the last turn {said}" in error(read_preferences, str(file))
