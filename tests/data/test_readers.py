"""Forms of rows, bad rows, kinds of files."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from lightning_rlhf.core.errors import DataError, HubError
from lightning_rlhf.data.readers import read
from lightning_rlhf.data.rows import Demonstration, Message, Messages, Preference

read_demonstrations: Any = partial(read, "demonstrations")
read_preferences: Any = partial(read, "preferences")
read_prompts: Any = partial(read, "prompts")

Jsonl = Callable[..., str]


def turns(*contents: str) -> Messages:
    """User and assistant in turn, the user first."""
    roles = ("user", "assistant")
    return tuple(Message(roles[i % 2], content) for i, content in enumerate(contents))


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns(*contents)]


SYSTEM = {"role": "system", "content": "Be kind."}
HH = "\n\nHuman: Hi\n\nAssistant: Hello. Who are you?\n\nHuman: Bob. And you?\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Hi", "response": "Hello"}, Demonstration(turns("Hi"), "Hello")),
        ({"messages": chat("Hi", "Hello")}, Demonstration(turns("Hi"), "Hello")),
        (
            {"messages": [SYSTEM, *chat("Hi", "Hello", "Bye", "So long")]},
            Demonstration((Message("system", "Be kind."), *turns("Hi", "Hello", "Bye")), "So long"),
        ),
        (
            {"prompt": chat("Hi"), "response": chat("", "Hello")[1:]},
            Demonstration(turns("Hi"), "Hello"),
        ),
        (
            {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
            Demonstration(turns("Hi"), "Hello"),
        ),
        (
            {"chosen": HH + " Ann.", "rejected": HH + " None of your business."},
            Demonstration(turns("Hi", "Hello. Who are you?", "Bob. And you?"), "Ann."),
        ),
        # Spaces belong to the text; a column of nulls is no column.
        (
            {"prompt": " Hi ", "response": " Hello\n", "messages": None},
            Demonstration(turns(" Hi "), " Hello\n"),
        ),
    ],
)
def test_forms_of_demonstrations(
    row: dict[str, Any], expected: Demonstration, jsonl: Jsonl
) -> None:
    assert read_demonstrations(jsonl(row), "stop").rows == (expected,)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
            Preference(turns("Hi"), "Hello", "No"),
        ),
        (
            {"prompt": chat("Hi", "Hello", "Bye"), "chosen": "So long", "rejected": "Wait"},
            Preference(turns("Hi", "Hello", "Bye"), "So long", "Wait"),
        ),
        # The responses as messages, alone or after the prompt again.
        (
            {"prompt": chat("Hi"), "chosen": chat("", "A")[1:], "rejected": chat("", "B")[1:]},
            Preference(turns("Hi"), "A", "B"),
        ),
        (
            {"prompt": "Hi", "chosen": chat("Hi", "A"), "rejected": chat("Hi", "B")},
            Preference(turns("Hi"), "A", "B"),
        ),
        (
            {
                "chosen": chat("Hi", "Hello", "Bye", "A"),
                "rejected": chat("Hi", "Hello", "Bye", "B"),
            },
            Preference(turns("Hi", "Hello", "Bye"), "A", "B"),
        ),
        (
            {"chosen": HH + " Ann.", "rejected": HH + " Eve."},
            Preference(turns("Hi", "Hello. Who are you?", "Bob. And you?"), "Ann.", "Eve."),
        ),
        # Some copies of the HH data have the dialogue in a column of its own.
        (
            {"prompt": HH, "chosen": " Ann.", "rejected": " Eve."},
            Preference(turns("Hi", "Hello. Who are you?", "Bob. And you?"), " Ann.", " Eve."),
        ),
        # Two turns of the user in a row.
        (
            {
                "chosen": "\n\nHuman: Hi\n\nHuman: You there?\n\nAssistant: Yes",
                "rejected": "\n\nHuman: Hi\n\nHuman: You there?\n\nAssistant: No",
            },
            Preference((Message("user", "Hi"), Message("user", "You there?")), "Yes", "No"),
        ),
        # A marker in the middle of a line is text.
        (
            {
                "chosen": "\n\nHuman: Say 'Human: a\nAssistant: b'\n\nAssistant: Yes",
                "rejected": "\n\nHuman: Say 'Human: a\nAssistant: b'\n\nAssistant: No",
            },
            Preference(turns("Say 'Human: a\nAssistant: b'"), "Yes", "No"),
        ),
    ],
)
def test_forms_of_preferences(row: dict[str, Any], expected: Preference, jsonl: Jsonl) -> None:
    assert read_preferences(jsonl(row), "stop").rows == (expected,)


@pytest.mark.parametrize(
    ("row", "prompt", "columns"),
    [
        (
            {"prompt": "1 + 1?", "answer": 2, "note": None},
            turns("1 + 1?"),
            {"prompt": "1 + 1?", "answer": 2, "note": None},
        ),
        ({"prompt": chat("Hi")}, turns("Hi"), {"prompt": "Hi"}),
        ({"prompt": chat("Hi", "Hello")}, turns("Hi"), {"prompt": "Hi"}),
        ({"messages": chat("Hi")}, turns("Hi"), {"prompt": "Hi"}),
        (
            {"messages": chat("Hi", "Hello", "Bye", "So long"), "id": 7},
            turns("Hi", "Hello", "Bye"),
            {"prompt": "User: Hi\n\nAssistant: Hello\n\nUser: Bye", "id": 7},
        ),
        (
            {"prompt": "Hi", "response": "Hello"},
            turns("Hi"),
            {"prompt": "Hi", "response": "Hello"},
        ),
        (
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: A",
                "rejected": "\n\nHuman: Hi\n\nAssistant: B",
            },
            turns("Hi"),
            {
                "prompt": "Hi",
                "chosen": "\n\nHuman: Hi\n\nAssistant: A",
                "rejected": "\n\nHuman: Hi\n\nAssistant: B",
            },
        ),
    ],
)
def test_forms_of_prompts(
    row: dict[str, Any], prompt: Messages, columns: dict[str, Any], jsonl: Jsonl
) -> None:
    (read,) = read_prompts(jsonl(row), "stop").rows
    assert read.prompt == prompt
    messages = [{"role": turn.role, "content": turn.content} for turn in prompt]
    assert read.columns == columns | {"messages": messages}


def test_a_margin_is_read_where_there_is_one(jsonl: Jsonl) -> None:
    pair = {"prompt": "Hi", "chosen": "A", "rejected": "B"}
    source = jsonl(pair, pair | {"margin": 2}, pair | {"margin": 0.5}, pair | {"margin": None})
    read = read_preferences(source, "stop").rows
    assert [row.margin for row in read] == [None, 2.0, 0.5, None]


@pytest.mark.parametrize("margin", ["much", True, -1, math.inf, math.nan])
def test_a_margin_that_is_none_is_left_to_who_wants_one(margin: Any, jsonl: Jsonl) -> None:
    source = jsonl({"prompt": "Hi", "chosen": "A", "rejected": "B", "margin": margin})
    (row,) = read_preferences(source, "stop").rows
    assert row.margin is None


def test_a_prompt_with_many_answers_is_kept_once_where_it_is_first_seen(jsonl: Jsonl) -> None:
    rows = [{"prompt": p, "response": r} for p, r in [("b", "1"), ("b", "3"), ("a", "2")]]
    read = read_prompts(jsonl(*rows), "stop")
    assert [row.columns["response"] for row in read.rows] == ["1", "2"]
    assert read.numbers == (1, 3)
    assert read.left_out == Counter({"repeated prompt": 1})


def test_rows_of_a_prompt_alone_are_all_kept(jsonl: Jsonl) -> None:
    read = read_prompts(jsonl({"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 2}), "stop")
    assert [row.columns["answer"] for row in read.rows] == [1, 2]
    assert not read.left_out


def test_broken_json_is_shown_by_its_column(jsonl: Jsonl, tmp_path: Path) -> None:
    """The line ends where its value should stand, in column 28; not on a line of its own."""
    file = tmp_path / "cut.jsonl"
    file.write_bytes(b'{"prompt": "A", "response": "B"}\r\n{"prompt": "A", "response":\r\n')
    with pytest.raises(DataError, match=r"line 2: broken JSON \(Expecting value, column 28\)"):
        read_demonstrations(str(file), "stop")


def line(row: Any) -> bytes:
    return json.dumps(row).encode()


PAIR = {"prompt": "Hi", "chosen": "A", "rejected": "B"}
BAD_ROWS = [
    (read_demonstrations, b'{"prompt": "Hi", "respo', "broken JSON"),
    (read_demonstrations, b"9" * 5000, "broken JSON"),
    (read_demonstrations, b'["Hi", "Hello"]', "not a JSON object"),
    (read_demonstrations, b'{"prompt": "Caf\xe9", "response": "Hello"}', "not UTF-8"),
    (read_demonstrations, line({"prompt": "Hi"}), "field 'response' is missing"),
    (read_demonstrations, line({"prompt": "Hi", "response": None}), "field 'response' is missing"),
    (read_demonstrations, line({"response": "Hello"}), "field 'prompt' is missing"),
    (read_demonstrations, line({"question": "Hi"}), "field 'response' is missing"),
    (
        read_demonstrations,
        line({"prompt": "Hi", "response": ""}),
        "field 'response' is empty or blank",
    ),
    (
        read_demonstrations,
        line({"prompt": " \n", "response": "A"}),
        "field 'prompt' is empty or blank",
    ),
    (
        read_demonstrations,
        line({"prompt": "Hi", "response": 5}),
        "field 'response' is neither text nor a list of messages",
    ),
    (
        read_demonstrations,
        line({"prompt": "Hi", "response": "a\0b"}),
        "field 'response' holds a null byte",
    ),
    (
        read_demonstrations,
        b'{"prompt": "Hi", "response": "a\\ud83d"}',
        "field 'response' holds half a surrogate pair, which UTF-8 cannot express",
    ),
    (read_demonstrations, line({"messages": []}), "field 'messages' is empty or blank"),
    (read_demonstrations, line({"messages": "Hi"}), "field 'messages' is text but not a dialogue"),
    (
        read_demonstrations,
        line({"messages": [{"role": "user", "text": "Hi"}]}),
        'a turn of \'messages\' is not {"role", "content"}',
    ),
    (
        read_demonstrations,
        line({"messages": [{"role": "robot", "content": "Hi"}]}),
        "unknown role in 'messages'",
    ),
    (
        read_demonstrations,
        line({"messages": [{"role": "user", "content": ["Hi"]}, *chat("", "A")[1:]]}),
        "field 'messages' is not text",
    ),
    (
        read_demonstrations,
        line({"messages": chat("Hi", "Hello", "Bye")}),
        "the last turn of 'messages' is not the assistant's",
    ),
    (
        read_demonstrations,
        line({"messages": chat("Hi", "Hello")[1:]}),
        "the prompt does not end with a user turn",
    ),
    (
        read_demonstrations,
        line({"messages": [*chat("Hi"), SYSTEM, *chat("Hi", "Hello")]}),
        "a system turn stands after the first turn",
    ),
    (
        read_preferences,
        line({"prompt": "Hi", "chosen": "A"}),
        "field 'rejected' is missing",
    ),
    (read_preferences, line({"chosen": "A", "rejected": "B"}), "field 'prompt' is missing"),
    (
        read_preferences,
        line(PAIR | {"rejected": "A "}),
        "chosen and rejected are identical",
    ),
    (
        read_preferences,
        line({"chosen": HH + " Ann.", "rejected": HH.replace("Bob", "Rob") + " Eve."}),
        "chosen and rejected differ before the last turn",
    ),
    # The same last turn, so that nothing but the earlier turn tells them apart.
    (
        read_preferences,
        line({"chosen": HH + " Ann.", "rejected": HH.replace("Bob", "Rob") + " Ann."}),
        "chosen and rejected differ before the last turn",
    ),
    (
        read_preferences,
        line({"chosen": HH + " Ann.", "rejected": HH + " "}),
        "field 'rejected' is empty or blank",
    ),
    (
        read_preferences,
        line({"chosen": HH + " A\n\nHuman: B", "rejected": HH + " C"}),
        "the last turn of 'chosen' is not the assistant's",
    ),
    (read_prompts, line({"text": "Hi"}), "field 'prompt' is missing"),
    (read_prompts, line({"prompt": chat("", "A")[1:]}), "the prompt does not end with a user turn"),
]


@pytest.mark.parametrize(("read", "bad", "reason"), BAD_ROWS)
def test_a_bad_row_stops_with_file_line_and_reason(
    read: Callable[..., Any], bad: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    good = line(PAIR)
    path.write_bytes(good + b"\n\n" + bad + b"\n" + good)  # the blank line counts
    with pytest.raises(DataError) as error:
        read(str(path), "stop")
    message = str(error.value)
    assert message.startswith(f"{path}, line 3: {reason}")
    assert "data.on_bad_row=skip" in message


@pytest.mark.parametrize(
    ("read", "row", "said"),
    [
        (read_demonstrations, {}, "'response' is missing (found none; stage=sft"),
        (read_demonstrations, {"response": "A"}, "(found 'response'; 'response' is a text, which"),
        (
            read_preferences,
            {"prompt": "A", "Rejected": "B"},
            "'prompt', 'Rejected'; stage=rm",
        ),
        (read_prompts, {"body": "A", "prompt": None}, "(found 'body'; stage=ppo"),
    ],
)
def test_a_missing_field_is_told_with_those_that_are_there(
    read: Any, row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(line(row))
    with pytest.raises(DataError, match=re.escape(said)):
        read(str(file), "stop")


@pytest.mark.parametrize(("read", "bad", "reason"), BAD_ROWS)
def test_a_bad_row_can_be_skipped_and_is_counted(
    read: Callable[..., Any], bad: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    other = line({"prompt": "Bye", "chosen": "A", "rejected": "B"})
    path.write_bytes(b"\n".join([bad, line(PAIR), bad, other]))
    result = read(str(path), "skip")
    assert [row.prompt for row in result.rows] == [turns("Hi"), turns("Bye")]
    assert result.numbers == (2, 4)
    assert result.left_out == Counter({reason: 2})


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line({"prompt": "Hi", "response": "Hello"}) + b"\r\n")
    assert len(read_demonstrations(str(path), "stop")) == 1


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    text = '{"prompt": "Größe?", "response": "中"}\n{"prompt": 1}\n'
    path.write_bytes(gzip.compress(text.encode()))
    assert read_demonstrations(str(path), "skip").rows == (Demonstration(turns("Größe?"), "中"),)
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz, line 2"):
        read_demonstrations(str(path), "stop")


def test_a_broken_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(line(PAIR) * 100)[:-20])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be read"):
        read_preferences(str(path), "stop")


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = {
        "messages": [chat("Hi", "Hello"), chat("Hi", "Hello", "Bye"), None],
        "prompt": [None, None, "Hi"],
        "response": [None, None, "A"],
    }
    datasets.Dataset.from_dict(columns).to_parquet(str(path))
    read = read_demonstrations(str(path), "skip")
    assert read.rows == (Demonstration(turns("Hi"), "Hello"), Demonstration(turns("Hi"), "A"))
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: the last turn of 'messages'"):
        read_demonstrations(str(path), "stop")


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read"):
        read_prompts(str(path), "skip")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"rows\.jsonl holds no row that can be used, it is empty"):
        read_prompts(str(path), "skip")


def test_nothing_left(jsonl: Jsonl) -> None:
    said = r"can be used: 2 field 'prompt' is missing; its columns are 'a'; prompts have "
    with pytest.raises(DataError, match=said):
        read_prompts(jsonl({"a": 1}, {"a": 2}), "skip")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        read_prompts(str(tmp_path / "nowhere.jsonl"), "stop")


@pytest.mark.parametrize("name", ["rows.tsv", "rows.arrow", "folder"])
def test_a_source_of_another_kind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    for source in (f"data/{name}", str(tmp_path / "data" / name), name):
        with pytest.raises(DataError, match=r"neither a file ending in \.jsonl"):
            read_prompts(source, "stop")
    with pytest.raises(DataError, match=r"neither a file ending in \.jsonl"):
        read_prompts("elsewhere/rows.tsv", "stop")  # not there, but no hub id either


def hub(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("org/name", ("org/name", "train")),
        ("org/name:test", ("org/name", "test")),
        ("org/name:train[:5%]", ("org/name", "train[:5%]")),
    ],
)
def test_a_hub_data_set(
    source: str, asked: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load(name: str, split: str) -> datasets.Dataset:
        calls.append((name, split))
        return datasets.Dataset.from_list([PAIR, {"prompt": "Hi"}])

    hub(monkeypatch, load)
    assert read_preferences(source, "skip").rows == (Preference(turns("Hi"), "A", "B"),)
    assert calls == [asked]
    with pytest.raises(DataError, match=r"row 2: field 'chosen' is missing"):
        read_preferences(source, "stop")


def test_an_unreachable_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, split: str) -> None:
        raise ConnectionError("no route\nmany more lines")

    hub(monkeypatch, load)
    with pytest.raises(HubError) as error:
        read_preferences("org/name:test", "skip")
    message = str(error.value)
    assert "org/name, split test" in message
    assert "no route" in message
    assert "many more" not in message
    assert ".jsonl" in message
