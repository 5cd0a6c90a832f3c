"""Rows and files that cannot be used."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import array as column
from pyarrow import parquet, string, table

from ..conftest import MODULE, Workplace
from .conftest import Refusals, run

pytestmark = pytest.mark.usefixtures("no_model")

SFT = ["stage=sft"]
RM = ["stage=rm", "policy.checkpoint=base"]
PPO = ["stage=ppo", "policy.checkpoint=base", "reward=random"]
KEY = {
    "sft": "data.demonstrations.train",
    "rm": "data.preferences.train",
    "ppo": "data.prompts.train",
}
GOOD = b'{"prompt": "a", "response": "b"}\n'
ENDINGS = ".jsonl, .jsonl.gz, .json, .csv, .txt, .parquet"
OTHER = b'{"prompt": "c", "response": "d"}\n'


def row(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def turn(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def chat(*turns: dict[str, Any]) -> bytes:
    return row(messages=list(turns))


ROWS: list[tuple[str, bytes, list[str]]] = [
    # one demonstration
    ("sft", b'{"prompt": "a", "respo', ["broken JSON", "column 17"]),
    ("sft", b"{}", ["'response' is missing"]),
    ("sft", row(response="b"), ["'prompt' is missing"]),
    ("sft", row(prompt="a", response=None), ["'response' is missing"]),
    ("sft", row(prompt=["a"], response="b"), ["a turn of 'prompt'"]),
    ("sft", row(prompt={"a": 1}, response="b"), ["'prompt' is neither text", "dict"]),
    ("sft", row(prompt="a", response=True), ["'response' is neither text", "bool"]),
    ("sft", row(prompt="\u3000", response="b"), ["'prompt' is empty or blank"]),
    ("sft", b'{"prompt": NaN, "response": "b"}', ["'prompt' is neither text", "float"]),
    ("sft", b'{"prompt": "a\x00", "response": "b"}', ["broken JSON", "control character"]),
    ("sft", row(prompt="a\x00", response="b"), ["'prompt' holds a null byte"]),
    ("sft", b'{"prompt": "a", "response": "\\udc00"}', ["'response' holds half a surrogate"]),
    ("sft", b'{"prompt": "a", "prompt": "c", "response": "b"}', ["stands twice", "'prompt'"]),
    ("sft", b'{"prompt": "a", "response": "b", "x": {"y": 1, "y": 2}}', ["stands twice", "'y'"]),
    ("sft", '{"prompt": "é", "response": "b"}'.encode("latin-1"), ["not UTF-8", "byte 13"]),
    ("sft", b'["a", "b"]', ["not a JSON object", "list"]),
    ("sft", b'"text"', ["not a JSON object", "str"]),
    ("sft", b"null", ["not a JSON object", "NoneType"]),
    ("sft", b"[" * 100_000, ["broken JSON", "recursion"]),
    ("sft", b"9" * 5000, ["broken JSON", "digits"]),
    ("sft", b'{"prompt": "' + b"a" * 1_000_000, ["broken JSON", "Unterminated string"]),
    ("sft", b"\x00" * 100, ["broken JSON", "column 1"]),
    ("sft", b"prompt,response", ["broken JSON", "column 1"]),
    ("sft", b"\xef\xbb\xbf" + GOOD, ["broken JSON", "BOM"]),
    ("sft", chat(turn("robot", "a")), ["unknown role", "'robot'", "system, user, assistant"]),
    ("sft", chat(turn(["user"], "a")), ["unknown role", "['user']"]),
    ("sft", chat(turn("user", None)), ["'messages' is not text", "NoneType"]),
    ("sft", chat(turn("user", "a")), ["the last turn of 'messages' is not the assistant's"]),
    ("sft", chat(turn("assistant", "a")), ["does not end with a user turn"]),
    ("sft", chat(), ["'messages' is empty"]),
    ("sft", row(messages=turn("user", "a")), ["'messages' is neither text nor a list", "dict"]),
    # one preference
    ("rm", row(prompt="a", chosen="b"), ["'rejected' is missing"]),
    ("rm", row(prompt="a", chosen="b", rejected=""), ["'rejected' is empty"]),
    ("rm", row(prompt="a", chosen=1, rejected="b"), ["'chosen' is neither text", "int"]),
    ("rm", row(chosen="\n\nHuman: a\n\nAssistant: b", rejected="\n\nHuman: c\n\nAssistant: d"),
     ["chosen and rejected differ before the last turn"]),
    # one prompt
    ("ppo", row(text="a"), ["'prompt' is missing"]),
    ("ppo", row(prompt=[turn("user", "a"), turn("system", "b"), turn("user", "c")]),
     ["a system turn stands after the first"]),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "line", "named"), ROWS, ids=range(len(ROWS)))
def test_a_row_is_named_by_file_and_line(
    refused: Refusals, stage: str, line: bytes, named: list[str]
) -> None:
    """The second line of the file, after one that is as good as any."""
    file = refused.folder / "data" / "mine.jsonl"
    good = row(prompt="x", response="y", chosen="y", rejected="z")
    file.write_bytes(good + line.rstrip(b"\n") + b"\n" + good)
    command = {"sft": SFT, "rm": RM, "ppo": PPO}[stage]
    named = ["data/mine.jsonl, line 2: ", *named, "data.on_bad_row=skip"]
    refused.value(KEY[stage], "data/mine.jsonl", *command, named=named)


def wrote(content: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(content) and None


def rows(**columns: Any) -> Callable[[Path], None]:
    return lambda file: parquet.write_table(table(columns), file)


def cut_parquet(file: Path) -> None:
    rows(prompt=["a"] * 999, response=["b"] * 999)(file)
    file.write_bytes(file.read_bytes()[:-100])


FILES: list[tuple[str, Callable[[Path], None], list[str]]] = [
    ("x.jsonl", wrote(b""), ["x.jsonl holds no row", "empty"]),
    ("x.jsonl", wrote(b"\n \r\n\t\n"), ["x.jsonl holds no row", "empty"]),
    ("x.jsonl", wrote(b"\xef\xbb\xbf"), ["x.jsonl holds no row", "empty"]),
    ("x.jsonl", wrote(GOOD.decode().encode("utf-16")), ["x.jsonl is in UTF-16", "UTF-8"]),
    ("x.jsonl", wrote(GOOD.decode().encode("utf-32")), ["x.jsonl is in UTF-16 or UTF-32"]),
    ("x.jsonl", wrote(GOOD.decode().encode("utf-16-le")), ["line 1: broken JSON"]),
    ("x.jsonl", wrote(gzip.compress(GOOD)), ["x.jsonl is compressed", ".jsonl.gz"]),
    ("x.jsonl", rows(prompt=["a"]), ["x.jsonl is Parquet", ".parquet"]),
    (
        "x.jsonl",
        wrote(b"[\n" + GOOD + b"]"),
        ["line 1: broken JSON", "one JSON object a line"],
    ),
    ("x.jsonl", wrote(b"[" + GOOD.strip() + b",\n" + GOOD + b"]"), ["one JSON object a line"]),
    ("x.jsonl", wrote(b"[" + GOOD.strip() + b"]"), ["found list", "one JSON object a line"]),
    ("x.jsonl", wrote(json.dumps({"prompt": "a"}, indent=1).encode()), ["one JSON object a line"]),
    ("x.jsonl", Path.mkdir, ["data/x.jsonl is no file"]),
    ("x.jsonl.gz", wrote(gzip.compress(GOOD * 99)[:-9]), ["x.jsonl.gz cannot be read", "ended"]),
    ("x.jsonl.gz", wrote(GOOD), ["x.jsonl.gz cannot be read", "Not a gzipped file"]),
    ("x.jsonl.gz", wrote(b""), ["x.jsonl.gz holds no row", "empty"]),
    ("x.jsonl.gz", wrote(gzip.compress(GOOD * 99)[:20] + b"?" * 99), ["x.jsonl.gz"]),
    ("x.parquet", wrote(b"PAR1 nothing"), ["x.parquet cannot be read"]),
    ("x.parquet", wrote(b""), ["x.parquet cannot be read"]),
    ("x.parquet", cut_parquet, ["x.parquet cannot be read"]),
    ("x.parquet", rows(question=["a"], answer=["b"]), ["row 1: field 'response' is missing"]),
    ("x.parquet", rows(prompt=[1], response=[2]), ["row 1", "'prompt' is neither text", "int"]),
    ("x.parquet", rows(prompt=[b"\xff"], response=["b"]), ["row 1", "'prompt'", "bytes"]),
    ("x.parquet", rows(prompt=column([], string())), ["x.parquet holds no row", "empty"]),
    ("x.parquet", rows(messages=[turn("user", "a")]), ["row 1", "'messages'", "dict"]),
    ("x.tsv", wrote(b"prompt\tresponse\na\tb\n"), ["'data/x.tsv'", ENDINGS]),
    ("x", wrote(GOOD), ["'data/x'", ENDINGS]),
    ("x.JSONL", wrote(GOOD), ["'data/x.JSONL'", ENDINGS]),
    ("folder", Path.mkdir, ["'data/folder'", ENDINGS]),
    ("x.csv", wrote(b"question,answer\na,b\n"), ["line 2: field 'response' is missing"]),
    ("x.csv", wrote(b'prompt,response\na,"b\n'), ["line 2: broken CSV"]),
    ("x.csv", wrote(b"prompt,response\na,b,c\n"), ["line 2: another number of cells", "found 3"]),
    ("x.json", wrote(b"[" + GOOD + b", {]"), ["line 2: broken JSON"]),
    ("x.txt", wrote(b"a\n\xff\n"), ["line 2: not UTF-8"]),
    ("x.txt", wrote("a".encode("utf-16")), ["x.txt is in UTF-16"]),
]


@pytest.mark.parametrize(("name", "make", "named"), FILES, ids=range(len(FILES)))
def test_a_file_is_named(
    refused: Refusals, name: str, make: Callable[[Path], None], named: list[str]
) -> None:
    make(refused.folder / "data" / name)
    refused.value(KEY["sft"], f"data/{name}", *SFT, named=named)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (
            [*RM, "data.format=alpaca", "data.preferences.train=data/sft_train.jsonl"],
            ["data.format=alpaca holds demonstrations and prompts, no preferences", "helpsteer"],
        ),
        (
            [*RM, "data.preferences.train=data/sft_train.jsonl"],
            ["data/sft_train.jsonl, line 1: field 'chosen' is missing", "no preferences; "],
        ),
        ([*SFT, "data.format=alpca"], ["data.format is 'alpca'; allowed: auto, native, alpaca"]),
        ([*SFT, "data.train_on=first"], ["data.train_on is 'first'; allowed: last, all"]),
        ([*SFT, "data.columns.prompt=5"], ["data.columns is {'prompt': 5}; allowed: a mapping of"]),
        (
            [*SFT, "data.format=shp"],
            ["'history' is missing", "shp (history, ", "; its rows are of data.format=native (pro"],
        ),
    ],
)  # fmt: skip
def test_a_form_that_does_not_fit(refused: Refusals, command: list[str], named: list[str]) -> None:
    refused(*command, named=named)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (5, ["data.demonstrations.train is 5", "a file, a hub data set, or null"]),
        (["a", "b"], ["data.demonstrations.train is ['a', 'b']"]),
        (" ", ["data.demonstrations.train is ' '"]),
        ("a" * 300 + ".jsonl", ["data.demonstrations.train", "(306 characters)"]),
        ("a\x00.jsonl", ["data.demonstrations.train is 'a\\x00.jsonl'"]),
        ("~nobody-here/x.jsonl", ["~nobody-here/x.jsonl does not exist"]),
        ("https://me:s3cret@host/x.jsonl", ["https://***@host/x.jsonl does not exist"]),
        ("data/folder:train", ["'data/folder:train'", "org/name:split"]),
    ],
)
def test_a_source_that_is_none(refused: Refusals, source: Any, named: list[str]) -> None:
    """The last looks like a hub data set and is a folder of this machine."""
    (refused.folder / "data" / "folder").mkdir()
    error = refused.value(KEY["sft"], source, *SFT, named=named)
    assert "s3cret" not in error


def test_one_prompt_is_too_few_to_hold_one_out(refused: Refusals) -> None:
    (refused.folder / "data" / "x.jsonl").write_bytes(GOOD * 9)
    refused(*SFT, f"{KEY['sft']}=data/x.jsonl", "data.demonstrations.val=null",
            named=["data/x.jsonl has one prompt only"])  # fmt: skip


def test_rows_that_are_all_too_long(refused: Refusals) -> None:
    (refused.folder / "data" / "x.jsonl").write_bytes(row(prompt="a" * 9999, response="b"))
    named = ["no row of data/x.jsonl is left: 1 ", "data.max_prompt_tokens"]
    refused.value(KEY["sft"], "data/x.jsonl", *SFT, named=named)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD + OTHER,
        GOOD.replace(b"\n", b"\r\n") + OTHER,
        b'{"prompt": "a", "response": "b", "x": NaN}\n' + OTHER,
        GOOD + b"\n \n" + OTHER.rstrip(),
    ],
    ids=["BOM", "CRLF", "NaN in another column", "blank lines"],
)
def test_what_is_taken_on_purpose(refused: Refusals, content: bytes) -> None:
    """As far as the model, which the fixture stops."""
    (refused.folder / "data" / "x.jsonl").write_bytes(content)
    outcome = run(refused.place, KEY["sft"], "data/x.jsonl", *SFT)
    assert "2 demonstrations, too few to learn much from\n" in outcome.out
    assert "a model was loaded" in outcome.err


def test_rows_to_validate_on_are_counted_after_those_that_are_dropped(refused: Refusals) -> None:
    """Of 9 rows 4 are too long, and 3 of the other 5 are drawn."""
    texts = ["a" * (9999 if i % 2 else 1) + str(i) for i in range(9)]
    lines = b"".join(row(prompt=text, response="b") for text in texts)
    (refused.folder / "data" / "x.jsonl").write_bytes(lines)
    command = [*SFT, "data.demonstrations.val=data/x.jsonl"]
    outcome = run(refused.place, "data.max_val_rows", 3, *command)
    assert (
        "3 demonstrations to validate on, from data/x.jsonl, 2 left out (over data.max_val_rows), "
        "4 left out (prompt too long), too few to measure with ("
    ) in outcome.out
    assert "a model was loaded" in outcome.err


def test_a_line_of_100_mb(refused: Refusals) -> None:
    file = refused.folder / "data" / "x.jsonl"
    file.write_bytes(GOOD + b'{"prompt": "' + b"a" * 100_000_000 + b'", "response": "b"}\n')
    named = ["data/x.jsonl, line 2: the line is too long", "16,777,216 bytes"]
    refused.value(KEY["sft"], "data/x.jsonl", *SFT, named=named)
    file.unlink()


def test_as_a_shell_sees_it(workplace: Workplace) -> None:
    (workplace.folder / "data" / "sft_train.jsonl").write_bytes(GOOD + b"{")
    (workplace.folder / "outputs").mkdir()
    command = [*MODULE, "stage=sft", "data=files"]
    outcome = workplace.process(command, f"{KEY['sft']}=data/sft_train.jsonl")
    assert "data/sft_train.jsonl, line 2: broken JSON" in outcome.error
    assert outcome.out == "computing on the CPU, 32-true\n"
    assert list((workplace.folder / "outputs").iterdir()) == []
