"""Rows in the true forms of well-known data sets, and rows that cannot be used, by hand."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.core.errors import ConfigError, DataError
from lightning_rlhf.data.config import DataConfig, Split
from lightning_rlhf.data.readers import load, read
from lightning_rlhf.data.rows import UNPAIRED, Demonstration, Label, Message, Messages, Preference
from lightning_rlhf.io.user_code import code_of_command

Jsonl = Callable[..., str]
MakeConfig = Callable[..., DataConfig]
SFT, RM, PPO = "demonstrations", "preferences", "prompts"


def turns(*contents: str) -> Messages:
    """User and assistant in turn, the user first."""
    return tuple(Message("assistant" if i % 2 else "user", c) for i, c in enumerate(contents))


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns(*contents)]


def human(*contents: Any) -> list[dict[str, Any]]:
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
HH = "\n\nHuman: Hi\n\nAssistant: Hello.\nWho?\n\nHuman: Bob. And you?\n\nAssistant:"
HH_READ = turns("Hi", "Hello.\nWho?", "Bob. And you?")
SHP = {"history": "Why?", "human_ref_A": "A", "human_ref_B": "B", "score_A": 8, "score_ratio": 4.0}
PAIR = {"prompt": "p", "chosen": "b", "rejected": "c"}
ULTRA = {"prompt": "a", "chosen": chat("a", "b"), "rejected": chat("a", "c"),
         "score_chosen": 8.5, "score_rejected": 6.0}  # fmt: skip
HELP = {"prompt": "Hi", "response": "x", "helpfulness": 1, "verbosity": 1}
POST = {"subreddit": "tifu", "title": "Oh", "post": "It rained."}
POST_READ = "SUBREDDIT: r/tifu\n\nTITLE: Oh\n\nPOST: It rained.\n\nTL;DR:"
OLD = {"info": POST | {"id": "t3_x"}, "summaries": [{"text": " A", "note": "x"}, {"text": "B"}],
       "choice": 1, "worker": "w"}  # fmt: skip
STEER = "One\n<extra_id_1>Assistant\nTwo\n<extra_id_1>User\nThree"
DEMONSTRATIONS: list[tuple[str, dict[str, Any], Messages, str]] = [
    ("native", {"prompt": "a", "response": " b "}, turns("a"), " b "),
    ("native", {"prompt": chat("a", "b", "c"), "response": chat("", "d")[1:]}, turns(*"abc"), "d"),
    ("native", {"messages": HH + " Ann. "}, HH_READ, "Ann."),
    # An empty input is no input; other columns are not read.
    ("alpaca", {"instruction": "é.", "input": "", "output": "é", "text": "B"}, turns("é."), "é"),
    ("alpaca", {"instruction": "Add.", "input": "1, 2", "output": "3"}, turns("Add.\n\n1, 2"), "3"),
    # A dialogue that begins with the model, has a tool, and ends on a human turn.
    ("sharegpt", {"conversations": [{"from": "system", "value": "Be kind."}, *human("", "x")[1:],
     *human(*"ab"), {"from": "tool", "value": "c"}, *human("", "d", "e")[1:]]},
     (SYSTEM, *turns("a", "b"), Message("tool", "c")), "d"),
    ("messages", {"messages": TOOLS}, TOOLS_READ, "Noon."),
    # Two turns of the user, the first of which nobody answers.
    ("hh", {"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "x"},
     (Message("user", "a"), Message("user", "b")), "c"),
    ("ultrafeedback", ULTRA | {"prompt": "a "}, turns("a"), "b"),
    ("shp", SHP | {"labels": 0}, turns("Why?"), "B"),
    ("tldr", POST | {"summary": " Rain."}, turns(POST_READ), "Rain."),
    ("helpsteer", HELP | {"prompt": STEER}, turns("One", "Two", "Three"), "x"),
    ("kto", {"prompt": chat("a"), "completion": chat("", "b")[1:], "label": 1}, turns("a"), "b"),
    ("text", {"text": "Once, 中."}, (), "Once, 中."),
]  # fmt: skip
PREFERENCES: list[tuple[str, dict[str, Any], Messages, tuple[Any, ...]]] = [
    ("hh", {"chosen": HH + " Ann.", "rejected": HH + " Eve."}, HH_READ, ("Ann.", "Eve.", None)),
    # Some copies of the HH data have the dialogue in a column of its own.
    ("hh", {"prompt": HH, "chosen": " Ann.", "rejected": " E"}, HH_READ, (" Ann.", " E", None)),
    ("native", PAIR | {"margin": 0.5}, turns("p"), ("b", "c", 0.5)),
    ("native", PAIR | {"margin": -1}, turns("p"), ("b", "c", None)),
    ("ultrafeedback", ULTRA, turns("a"), ("b", "c", 2.5)),
    ("shp", SHP | {"labels": 1}, turns("Why?"), ("A", "B", math.log(4))),
    ("tldr", OLD, turns(POST_READ), ("B", " A", None)),
    ("helpsteer",
     {"prompt": "p", "response_1": "b", "response_2": "c", "preference_strength": -2},
     turns("p"), ("b", "c", 2.0)),
    ("helpsteer",
     {"context": chat("p"), "response1": "b", "response2": "c", "overall_preference": 1},
     turns("p"), ("c", "b", 1.0)),
]  # fmt: skip
PROMPTS: list[tuple[str, dict[str, Any], Messages, int]] = [
    ("native", {"prompt": "1 + 1?", "answer": 2, "note": None}, turns("1 + 1?"), 2),
    ("native", {"messages": chat("a", "b", "c", "d"), "id": 7}, turns("a", "b", "c"), 1),
    ("sharegpt", {"conversations": human("a", "b", "c", "d")}, turns("a", "b", "c"), 1),
    ("helpsteer", HELP, turns("Hi"), 1),
    ("text", {"text": "a"}, turns("a"), 2),
]  # fmt: skip


@pytest.mark.parametrize(("format", "row", "prompt", "response"), DEMONSTRATIONS)
def test_demonstrations(
    format: str, row: dict[str, Any], prompt: Messages, response: str, jsonl: Jsonl
) -> None:
    """By the name of the form, and by the columns alone."""
    for by in (format, "auto"):
        assert read(SFT, jsonl(row), "stop", by).rows == (Demonstration(prompt, response),)


@pytest.mark.parametrize(("format", "row", "prompt", "answers"), PREFERENCES)
def test_preferences(
    format: str, row: dict[str, Any], prompt: Messages, answers: Any, jsonl: Jsonl
) -> None:
    assert read(RM, jsonl(row), "stop", format).rows == (Preference(prompt, *answers),)


@pytest.mark.parametrize(("format", "row", "prompt", "kept"), PROMPTS)
def test_prompts(
    format: str, row: dict[str, Any], prompt: Messages, kept: int, jsonl: Jsonl
) -> None:
    """Two equal rows are two prompts unless they hold answers; other columns stay."""
    found = read(PPO, jsonl(row, row), "stop", format)
    assert {one.prompt for one in found.rows} == {prompt}
    assert len(found) == kept
    assert found.left_out.total() == 2 - kept
    columns = found.rows[0].columns
    assert columns["messages"] == [turn.as_dict() for turn in prompt]
    assert {k: columns[k] for k in row if k not in ("prompt", "messages")} == {
        k: v for k, v in row.items() if k not in ("prompt", "messages")
    }


def test_scored_responses_to_a_prompt_are_paired(jsonl: Jsonl) -> None:
    """Of a, b, c with 4, 1, 4 the pairs are a > b and c > b; e has nothing to be compared with."""
    rows = [("Hi", "a", 4), ("Ho", "e", 2), ("Hi", "b", 1), ("Hi", "c", 4)]
    source = jsonl(*(HELP | {"prompt": p, "response": r, "helpfulness": s} for p, r, s in rows))
    found = read(RM, source, "stop")
    assert found.rows == (
        Preference(turns("Hi"), "a", "b", 3.0),
        Preference(turns("Hi"), "c", "b", 3.0),
    )
    assert (found.numbers, found.left_out) == ((1, 4), Counter({UNPAIRED: 1}))
    with pytest.raises(DataError, match=rf"holds no pair of responses: 1 {UNPAIRED}$"):
        read(RM, jsonl(HELP), "stop")


def test_labels_are_paired_and_bad_completions_are_not_imitated(jsonl: Jsonl) -> None:
    rows = [("p", "bad", False), ("p", "good", True), ("q", "fine", True)]
    source = jsonl(*({"prompt": p, "completion": c, "label": x} for p, c, x in rows))
    pairs = read(RM, source, "stop")
    assert pairs.rows == (Preference(turns("p"), "good", "bad", None),)
    assert (pairs.numbers, pairs.left_out) == ((2,), Counter({UNPAIRED: 1}))
    found = read(SFT, source, "stop")
    assert [row.response for row in found.rows] == ["good", "fine"]
    assert found.left_out == Counter({"its label is false": 1})
    # For kto they stay single, in the package's own form as in that of TRL.
    expected = [Label(turns(p), c, x) for p, c, x in rows]
    found = read("labels", source, "stop")
    assert ([*found.rows], found.numbers) == (expected, (1, 2, 3))
    own = jsonl(*({"prompt": p, "response": c, "label": x} for p, c, x in rows))
    assert [*read("labels", own, "stop").rows] == expected
    assert read(RM, own, "stop").rows == pairs.rows


def test_pairs_are_taken_apart_for_kto(jsonl: Jsonl, make_config: MakeConfig) -> None:
    two = PAIR, PAIR | {"prompt": "a"}
    found = read("labels", jsonl(*two), "stop")
    sides = (("p", "b", True), ("p", "c", False), ("a", "b", True), ("a", "c", False))
    assert [*found.rows] == [Label(turns(p), c, x) for p, c, x in sides]
    assert found.numbers == (1, 1, 2, 2)
    # Both sides of a prompt are held out together.
    data = make_config(preferences=Split(train=jsonl(*two), val=None))
    for side in vars(load("labels", data, 0)).values():
        assert len({row.prompt for row in side.rows}) == 1
    # Graded responses have no label; they are compared first.
    graded = [HELP | {"response": text, "helpfulness": n} for text, n in (("x", 1), ("y", 3))]
    assert [row.response for row in read("labels", jsonl(*graded), "stop").rows] == ["y", "x"]
    row = {"prompt": "p", "response": "a"}
    with pytest.raises(DataError, match="has no row with the label False; allowed: responses with"):
        read("labels", jsonl(row | {"label": 1}), "stop")
    with pytest.raises(DataError, match="line 1: field 'label' is missing"):
        read("labels", jsonl(row), "stop")


def test_ties_are_left_out_and_do_not_stop(jsonl: Jsonl) -> None:
    tie = ULTRA | {"score_rejected": 8.5}
    found = read(RM, jsonl(tie, ULTRA), "stop")
    assert (found.numbers, found.left_out.total()) == ((2,), 1)
    # With a margin it is a file of the package's own.
    assert read(RM, jsonl(tie | {"margin": 3.0}), "stop").rows[0].margin == 3.0


def test_the_package_s_own_form_goes_before_others(jsonl: Jsonl) -> None:
    both = {"prompt": "p", "response": "r", "instruction": "i", "output": "o", "text": "t"}
    source = jsonl({"text": "t"}, both)
    assert read(SFT, source, "skip").rows == (Demonstration(turns("p"), "r"),)


BAD: list[tuple[str, str, Any, str]] = [
    (SFT, "native", {"prompt": "a", "response": "\ud83d"}, "holds half a surrogate pair"),
    (SFT, "native", {"prompt": "a", "response": "é" * 1_000_001}, "is longer than 1,000,000 chara"),
    (SFT, "native", {"messages": [*chat("a"), {"from": "gpt"}]},
     'a turn of \'messages\' is not {"role", "content"} (messages[1] has keys [\'from\''),
    (SFT, "native", {"messages": chat("a", " ")}, "empty or blank (messages[1].content)"),
    (SFT, "native", {"messages": [*chat("a"), TOOLS[0], *chat("b", "c")]}, "a system turn"),
    (SFT, "sharegpt", {"conversations": human("a")}, "no turn of the assistant answers one of the"),
    (SFT, "messages",
     {"messages": [*chat("a"), {"role": "assistant", "tool_calls": [{"f": 1}]}, *TOOLS[3:]]},
     "a call of a tool in 'messages' has no name (messages[1].tool_calls[0] is not"),
    (RM, "native", PAIR | {"rejected": "b "}, "chosen and rejected are identical"),
    # The same last turn, so that nothing but the earlier turn tells them apart.
    (RM, "hh", {"chosen": HH + " A", "rejected": HH.replace("Bob", "Rob") + " A"},
     "chosen and rejected differ before the last turn (turn 3 is not the same)"),
    (RM, "ultrafeedback", ULTRA | {"score_chosen": 1}, "score_chosen is below score_rejected"),
    ("labels", "native", {"prompt": "a", "response": "b", "label": "maybe"},
     "field 'label' is no label (found 'maybe'; allowed: true, false, 1, 0)"),
]  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "native": {"prompt": "x", "response": "y", "chosen": "y", "rejected": "z"},
    "sharegpt": {"conversations": human("x", "y")},
    "messages": {"messages": chat("x", "y")},
    "hh": {"prompt": "x", "chosen": "y", "rejected": "z"},
    "ultrafeedback": ULTRA,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "format", "row", "said"), BAD)
def test_bad_rows(kind: Any, format: str, row: Any, said: str, tmp_path: Path) -> None:
    """Named by file and line, of which the blank ones count; or left out and counted."""
    file = tmp_path / "mine.jsonl"
    good = json.dumps(GOOD[format]) + "\n\n"
    file.write_text(good + json.dumps(row) + "\n" + good)
    with pytest.raises(DataError) as error:
        read(kind, str(file), "stop", format)
    message = str(error.value)
    assert message.startswith(f"{file}, line 3: ")
    assert said in message
    assert message.endswith("data.on_bad_row=skip such rows are left out and counted")
    assert len(message.splitlines()) == 1
    assert read(kind, str(file), "skip", format).left_out.total() >= 1


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_other_names_of_columns(ending: str, tmp_path: Path) -> None:
    """A named column replaces that of the form, also where it is empty; one that is not there is
    refused, except where the kind of data does not need it."""
    rows = [{"prompt": "x", "answer": "b", "q": q} for q in (None, "a")]
    file = tmp_path / f"mine.{ending}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text("prompt,answer,q\nx,b,\nx,b,a\n" if ending == "csv" else lines)
    names = {"prompt": "q", "response": "answer"}
    found = read(SFT, str(file), "skip", "auto", names)
    assert (found.rows, found.left_out.total()) == ((Demonstration(turns("a"), "b"),), 1)
    (prompt,) = read(PPO, str(file), "skip", "auto", names).rows
    assert {"prompt": "a", "answer": "b", "q": "a"}.items() <= prompt.columns.items()
    alpaca = {"instruction": "q", "output": "answer"}
    assert read(SFT, str(file), "skip", "alpaca", alpaca).rows == found.rows
    with pytest.raises(DataError) as error:
        read(SFT, str(file), "skip", "auto", names | {"prompt": "quesiton"})
    assert str(error.value) == (
        f"{file}: data.columns.prompt is 'quesiton', which no row has; its columns are "
        "'prompt', 'answer', 'q'"
    )


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
    rows = [
        {"q": "NA", "a": "1e5", "skip": None, "n": 2},
        {"q": "q", "a": "b", "skip": "y", "n": 3},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(lines if ending == "jsonl" else "q,a,skip,n\nNA,1e5,,2\nq,b,y,3\n")
    found = read(SFT, str(file), "stop", f"{own}turns")
    assert found.rows == (Demonstration(turns("NA"), "1e5"),)
    assert found.left_out == {"the function of data.format returns None": 1}
    (prompt,) = read(PPO, str(file), "stop", f"{own}turns").rows
    assert (prompt.columns["prompt"], prompt.columns["a"]) == ("NA", "1e5")
    config = make_config(format=f"{own}pair", preferences=Split(train=str(file), val=None))
    loaded = load(RM, config, 0)
    assert {*loaded.train.rows, *loaded.val.rows} == {
        Preference(turns("NA"), "1e5", "007", 2.0), Preference(turns("q"), "b", "007", 3.0)
    }  # fmt: skip
    where = rf"mine\.{ending}, line {1 if ending == 'jsonl' else 2}: the function of data\.format "
    with pytest.raises(DataError, match=where + r"fails at own.py:11 \(KeyError\('nothing'\)\)"):
        read(SFT, str(file), "stop", f"{own}broken")
    with pytest.raises(DataError, match=where + "returns no row .found int; allowed: a list of"):
        read(SFT, str(file), "stop", f"{own}number")
    with code_of_command(), pytest.raises(ConfigError, match=r"data\.format is .*a folder names"):
        read(SFT, str(file), "stop", f"{own}turns")
