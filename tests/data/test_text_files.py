"""JSON arrays, CSV and text files: rows, the lines in which they begin, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data import sources
from lightning_rlhf.data.readers import read

read_demonstrations: Any = partial(read, "demonstrations")
read_prompts: Any = partial(read, "prompts")

BOM = b"\xef\xbb\xbf"
ARRAY = b"""[
  {"prompt": "a",
   "response": "b"},

  {"prompt": "c"}, 5,
  {"prompt": "\xc3\xa9", "response": "g"}
]
"""


def numbered(path: Path, read: Any = read_demonstrations) -> list[tuple[int, str]]:
    rows = read(str(path), "skip")
    return [(n, row.prompt[0].content) for n, row in zip(rows.numbers, rows.rows, strict=True)]


@pytest.mark.parametrize("start", [b"", BOM, b"\n \r\n"])
def test_a_json_array(start: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(start + ARRAY)
    assert numbered(file) == [(1, "a"), (4, "é")]
    left_out = read_demonstrations(str(file), "skip").left_out
    assert left_out == Counter(
        {
            "field 'response' is missing": 1,
            "not a JSON object": 1,
        }
    )
    with pytest.raises(DataError, match=r"x\.json, row 2: field 'response' is missing"):
        read_demonstrations(str(file), "stop")


def test_json_lines_in_a_file_that_is_called_json(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert numbered(file, read_prompts) == [(1, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'[{"prompt": "a"},\n{"prompt": }]', "line 2: broken JSON (Expecting value)"),
        (b'[{"prompt": "a"}\n\n{"prompt": "b"}]', 'line 3: broken JSON (Expecting'),
        (b'[{"prompt": "a"},\n]', "line 2: broken JSON (Expecting value)"),
        (b'[{"prompt": "a"}]\n[]', "line 2: broken JSON (Extra data)"),
        (b'[{"prompt": "a"}', "line 1: broken JSON (Expecting"),
        (b'[{"prompt": "\xff"}]', "line 1: not UTF-8"),
        (b"[" * 100_000, "broken JSON"),
        (b'[{"prompt": "a", "prompt": "b"}]', "broken JSON (a field stands twice"),
        (b"[]", "holds no row that can be used, it is empty"),
        (b"", "holds no row that can be used, it is empty"),
        ('[{"prompt": "a"}]'.encode("utf-16"), "is in UTF-16"),
    ],
)  # fmt: skip
def test_a_broken_array_is_refused_also_where_rows_are_skipped(
    content: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(said)) as error:
        read_prompts(str(file), "skip")
    assert "x.json" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_csv(tmp_path: Path) -> None:
    """Quotes, line ends inside them, blank lines, and rows of another length."""
    file = tmp_path / "x.csv"
    rows = ['a,"b ""q"", c\r\nd"', "", "é,f", "g", "h,i,j", 'k,"l"m', "n,o"]
    file.write_bytes(BOM + "\r\n".join(["prompt,response", *rows]).encode())
    assert numbered(file) == [(2, "a"), (5, "é"), (9, "n")]
    read = read_demonstrations(str(file), "skip")
    assert read.rows[0].response == 'b "q", c\r\nd'
    assert read.left_out == Counter({"another number of cells than columns": 2, "broken CSV": 1})
    with pytest.raises(DataError, match=r"x\.csv, line 6: another number of cells than col"):
        read_demonstrations(str(file), "stop")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'prompt\n"a\nb\n', "x.csv, line 2: broken CSV (unexpected end of data)"),
        (b"prompt,prompt\na,b\n", "x.csv has two columns 'prompt'"),
        (b"prompt\n\xff\n", "no row that can be used: 1 not UTF-8"),
        (b"prompt\n", "holds no row that can be used, it is empty"),
        (b"", "holds no row that can be used, it is empty"),
        ("prompt\na\n".encode("utf-16"), "x.csv is in UTF-16"),
    ],
)
def test_a_csv_file_that_cannot_be_read(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(said)):
        read_prompts(str(file), "skip")


@pytest.mark.parametrize(
    "record",
    [
        b'"first\xff line\nsecond line",good answer',
        b'"first\xff\nsecond, line\nend",good',
        b'"first\nsecond, line\nend\xff",good',
        b'"first\xff\nsecond\xff\nend",good',
        b"first \xff,good",
    ],
)
def test_a_byte_that_is_not_utf_8_spoils_its_own_record_of_csv_alone(
    record: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(b"prompt,response\na,b\n" + record + b"\nc,d\ne,f\n")
    after = 3 + record.count(b"\n") + 1
    assert numbered(file) == [(2, "a"), (after, "c"), (after + 1, "e")]
    assert read_demonstrations(str(file), "skip").left_out == Counter({"not UTF-8": 1})
    with pytest.raises(DataError, match=r"x\.csv, line 3: not UTF-8"):
        read_demonstrations(str(file), "stop")


def test_a_quote_that_is_never_closed_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 50)
    file = tmp_path / "x.csv"
    file.write_text('prompt\na\n"' + "b\n" * 100)
    with pytest.raises(DataError, match=r"x\.csv, line 3: broken CSV \(field larger than"):
        read_prompts(str(file), "skip")


def test_a_text_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes(BOM + "Größe?\r\n\n \n 中 \nc".encode())
    assert numbered(file, read_prompts) == [(1, "Größe?"), (4, " 中 "), (5, "c")]
    rows = read_prompts(str(file), "stop").rows
    assert rows[0].columns == {
        "text": "Größe?", "prompt": "Größe?", "messages": [{"role": "user", "content": "Größe?"}]
    }  # fmt: skip
