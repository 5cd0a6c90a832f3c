"""Rows in the true forms of well-known data sets, with their ugly cases."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.core.errors import ConfigError, DataError
from lightning_rlhf.data.config import DataConfig, Split
from lightning_rlhf.data.readers import UNPAIRED, check_sources, load, read
from lightning_rlhf.data.rows import Demonstration, Message, Messages, Preference
from lightning_rlhf.io.user_code import code_of_command

read_demonstrations: Any = partial(read, "demonstrations")
read_preferences: Any = partial(read, "preferences")
read_prompts: Any = partial(read, "prompts")
load_demonstrations: Any = partial(load, "demonstrations")

Jsonl = Callable[..., str]
MakeConfig = Callable[..., DataConfig]


def turns(*contents: str) -> Messages:
    """User and assistant in turn, the user first."""
    roles = ("user", "assistant")
    return tuple(Message(roles[i % 2], content) for i, content in enumerate(contents))


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns(*contents)]


def human(*contents: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(contents)]


SYSTEM = Message("system", "Be kind.")
CALL = {"type": "function", "id": "c1", "function": {"name": "time", "arguments": '{"zone": "Ü"}'}}
TOOLS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Time?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "time", "content": "noon"},
    {"role": "assistant", "content": "Noon.", "tool_calls": None},
]
TOOLS_READ = (
    SYSTEM,
    Message("user", "Time?"),
    Message(
        "assistant", "",
        '{"tool_calls": [{"type": "function", "id": "c1", "function": {"name": "time", '
        '"arguments": {"zone": "Ü"}}}]}',
    ),
    Message("tool", "noon", '{"tool_call_id": "c1", "name": "time"}'),
)  # fmt: skip
"""The arguments of a call are text in OpenAI's form, and an object in chat templates."""
SHP = {"post_id": "a1", "history": "Why?", "human_ref_A": "A", "human_ref_B": "B",
       "score_A": 8, "score_B": 2, "score_ratio": 4.0}  # fmt: skip
PAIR = {"prompt": "p", "chosen": "b", "rejected": "c"}
HELP = {"prompt": "Hi", "correctness": 1, "coherence": 4, "complexity": 1, "verbosity": 1}
POST = {"subreddit": "tifu", "title": "Oh", "post": "It rained."}
POST_READ = "SUBREDDIT: r/tifu\n\nTITLE: Oh\n\nPOST: It rained.\n\nTL;DR:"
STEER = "One\n<extra_id_1>Assistant\nTwo\n<extra_id_1>User\nThree"


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        # An empty input is no input; other columns are not read.
        (
            "alpaca",
            {"instruction": "Say é.", "input": "", "output": "é", "text": "Below ..."},
            (turns("Say é."), "é"),
        ),
        ("alpaca", {"instruction": "Add.", "input": "1, 2", "output": "3"},
         (turns("Add.\n\n1, 2"), "3")),
        ("alpaca", {"instruction": "Say a.", "input": None, "output": "a"}, (turns("Say a."), "a")),
        ("alpaca", {"instruction": "Say a.", "output": "a"}, (turns("Say a."), "a")),
        # A dialogue that ends on a human turn, that has a system turn, that begins with the model.
        ("sharegpt", {"id": "x_0", "conversations": human("Hi", "Hello")}, (turns("Hi"), "Hello")),
        ("sharegpt", {"conversations": human("Hi", "Hello", "Bye")}, (turns("Hi"), "Hello")),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "Be kind."}, *human(*"abcd")]},
            ((SYSTEM, *turns("a", "b", "c")), "d"),
        ),
        ("sharegpt", {"conversations": human("", "Hm", "Hi", "Hello")[1:]}, (turns("Hi"), "Hello")),
        ("sharegpt", {"conversations": chat("Hi", "Hello")}, (turns("Hi"), "Hello")),
        (
            "sharegpt",
            {"conversations": [*human(*"ab"), {"from": "tool", "value": "c"}, *human(*"xd")[1:]]},
            ((*turns("a", "b"), Message("tool", "c")), "d"),
        ),
        ("messages", {"messages": TOOLS}, (TOOLS_READ, "Noon.")),
        ("messages", {"prompt": "x", "messages": chat("a", "b")}, (turns("a"), "b")),
        ("hh", {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": ""}, (turns("a"), "b")),
        # Two turns of the user, the first of which nobody answers.
        (
            "hh",
            {"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "x"},
            ((Message("user", "a"), Message("user", "b")), "c"),
        ),
        (
            "ultrafeedback",
            {"prompt": "a ", "chosen": chat("a", "b"), "rejected": chat("a", "c"),
             "score_chosen": 1.0, "score_rejected": 1.0, "messages": chat("a", "b")},
            (turns("a"), "b"),
        ),
        ("shp", SHP | {"labels": 0}, (turns("Why?"), "B")),
        ("tldr", POST | {"summary": " Rain."}, (turns(POST_READ), "Rain.")),
        ("tldr", {"prompt": "POST: a\n\nTL;DR:", "completion": " b"},
         (turns("POST: a\n\nTL;DR:"), " b")),
        ("helpsteer", HELP | {"prompt": STEER, "response": "Four", "helpfulness": 0},
         (turns("One", "Two", "Three"), "Four")),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, (turns("a"), "b")),
        ("kto", {"prompt": chat("a"), "completion": chat("", "b")[1:], "label": 1},
         (turns("a"), "b")),
        ("prompt_completion", {"prompt": "a", "completion": "b"}, (turns("a"), "b")),
        ("text", {"text": "Once, 中."}, ((), "Once, 中.")),
    ],
)  # fmt: skip
def test_demonstrations(format: Any, row: dict[str, Any], expected: Any, jsonl: Jsonl) -> None:
    """By the name of the form, and by the columns alone."""
    source = jsonl(row)
    for by in (format, "auto"):
        assert read_demonstrations(source, "stop", by).rows == (Demonstration(*expected),)


def compared(choice: int) -> dict[str, Any]:
    info = POST | {"id": "t3_x", "site": None, "article": None}
    texts = [{"text": " A", "policy": "sup2", "note": "x"}, {"text": "B", "policy": "ref"}]
    return {"info": info, "summaries": texts, "choice": choice, "worker": "w", "batch": "b"}


ULTRA = {"prompt": "a", "prompt_id": "f", "chosen": chat("a", "b"), "rejected": chat("a", "c")}


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        ("ultrafeedback", ULTRA | {"score_chosen": 8.5, "score_rejected": 6.0},
         ("a", "b", "c", 2.5)),
        ("shp", SHP | {"labels": 1}, ("Why?", "A", "B", math.log(4))),
        ("shp", SHP | {"labels": 0, "score_ratio": None}, ("Why?", "B", "A", None)),
        ("tldr", compared(0), (POST_READ, " A", "B", None)),
        ("tldr", compared(1), (POST_READ, "B", " A", None)),
        ("tldr", {"prompt": "p", "chosen": "b", "rejected": "c"}, ("p", "b", "c", None)),
        (
            "helpsteer",
            {"prompt": "p", "response_1": "b", "response_2": "c", "preference_strength": -2},
            ("p", "b", "c", 2.0),
        ),
        (
            "helpsteer",
            {"context": chat("p"), "response1": "b", "response2": "c", "overall_preference": 1},
            ("p", "c", "b", 1.0),
        ),
    ],
)  # fmt: skip
def test_preferences(format: Any, row: dict[str, Any], expected: Any, jsonl: Jsonl) -> None:
    prompt, chosen, rejected, margin = expected
    pair = Preference(turns(prompt), chosen, rejected, margin)
    assert read_preferences(jsonl(row), "stop", format).rows == (pair,)


def test_scored_responses_to_a_prompt_are_paired(jsonl: Jsonl) -> None:
    """Of a, b, c with 4, 1, 4 the pairs are a > b and c > b; e has nothing to be compared with."""
    rows = [("Hi", "a", 4), ("Ho", "e", 2), ("Hi", "b", 1), ("Hi", "c", 4)]
    source = jsonl(*(HELP | {"prompt": p, "response": r, "helpfulness": s} for p, r, s in rows))
    read = read_preferences(source, "stop")
    assert read.rows == (
        Preference(turns("Hi"), "a", "b", 3.0),
        Preference(turns("Hi"), "c", "b", 3.0),
    )
    assert read.numbers == (1, 4)
    assert read.left_out == Counter({UNPAIRED: 1})


def test_labels_are_paired_and_bad_completions_are_not_imitated(jsonl: Jsonl) -> None:
    rows = [("p", "bad", False), ("p", "good", True), ("q", "fine", True)]
    source = jsonl(*({"prompt": p, "completion": c, "label": x} for p, c, x in rows))
    pairs = read_preferences(source, "stop")
    assert pairs.rows == (Preference(turns("p"), "good", "bad", None),)
    assert (pairs.numbers, pairs.left_out) == ((2,), Counter({UNPAIRED: 1}))
    demonstrations = read_demonstrations(source, "stop")
    assert [row.response for row in demonstrations.rows] == ["good", "fine"]
    assert demonstrations.left_out == Counter({"its label is false": 1})
    prompts = read_prompts(source, "stop", "kto")
    assert [row.prompt for row in prompts.rows] == [turns("p"), turns("q")]


def test_labels_without_a_pair(jsonl: Jsonl) -> None:
    source = jsonl(*({"prompt": p, "completion": "c", "label": True} for p in "ab"))
    with pytest.raises(DataError, match=rf"holds no pair of responses: 2 {UNPAIRED}$"):
        read_preferences(source, "stop")


def test_ties_are_left_out_and_do_not_stop(jsonl: Jsonl) -> None:
    scores = {"score_chosen": 7.0, "score_rejected": 7.0}
    source = jsonl(ULTRA | scores, ULTRA | scores | {"score_rejected": 6.5})
    read = read_preferences(source, "stop", "ultrafeedback")
    assert (read.numbers, read.left_out.total()) == ((2,), 1)
    assert read_preferences(source, "stop") == read  # by its columns alone
    # With a margin it is a file of ours.
    ours = read_preferences(jsonl(ULTRA | scores | {"margin": 3.0}), "stop")
    assert [pair.margin for pair in ours.rows] == [3.0]


def test_one_file_has_one_form_for_all_stages(jsonl: Jsonl) -> None:
    """Turns inside the prompts of HelpSteer, and scores that contradict UltraFeedback's pair."""
    rows = [HELP | {"prompt": STEER, "response": str(i), "helpfulness": i} for i in (0, 4)]
    source, prompt = jsonl(*rows), turns("One", "Two", "Three")
    assert read_demonstrations(source, "stop").rows[0].prompt == prompt
    assert [row.prompt for row in read_prompts(source, "stop").rows] == [prompt]
    assert read_preferences(source, "stop").rows == (Preference(prompt, "4", "0", 4.0),)
    source = jsonl(ULTRA | {"score_chosen": 1, "score_rejected": 2})
    with pytest.raises(DataError, match="score_chosen is below score_rejected"):
        read_preferences(source, "stop")


@pytest.mark.parametrize(
    ("format", "row", "prompt"),
    [
        ("alpaca", {"instruction": "a", "input": "b"}, turns("a\n\nb")),
        ("alpaca", {"instruction": "a", "output": "c"}, turns("a")),
        ("sharegpt", {"conversations": human("a", "b", "c")}, turns("a", "b", "c")),
        ("sharegpt", {"conversations": human("a", "b", "c", "d")}, turns("a", "b", "c")),
        ("messages", {"messages": TOOLS}, TOOLS_READ),
        ("hh", {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "x"}, turns("a")),
        ("ultrafeedback", {"prompt": "a", "messages": chat("a")}, turns("a")),
        ("shp", SHP | {"labels": 1}, turns("Why?")),
        ("tldr", compared(0), turns(POST_READ)),
        ("tldr", POST, turns(POST_READ)),
        ("helpsteer", HELP | {"response": "x", "helpfulness": 1}, turns("Hi")),
        ("prompt_completion", {"prompt": "a"}, turns("a")),
        ("text", {"text": "a"}, turns("a")),
    ],
)
def test_prompts(format: Any, row: dict[str, Any], prompt: Messages, jsonl: Jsonl) -> None:
    source = jsonl(row, row)
    read = read_prompts(source, "stop", format)
    assert {found.prompt for found in read.rows} == {prompt}
    assert read.rows[0].columns["messages"] == [turn.as_dict() for turn in prompt]
    is_alone = set(row) <= {"instruction", "input", "subreddit", "title", "post", "prompt", "text"}
    assert len(read) == (2 if is_alone else 1)


@pytest.mark.parametrize("row", [{"completion": "c"}, {"completion": "c", "label": True}])
def test_prompts_with_completions_are_kept_once_also_by_their_columns(
    row: dict[str, Any], jsonl: Jsonl
) -> None:
    read = read_prompts(jsonl({"prompt": "a"} | row, {"prompt": "a"} | row), "stop")
    assert (len(read), read.left_out) == (1, Counter({"repeated prompt": 1}))


@pytest.mark.parametrize(
    ("read", "format", "row", "said"),
    [
        (read_demonstrations, "alpaca", {"instruction": "a", "input": 5, "output": "b"},
         "field 'input' is not text (found int)"),
        (read_demonstrations, "alpaca", {"instruction": "a", "output": ""},
         "field 'output' is empty or blank"),
        (read_demonstrations, "alpaca", {"instruction": ["a"], "output": "b"},
         "field 'instruction' is not text (found list)"),
        (read_demonstrations, "alpaca", {"instruction": "a", "output": None},
         "field 'output' is missing (found 'instruction'; data.format=alpaca (instruction, out"),
        (read_demonstrations, "sharegpt", {"conversations": [{"from": "narrator", "value": "x"}]},
         "unknown role in 'conversations' (found 'narrator' in conversations[0].from; known are"),
        (read_demonstrations, "sharegpt", {"conversations": [{"from": None, "value": "x"}]},
         "unknown role in 'conversations' (found None"),
        (read_demonstrations, "sharegpt", {"conversations": human("a")},
         "no turn of the assistant answers one of the user"),
        (read_demonstrations, "sharegpt", {"conversations": human("a", None)},  # type: ignore[arg-type]
         "conversations[1].content is NoneType"),
        (read_demonstrations, "sharegpt", {"conversations": human("a", " ")},
         "empty or blank (conversations[1].content)"),
        (read_demonstrations, "sharegpt", {"conversations": []}, "'conversations' is empty"),
        (read_demonstrations, "sharegpt", {"conversations": "a"}, "is no list of turns (found "),
        (read_demonstrations, "messages", {"messages": TOOLS[:3]},
         "messages[2].content is NoneType, and messages[2].tool_calls stands for it"),
        (read_demonstrations, "messages",
         {"messages": [*chat("a"), {"role": "assistant", "tool_calls": [{"f": 1}]}, *TOOLS[3:]]},
         "a call of a tool in 'messages' has no name (messages[1].tool_calls[0] is not"),
        (read_demonstrations, "hh",
         {"chosen": "\n\nHuman: a\n\nHuman:\n\nAssistant: b", "rejected": "x"},
         "field 'chosen' is empty or blank (turn 2)"),
        (read_preferences, "hh", {"chosen": "a", "rejected": "b"}, "field 'prompt' is missing"),
        (read_preferences, "ultrafeedback", ULTRA | {"score_chosen": "high", "score_rejected": 1},
         "field 'score_chosen' is not a number (found 'high')"),
        (read_preferences, "ultrafeedback", ULTRA | {"score_chosen": 1, "score_rejected": 2},
         "score_chosen is below score_rejected"),
        (read_preferences, "ultrafeedback", ULTRA | {"score_chosen": 1, "score_rejected": None},
         "field 'score_rejected' is missing"),
        (read_preferences, "shp", SHP | {"labels": 2}, "field 'labels' is no label (found '2'"),
        (read_preferences, "shp", SHP | {"labels": 1, "human_ref_B": "[]", "history": 3},
         "field 'history' is not text (found int)"),
        (read_preferences, "shp", SHP | {"labels": 1, "human_ref_B": "A "}, "are identical"),
        (read_preferences, "tldr", compared(0) | {"summaries": [{"text": "A"}]},
         "field 'summaries' is not two objects"),
        (read_preferences, "tldr", compared(0) | {"info": POST | {"post": None}},
         "field 'post' is missing"),
        (read_preferences, "helpsteer", HELP | {"response": "a", "helpfulness": True},
         "field 'helpfulness' is not a number (found 'True')"),
        (read_preferences, "kto", {"prompt": "a", "completion": "b", "label": "good"},
         "field 'label' is no label (found 'good'; allowed: true, false, 1, 0)"),
        (read_prompts, "text", {"text": 1}, "field 'text' is not text (found int)"),
    ],
)  # fmt: skip
def test_bad_rows(read: Any, format: Any, row: Any, said: str, tmp_path: Path) -> None:
    """Named by file and line, or left out and counted."""
    good: dict[str, dict[str, Any]] = {
        "alpaca": {"instruction": "x", "output": "y"},
        "sharegpt": {"conversations": human("x", "y")},
        "messages": {"messages": chat("x", "y")},
        "hh": {"prompt": "x", "chosen": "y", "rejected": "z"},
        "ultrafeedback": ULTRA | {"score_chosen": 2, "score_rejected": 1},
        "shp": SHP | {"labels": 1},
        "tldr": compared(1),
        "helpsteer": HELP | {"response": "x", "helpfulness": 1},
        "kto": {"prompt": "x", "completion": "y", "label": False},
        "text": {"text": "x"},
    }
    rows = [good[format], row]
    if format == "helpsteer":
        rows.append(HELP | {"response": "y", "helpfulness": 2})
    if format == "kto":
        rows.append({"prompt": "x", "completion": "z", "label": True})
    file = tmp_path / "mine.json"
    file.write_text("[" + ",\n".join(map(json.dumps, rows)) + "]")
    with pytest.raises(DataError) as error:
        read(str(file), "stop", format)
    assert str(error.value).startswith(f"{file}, row 2: ")
    assert said in str(error.value)
    assert "data.on_bad_row=skip" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert read(str(file), "skip", format).left_out.total() == 1


def test_a_format_that_cannot_serve_a_stage_is_refused_before_the_file_is_read(
    make_config: MakeConfig, jsonl: Jsonl
) -> None:
    file = jsonl({"instruction": "a", "output": "b"})
    config = make_config(format="alpaca", preferences=Split(train=file, val=None))
    with pytest.raises(DataError) as error:
        check_sources(config, "preferences")
    assert str(error.value) == (
        "data.format=alpaca holds demonstrations and prompts, no preferences, which "
        f"data.preferences.train={file} needs; stage=rm and stage=dpo need preference pairs "
        '{"prompt", "chosen", "rejected"}; allowed: native, hh, ultrafeedback, shp, tldr, '
        "helpsteer, kto"
    )


@pytest.mark.parametrize(
    ("reader", "row", "said"),
    [
        (
            read_preferences,
            {"instruction": "a", "output": "b"},
            "its rows are of data.format=alpaca (instruction, output), which holds demonstrations "
            "and prompts, no preferences; preferences are in data.format=native, hh, ultrafeedback",
        ),
        (
            read_preferences,
            {"prompt": "a", "response": "b"},
            "its rows are of data.format=native (prompt, response), which holds demonstrations and "
            "prompts, no preferences; ",
        ),
        (read_demonstrations, {"Instruction": "a", "result": "b"}, "alpaca (instruction, output)"),
        (read_preferences, {"prompt": "a", "chosen": "b", "r": "c"}, "native (chosen, rejected)"),
        (read_prompts, {"prompts": "a"}, "have native (prompt)"),
        (read_demonstrations, {"xyz": "a"}, "; data.columns.COLUMN=NAME reads"),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["stop", "skip"])
@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_a_file_that_no_form_fits(
    reader: Any, row: dict[str, str], said: str, on_bad_row: Any, ending: str, tmp_path: Path
) -> None:
    """One message with the columns found and those that are allowed."""
    file = tmp_path / f"mine{ending}"
    with file.open("w", newline="") as opened:
        if ending == ".csv":
            writer = csv.DictWriter(opened, list(row))
            writer.writeheader()
            writer.writerow(row)
        else:
            opened.write(json.dumps(row) + "\n")
    with pytest.raises(DataError) as error:
        reader(str(file), on_bad_row)
    message = str(error.value)
    assert message.startswith(str(file))
    assert all(repr(name) in message for name in row)
    assert said in message
    assert len(message.splitlines()) == 1


def test_other_names_of_columns(jsonl: Jsonl) -> None:
    source = jsonl({"question": "a", "answer": "b", "prompt": "x", "id": 3})
    names = {"prompt": "question", "response": "answer"}
    read = read_demonstrations(source, "stop", "auto", names)
    assert read.rows == (Demonstration(turns("a"), "b"),)
    (prompt,) = read_prompts(source, "stop", "auto", names).rows
    assert prompt.columns == {
        "question": "a", "answer": "b", "response": "b", "id": 3, "prompt": "a",
        "messages": chat("a"),
    }  # fmt: skip
    alpaca = {"instruction": "question", "output": "answer"}
    assert read_demonstrations(source, "stop", "alpaca", alpaca).rows == (
        Demonstration(turns("a"), "b"),
    )


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_column_of_another_name_always_replaces_ours(ending: str, tmp_path: Path) -> None:
    """An empty one is no value, and one that no row has is an error."""
    rows = [{"prompt": "x", "response": "b", "question": q} for q in (None, "a")]
    file = tmp_path / f"mine.{ending}"
    cells = "prompt,response,question\nx,b,\nx,b,a\n"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(cells if ending == "csv" else lines)
    read = read_demonstrations(str(file), "skip", "auto", {"prompt": "question"})
    assert read.rows == (Demonstration(turns("a"), "b"),)
    assert read.left_out.total() == 1
    with pytest.raises(DataError) as error:
        read_demonstrations(str(file), "skip", "auto", {"prompt": "quesiton"})
    assert str(error.value) == (
        f"{file}: data.columns.prompt is 'quesiton', which no row has; its columns are "
        "'prompt', 'response', 'question'"
    )


def test_other_names_of_a_table_s_columns(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("question,answer\r\na,b\r\n", newline="")
    names = {"instruction": "question", "output": "answer"}
    read = read_demonstrations(str(file), "stop", "auto", names)
    assert read.rows == (Demonstration(turns("a"), "b"),)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_name_for_an_optional_column_that_no_row_has(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"mine.{ending}"
    rows = [PAIR, PAIR | {"strength": 2}]  # not in the first row of the file of lines
    cells = "prompt,chosen,rejected,strength\np,b,c,\np,b,c,2\n"
    file.write_text(cells if ending == "csv" else "".join(json.dumps(row) + "\n" for row in rows))
    read = read_preferences(str(file), "stop", "auto", {"margin": "strength"})
    assert [pair.margin for pair in read.rows] == [None, 2.0]
    with pytest.raises(DataError) as error:
        read_preferences(str(file), "stop", "auto", {"margin": "strenght"})
    assert str(error.value) == (
        f"{file}: data.columns.margin is 'strenght', which no row has; its columns are 'prompt', "
        "'chosen', 'rejected', 'strength'"
    )
    # A name that demonstrations alone need is of no concern to pairs.
    formats: tuple[Any, ...] = ("auto", "tldr")
    for format in formats:
        columns = {"response": "answer"}
        assert len(read_preferences(str(file), "stop", format, columns)) == 2


@pytest.mark.parametrize("read", [read_demonstrations, read_preferences, read_prompts])
def test_a_null_score_does_not_hide_the_form(read: Any, jsonl: Jsonl) -> None:
    scored = [HELP | {"response": str(i), "helpfulness": i or None} for i in range(3)]
    source = jsonl(*scored)
    with pytest.raises(DataError, match=r"line 1: field 'helpfulness' is missing"):
        read_preferences(source, "stop")
    assert read_preferences(source, "skip").rows == (Preference(turns("Hi"), "2", "1", 1.0),)
    assert read(source, "skip") == read(source, "skip", "helpsteer")
    # Where no row has a score, it is no form of scored responses.
    rows = jsonl(*(row | {"helpfulness": None} for row in scored))
    assert len(read_demonstrations(rows, "stop")) == 3


def test_numbers_of_a_csv_file(tmp_path: Path) -> None:
    """Its cells are text: a margin, and labels."""
    file = tmp_path / "mine.csv"
    file.write_text('prompt,chosen,rejected,margin\na,"b, ""c""\nd",e,1.5\n\na,b,e,\n')
    assert read_preferences(str(file), "stop").rows == (
        Preference(turns("a"), 'b, "c"\nd', "e", 1.5),
        Preference(turns("a"), "b", "e", None),
    )
    assert read_preferences(str(file), "stop").numbers == (2, 5)
    file.write_text("prompt,completion,label\na,b,True\na,c,0\n")
    assert read_preferences(str(file), "stop").rows == (Preference(turns("a"), "b", "c"),)


def test_a_column_that_the_form_does_not_read(make_config: MakeConfig) -> None:
    make_config(columns={"prompt": "question"})
    with pytest.raises(ConfigError) as error:
        make_config(format="alpaca", columns={"prompt": "question"})
    assert str(error.value) == (
        "data.columns.prompt is 'question'; allowed: one that data.format=alpaca reads: input, "
        "instruction, output"
    )
    with pytest.raises(ConfigError, match=r"text, title; did you mean data.columns.conversations"):
        make_config(columns={"conversation": "turns"})
    with pytest.raises(ConfigError, match=r"^data\.columns is \{'prompt': 3\}"):
        make_config(columns={"prompt": 3})


def test_our_own_form_goes_before_all_others(jsonl: Jsonl) -> None:
    """Wherever among the first rows it stands, as in files of several forms."""
    both = {"prompt": "p", "response": "r", "instruction": "i", "output": "o", "text": "t"}
    assert read_demonstrations(jsonl(both), "stop").rows == (Demonstration(turns("p"), "r"),)
    source = jsonl({"text": "t"}, both)
    assert read_demonstrations(source, "skip").rows == (Demonstration(turns("p"), "r"),)


OWN = """
def turns(row):
    if row["skip"]:
        return None
    return [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]

def pair(row):
    return {"prompt": row["q"], "chosen": row["a"], "rejected": "007", "margin": row["n"]}

def broken(row):
    return row["nothing"]

def number(row):
    return 5
"""


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_format_of_one_s_own(ending: str, tmp_path: Path, make_config: MakeConfig) -> None:
    """A function turns each row into turns or into columns of the package's own."""
    (tmp_path / "own.py").write_text(OWN)
    file, own = tmp_path / f"mine.{ending}", f"{tmp_path / 'own.py'}:"
    rows = [{"q": "NA", "a": "1e5", "skip": None, "n": 2}, {"q": "q", "a": "b", "skip": "yes",
             "n": 0.5}]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(lines if ending == "jsonl" else "q,a,skip,n\nNA,1e5,,2\nq,b,yes,0.5\n")
    found = read_demonstrations(str(file), "stop", f"{own}turns")
    assert found.rows == (Demonstration(turns("NA"), "1e5"),)
    assert found.left_out == {"the function of data.format returns None": 1}
    (prompt,) = read_prompts(str(file), "stop", f"{own}turns").rows
    assert (prompt.columns["prompt"], prompt.columns["a"]) == ("NA", "1e5")
    pairs = read_preferences(str(file), "stop", f"{own}pair").rows
    assert pairs == (Preference(turns("NA"), "1e5", "007", 2.0),
                     Preference(turns("q"), "b", "007", 0.5))  # fmt: skip
    config = make_config(format=f"{own}pair", preferences=Split(train=str(file), val=None))
    assert len(load("preferences", config, 0).train) == 1
    number = 1 if ending == "jsonl" else 2
    where = rf"mine\.{ending}, line {number}: the function of data\.format "
    with pytest.raises(DataError, match=where + r"fails \(KeyError\('nothing'\)\)"):
        read_demonstrations(str(file), "stop", f"{own}broken")
    with pytest.raises(DataError, match=where + r"returns no row \(found int; allowed: a list"):
        read_demonstrations(str(file), "stop", f"{own}number")
    with pytest.raises(ConfigError, match=r"data\.format is .* has no function 'missing'"):
        read_demonstrations(str(file), "stop", f"{own}missing")
    config = make_config(format="gone.py:f", preferences=Split(train=str(file), val=None))
    with pytest.raises(ConfigError, match=r"data\.format is 'gone\.py:f'; there is no file"):
        check_sources(config, "preferences")


def test_a_function_that_a_folder_names_is_not_run(tmp_path: Path, jsonl: Jsonl) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    with code_of_command(), pytest.raises(ConfigError, match=r"data\.format is .*a folder names"):
        read_prompts(jsonl({"prompt": "a"}), "stop", f"{tmp_path / 'own.py'}:turns")


def test_texts_are_held_out_one_by_one(make_config: MakeConfig, tmp_path: Path) -> None:
    """All of them have the same prompt, none."""
    file = tmp_path / "mine.txt"
    file.write_text("".join(f"text {i}\n\n" for i in range(20)))
    config = make_config(demonstrations=Split(train=str(file), val=None), val_fraction=0.25)
    split = load_demonstrations(config, seed=0)
    assert (len(split.train), len(split.val)) == (15, 5)
    assert split.train.numbers[0] % 2 == 1  # every other line is blank
