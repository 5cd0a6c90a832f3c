"""Files and tables of every kind: their rows, the numbers of these, and what an error names."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.readers import read
from lightning_rlhf.data.rows import Message, Preference

BOM = b"\xef\xbb\xbf"
GOOD = b'{"prompt": "a", "response": "b"}\n'
PAIR = {"prompt": "Hi", "chosen": "A", "rejected": "B"}
ONE_BYTE = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0]))
NO_UTF8 = pa.Array.from_buffers(pa.string(), 1, [None, ONE_BYTE, pa.py_buffer(b"\xff")])
FAR = pa.array([2**62], pa.timestamp("ms"))
"""A date that Python does not have."""


def numbered(path: Path, kind: Any = "demonstrations") -> list[tuple[int, str]]:
    rows = read(kind, str(path), "skip")
    return [(n, row.prompt[0].content) for n, row in zip(rows.numbers, rows.rows, strict=True)]


def error(source: Any, kind: Any = "demonstrations", on_bad_row: Any = "stop") -> str:
    with pytest.raises(DataError) as caught:
        read(kind, str(source), on_bad_row)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def parquet(folder: Path, **columns: Any) -> str:
    file = folder / "x.parquet"
    pq.write_table(pa.table(columns), file)
    return str(file)


@pytest.mark.parametrize(
    ("name", "start", "end"), [("x.jsonl.gz", BOM, b"\n"), ("x.json", b"", b"\r\n")]
)
def test_json_lines(name: str, start: bytes, end: bytes, tmp_path: Path) -> None:
    """Blank lines count; bad ones are left out and counted, or named."""
    lines = [GOOD.strip(), b" \t", b'{"prompt": "c", "respo', '{"prompt": "é"}'.encode("latin-1"),
             b"9" * 5000, b"[" * 10**5, b"null", GOOD.strip()]  # fmt: skip
    content = start + end.join(lines)
    file = tmp_path / name
    file.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    assert numbered(file) == [(1, "a"), (8, "a")]
    assert read("demonstrations", str(file), "skip").left_out == Counter({
        "broken JSON": 3, "not UTF-8": 1, "not a JSON object": 1,
    })  # fmt: skip
    assert f"{name}, line 3: broken JSON (Unterminated string starting, column 17; " in error(file)


CELLS = ["NA", "007", "1e5", "null", "True", "nan", "a, b", 'a "b" c', "é 中 🙂 \u2028x",
         "line one\r\nline two", "\ttab ", "'", "\\n", "1_000", "-0", "0x10"]  # fmt: skip
"""Texts that a reader may take for something else."""


def test_every_cell_keeps_its_characters(tmp_path: Path) -> None:
    pairs = [{"prompt": cell, "response": f"{cell}|"} for cell in CELLS]
    quoted = ('"{}","{}|"'.format(*[cell.replace('"', '""')] * 2) for cell in CELLS)
    lines = "\r\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs)
    contents = {
        "jsonl": lines.encode(), "jsonl.gz": gzip.compress(lines.encode(), mtime=0),
        "json": json.dumps(pairs, indent=1).encode(),
        "csv": "\n".join(["prompt,response", *quoted]).encode(),
    }  # fmt: skip
    for ending, content in contents.items():
        (tmp_path / f"x.{ending}").write_bytes(content)
    parquet(tmp_path, **{name: [pair[name] for pair in pairs] for name in pairs[0]})
    for ending in (*contents, "parquet"):
        rows = read("demonstrations", str(tmp_path / f"x.{ending}"), "stop").rows
        found = [(row.prompt[0].content, row.response) for row in rows]
        assert found == [(cell, f"{cell}|") for cell in CELLS], ending


def test_a_field_that_stands_twice_in_one_line_is_named(tmp_path: Path) -> None:
    """JSON does not say which of the two values counts."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a", "response": "b", "prompt": "c"}')
    assert "line 1: broken JSON (the field 'prompt' stands twice" in error(file)


def test_a_download_that_was_cut_off_is_refused_also_where_rows_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(gzip.compress(GOOD * 99, mtime=0)[:-9])
    assert f"{file} cannot be read: Compressed file" in error(file, "prompts", "skip")


def test_a_json_array(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    content = b'[\n {"prompt": "a",\n "response": "b"},\n\n {"prompt": "c"}, 5,\n'
    file.write_bytes(BOM + b"\r\n" + content + '{"prompt": "é", "response": "g"}]'.encode())
    assert numbered(file) == [(1, "a"), (4, "é")]
    assert "x.json, row 2: field 'response' is missing" in error(file)


def test_csv(tmp_path: Path) -> None:
    """Quotes, line ends inside them, blank lines, and rows of another length."""
    file = tmp_path / "x.csv"
    rows = ['a,"b ""q"", c\r\nd"', "", "é,f", "g", "h,i,j", 'k,"l"m', "n,o"]
    file.write_bytes(BOM + "\r\n".join(["prompt,response", *rows]).encode())
    assert numbered(file) == [(2, "a"), (5, "é"), (9, "n")]
    found = read("demonstrations", str(file), "skip")
    assert found.rows[0].response == 'b "q", c\r\nd'
    assert found.left_out == Counter({"another number of cells than columns": 2, "broken CSV": 1})
    said = "line 6: another number of cells than columns (found 1, the first row names 2 columns)"
    assert f"x.csv, {said}" in error(file)
    # A byte that is not UTF-8 spoils its own record alone.
    bad = b'"first\xff line\nsecond line",good'
    file.write_bytes(b"prompt,response\na,b\n" + bad + b"\nc,d\n")
    assert numbered(file) == [(2, "a"), (5, "c")]
    assert "x.csv, line 3: not UTF-8" in error(file)


def test_a_text_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes(BOM + "Größe?\r\n\n \n 中 \nc\n".encode() + b"\xff")
    assert numbered(file, "prompts") == [(1, "Größe?"), (4, " 中 "), (5, "c")]
    (first, *_) = read("prompts", str(file), "skip").rows
    assert (first.columns["text"], first.columns["prompt"]) == ("Größe?", "Größe?")
    assert "x.txt, line 6: not UTF-8" in error(file, "prompts")


def test_parquet(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    source = parquet(
        tmp_path, messages=[turns, turns[:1], None], prompt=[None, None, "Ho"],
        response=[None, None, "A"],
    )  # fmt: skip
    assert numbered(Path(source)) == [(1, "Hi"), (3, "Ho")]
    assert "x.parquet, row 2: the last turn of 'messages'" in error(source)
    # Only the columns that are needed are read; a reward may want any column of a prompt.
    source = parquet(tmp_path, prompt=["a"], response=["b"], x=NO_UTF8, y=FAR)
    assert len(read("demonstrations", source, "stop")) == 1
    assert "x.parquet, after row 0, cannot be read: " in error(source, "prompts")


def test_a_source_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.arrow").write_text("x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "folder").mkdir()
    here = ("data/rows.arrow", str(tmp_path / "data"), "data/folder:train")
    for source in (*here, "rows", "elsewhere/rows.tsv"):
        assert "allowed: a file ending in .jsonl" in error(source)
    assert "nowhere.jsonl does not exist" in error("nowhere.jsonl")
    Path("x.jsonl").mkdir()
    assert "x.jsonl is no file" in error("x.jsonl")


def test_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "org/name:train[:5%]"
    calls = []
    table = datasets.Dataset.from_list([PAIR, {"prompt": "Hi"}])

    def load(name: str, split: str) -> datasets.Dataset:
        calls.append((name, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = read("preferences", source, "skip")
    assert found.rows == (Preference((Message("user", "Hi"),), "A", "B"),)
    assert calls == [("org/name", "train[:5%]")]
    assert f"{source}, row 2: field 'chosen' is missing" in error(source, "preferences")
    table = datasets.Dataset(pa.table({"prompt": ["a"], "response": NO_UTF8, "x": NO_UTF8}))
    assert f"{source}, after row 0, cannot be read: " in error(source)
