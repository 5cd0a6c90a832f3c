"""Formats of rows: the columns of each, the function that reads it, and how one is found.

A function reads the columns of a row that have a value, for any kind of data. It returns the turns
of the prompt where prompts are read, and else a demonstration, a preference, whose chosen side is a
demonstration too, or a scored response. It raises BadRow for a row that cannot be used.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from lightning_rlhf.data import rows
from lightning_rlhf.io.user_code import FAULTS, place_of

Kind = Literal["demonstrations", "preferences", "prompts", "labels"]
Found = rows.Messages | rows.Demonstration | rows.Preference | rows.Scored
AUTO = "auto"
"""The format of the rows is found by their columns."""
NEEDS = {
    "demonstrations": 'stage=sft and ppo.ptx_coef > 0 need demonstrations {"prompt", "response"}',
    "preferences": 'stage=rm and stage=dpo need preference pairs {"prompt", "chosen", "rejected"}',
    "prompts": 'stage=ppo and stage=rank need prompts {"prompt"}',
    "labels": 'dpo.loss_type=kto needs {"prompt", "response", "label"}, or preference pairs',
}
"""Description of the data that each kind's stage needs, for errors."""
NATIVE = ("prompt", "response", "messages", "chosen", "rejected", "margin", "label")
"""Columns of the package's own forms."""
_ORDER: Mapping[Kind, tuple[str, ...]] = {
    "demonstrations": ("response", "chosen", "messages"),
    "preferences": ("chosen", "rejected"),
    "labels": ("chosen", "rejected"),
    "prompts": ("prompt", "messages", "chosen"),
}
"""Columns of the package's own forms that hold data of a kind, in the order of preference."""
_ALIKE = {
    "prompt": "question|instruction|query|input", "response": "answer|output|completion|reply",
    "chosen": "better|preferred|winner", "rejected": "reject|worse|dispreferred|loser",
}  # fmt: skip
"""Column -> the words that others name it by."""
TIE = "the two responses have the same score"
"""Reason for leaving out a pair without a preference."""
_STEER_TURN = re.compile(r"\n*<extra_id_1>(User|Assistant)\n")
"""Start of a turn after the first in a prompt of HelpSteer2."""
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_MODELS = ("gpt", "chatgpt", "bing", "bard", "model")
_SHAREGPT_ROLES = {"human": "user", "observation": "tool"} | dict.fromkeys(_MODELS, "assistant")
"""Names of ShareGPT for the roles of a dialogue, besides the roles themselves."""


def number_in(row: rows.Row, field: str) -> float:
    """Return the finite number in a field, also of a text such as "3.5", which a CSV file holds."""
    value = row.get(field)
    with suppress(TypeError, ValueError, OverflowError):
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        if math.isfinite(number):
            return number
    raise rows.BadRow(f"field '{field}' is not a number", f"found {str(value)[:40]!r}")


def flag_in(row: rows.Row, field: str) -> bool:
    """Return the value of a field that is true or false, 1 or 0, also as text."""
    text = str(row.get(field))
    if text.lower() not in _FLAGS:
        found = f"found {text[:40]!r}; allowed: true, false, 1, 0"
        raise rows.BadRow(f"field '{field}' is no label", found)
    return _FLAGS[text.lower()]


def native(row: rows.Row, kind: Kind) -> Found:
    """Read {"prompt"}, with "response", perhaps a "label", or with "chosen" and "rejected", whole
    dialogues {"chosen", "rejected"}, or {"messages"}."""
    order, are_compared = _ORDER[kind], kind in ("preferences", "labels")
    fields = [field for field in order if field in row]
    if are_compared and not fields and "label" in row and {"response", "completion"} & {*row}:
        return _kto(row, kind)
    if not fields or (are_compared and len(fields) < 2):
        is_single = kind == "labels" and "response" in row
        lacking = "label" if is_single else next(field for field in order if field not in fields)
        raise rows.missing(lacking, row, f"{kind} need it")
    if are_compared:
        chosen, rejected = (rows.split_last(rows.dialogue(row, side), side) for side in order)
        turns = enumerate(zip_longest(chosen.prompt, rejected.prompt), start=1)
        if differing := [number for number, (one, other) in turns if one != other]:
            where = f"turn {differing[0]} is not the same"
            raise rows.BadRow("chosen and rejected differ before the last turn", where)
        margin = -1.0
        with suppress(rows.BadRow):
            margin = number_in(row, "margin")
        strength = None if margin < 0 else margin
        return rows.Preference(chosen.prompt, chosen.response, rejected.response, strength)
    if fields[0] == "prompt":
        return rows.turns_in(row["prompt"], "prompt", "user")
    if fields[0] == "messages":
        return _messages(row, kind)
    return rows.split_last(rows.dialogue(row, fields[0]), fields[0])


def _messages(row: rows.Row, kind: Kind) -> Found:
    """Read OpenAI's {"messages": [{"role", "content"}, ...]}."""
    turns = rows.turns_in(row["messages"], "messages")
    return turns if kind == "prompts" else rows.split_last(turns, "messages")


def _alpaca(row: rows.Row, kind: Kind) -> Found:
    """Read {"instruction", "input", "output"}; an empty input is none."""
    text, given = rows.text_in(row, "instruction"), row.get("input", "")
    if not isinstance(given, str) or given.strip():
        text = f"{text}\n\n{rows.checked_text(given, 'input')}"
    prompt = (rows.Message("user", text),)
    return prompt if kind == "prompts" else rows.Demonstration(prompt, rows.text_in(row, "output"))


def _sharegpt(row: rows.Row, kind: Kind) -> Found:
    """Read {"conversations": [{"from", "value"}, ...]} from the first turn of the user on, and for
    demonstrations to the last of the assistant."""

    def renamed(turn: Any) -> Any:
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            return turn
        role = str(turn["from"]).lower()
        return {"role": _SHAREGPT_ROLES.get(role, role), "content": turn["value"]}

    value = row["conversations"]
    value = [*map(renamed, value)] if isinstance(value, list) else value
    turns = rows.turns_in(value, "conversations")
    roles = [turn.role for turn in turns]
    system = turns[:1] if roles[0] == "system" else ()
    start = roles.index("user") if "user" in roles else len(turns)
    if kind == "prompts":
        return (*system, *turns[start:])
    end = max((i + 1 for i, role in enumerate(roles) if role == "assistant"), default=0)
    if end <= start:
        raise rows.BadRow("no turn of the assistant answers one of the user")
    return rows.split_last((*system, *turns[start:end]), "conversations")


def _ultrafeedback(row: rows.Row, kind: Kind) -> Found:
    """Read {"prompt", "chosen", "rejected", "score_chosen", "score_rejected"}; the margin is the
    difference of the scores."""
    if kind == "prompts":
        return native(row, kind)
    if all(isinstance(row[side], list) and len(row[side]) > 1 for side in ("chosen", "rejected")):
        row = {key: value for key, value in row.items() if key != "prompt"}  # in the dialogues too
    if kind == "demonstrations":
        return rows.split_last(rows.dialogue(row, "chosen"), "chosen")
    margin = number_in(row, "score_chosen") - number_in(row, "score_rejected")
    if margin < 0:
        raise rows.BadRow("score_chosen is below score_rejected")
    if margin == 0:
        raise rows.UnusedRow(TIE)
    return native({**row, "margin": margin}, kind)


def _shp(row: rows.Row, kind: Kind) -> Found:
    """Read {"history", "human_ref_A", "human_ref_B", "labels", "score_ratio"}; labels 1: A is
    preferred; the margin is the logarithm of the ratio of the scores."""
    prompt = (rows.Message("user", rows.text_in(row, "history")),)
    if kind == "prompts":
        return prompt
    sides = (rows.text_in(row, "human_ref_A"), rows.text_in(row, "human_ref_B"))
    chosen, rejected = sides if flag_in(row, "labels") else sides[::-1]
    ratio = number_in(row, "score_ratio") if "score_ratio" in row else 0.0
    return rows.Preference(prompt, chosen, rejected, math.log(ratio) if ratio >= 1 else None)


def _tldr(row: rows.Row, kind: Kind) -> Found:
    """Read {"subreddit", "title", "post", "summary"}; or {"info": {the first three}, "summaries":
    [{"text"}, {"text"}], "choice"}; choice: position of the preferred summary.

    Source: the request of Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix B
    """
    post = row.get("info") if "summaries" in row else row
    if not isinstance(post, dict):
        raise rows.BadRow("field 'info' is no object", f"found {type(post).__name__}")
    subreddit, title, text = (rows.text_in(post, name) for name in ("subreddit", "title", "post"))
    name = f"r/{subreddit.removeprefix('r/')}"
    request = f"SUBREDDIT: {name}\n\nTITLE: {title}\n\nPOST: {text}\n\nTL;DR:"
    prompt = (rows.Message("user", request),)
    if kind == "prompts":
        return prompt
    if "summaries" not in row:
        return rows.Demonstration(prompt, rows.text_in(row, "summary").strip())
    summaries, choice = row["summaries"], flag_in(row, "choice")
    is_two = isinstance(summaries, list) and len(summaries) == 2
    if not is_two or not all(isinstance(summary, dict) for summary in summaries):
        raise rows.BadRow("field 'summaries' is not two objects {\"text\"}")
    chosen, rejected = (rows.text_in(summaries[i], "text") for i in (choice, not choice))
    return rows.Preference(prompt, chosen, rejected)


def _helpsteer(row: rows.Row, kind: Kind) -> Found:
    """Read {"prompt", "response", "helpfulness"}, or two responses and a preference, below 0 where
    the first is better."""
    if "response1" in row:
        prompt = rows.turns_in(row["context"], "context")
        sides, strength = ("response1", "response2"), "overall_preference"
    else:
        first, *rest = _STEER_TURN.split(rows.text_in(row, "prompt"))
        turns = [("user", first), *zip(map(str.lower, rest[::2]), rest[1::2], strict=True)]
        prompt = rows.turns_in([{"role": role, "content": text} for role, text in turns], "prompt")
        sides, strength = ("response_1", "response_2"), "preference_strength"
    rows.checked_prompt(prompt)
    if kind == "prompts":
        return prompt
    if kind == "demonstrations":
        return rows.Demonstration(prompt, rows.text_in(row, "response"))
    if "response" in row:
        helpfulness = number_in(row, "helpfulness")
        return rows.Scored(prompt, rows.text_in(row, "response"), helpfulness, is_graded=True)
    if (margin := number_in(row, strength)) == 0:
        raise rows.UnusedRow(TIE)
    chosen, rejected = (rows.text_in(row, side) for side in (sides if margin < 0 else sides[::-1]))
    return rows.Preference(prompt, chosen, rejected, abs(margin))


def _completion(row: rows.Row, kind: Kind, field: str = "completion") -> Found:
    """Read {"prompt", "completion"}, each a text or a list of messages."""
    if kind == "prompts":
        return native(row, kind)
    return rows.split_last(rows.dialogue(row, field), field)


def _kto(row: rows.Row, kind: Kind) -> Found:
    """Read {"prompt", "completion" or "response", "label"}; only true ones are demonstrations."""
    is_good = kind == "prompts" or flag_in(row, "label")
    if not is_good and kind == "demonstrations":
        raise rows.UnusedRow("its label is false")
    found = _completion(row, kind, "response" if "response" in row else "completion")
    if isinstance(found, rows.Demonstration) and kind in ("preferences", "labels"):
        return rows.Scored(found.prompt, found.response, float(is_good), is_graded=False)
    return found


def _text(row: rows.Row, kind: Kind) -> Found:
    """Read {"text"}: for demonstrations a text without a prompt, for prompts what the user asks."""
    text = rows.text_in(row, "text")
    return (rows.Message("user", text),) if kind == "prompts" else rows.Demonstration((), text)


@dataclass(frozen=True)
class Format:
    """Columns of a row, and the function that reads it; a name may have several."""

    name: str
    function: Callable[[rows.Row, Kind], Found]
    kinds: tuple[Kind, ...]
    """Kinds of data that the rows hold."""
    columns: tuple[str, ...]
    """Columns that a row must have."""
    also: tuple[str, ...]
    """Columns that are read where they are present."""
    prompt_columns: tuple[str, ...]
    """Columns that prompts are read from where the others are missing; empty: `columns`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return all columns that may be read."""
        return (*self.columns, *self.also, *(NATIVE if self.function is native else ()))

    def needed(self, kind: Kind) -> tuple[str, ...]:
        """Return the columns that a row must have for a kind of data."""
        return (self.prompt_columns if kind == "prompts" else ()) or self.columns

    def read(self, raw: rows.Row, kind: Kind) -> Any:
        """Return the record that a row holds. Raises BadRow if it holds none."""
        row = {column: value for column, value in raw.items() if value is not None}
        lacking = [column for column in self.needed(kind) if column not in row]
        if lacking and self.function is not native:  # which names the columns of all its forms
            columns = ", ".join(self.columns)
            raise rows.missing(lacking[0], row, f"data.format={self.name} ({columns}) is read")
        found = self.function(row, kind)
        if kind == "prompts":
            turns = found if isinstance(found, tuple) else found.prompt
            if turns and turns[-1].role == "assistant":
                turns = turns[:-1]
            others = {key: value for key, value in raw.items() if key not in ("prompt", "messages")}
            answers = {"response", "completion", "chosen", "messages", *self.columns} - {"prompt"}
            is_answered = not answers.isdisjoint(row.keys() - {*self.prompt_columns})
            columns_read = others | rows.prompt_row(turns)
            return rows.Prompt(rows.checked_prompt(turns), columns_read, is_answered)
        if isinstance(found, rows.Preference) and found.chosen.strip() == found.rejected.strip():
            raise rows.BadRow(rows.IDENTICAL)
        if isinstance(found, rows.Preference) and kind == "demonstrations":
            return rows.Demonstration(found.prompt, found.chosen)
        return found


_SFT: tuple[Kind, ...] = ("demonstrations", "prompts")
_COMPARED: tuple[Kind, ...] = ("preferences", "labels")
_RM: tuple[Kind, ...] = (*_COMPARED, "prompts")
_ALL: tuple[Kind, ...] = get_args(Kind)
_PROMPTS: tuple[Kind, ...] = ("prompts",)
_POST, _SCORES = "subreddit title post", "score_chosen score_rejected"
# Columns of a row: those that it must have, those that are also read, and those that prompts need.
FORMATS = tuple(
    Format(name, function, kinds, tuple(columns.split()), tuple(also.split()), tuple(asked.split()))
    for name, function, kinds, columns, also, asked in (
        ("native", native, _SFT, "prompt response", "", ""),
        ("native", native, _SFT, "messages", "", ""),
        ("native", native, _ALL, "chosen rejected", "margin", ""),
        ("native", native, _COMPARED, "prompt response label", "", ""),
        ("native", native, _SFT, "chosen", "", ""),
        ("native", native, _PROMPTS, "prompt", "", ""),
        ("alpaca", _alpaca, _SFT, "instruction output", "input", "instruction"),
        ("sharegpt", _sharegpt, _SFT, "conversations", "", ""),
        ("messages", _messages, _SFT, "messages", "", ""),
        ("hh", native, _ALL, "chosen rejected", "margin", ""),
        ("ultrafeedback", _ultrafeedback, _ALL, f"chosen rejected {_SCORES}", "prompt", "prompt"),
        ("shp", _shp, _ALL, "history human_ref_A human_ref_B labels", "score_ratio", ""),
        ("tldr", _completion, _SFT, "prompt completion", "", "prompt"),
        ("tldr", native, _ALL, "prompt chosen rejected", "margin", ""),
        ("tldr", _tldr, _RM, "info summaries choice", "", ""),
        ("tldr", _tldr, _SFT, f"{_POST} summary", "", _POST),
        ("helpsteer", _helpsteer, _ALL, "prompt response helpfulness", "", "prompt"),
        ("helpsteer", _helpsteer, _RM, "prompt response_1 response_2 preference_strength", "", ""),
        ("helpsteer", _helpsteer, _RM, "context response1 response2 overall_preference", "", ""),
        ("kto", _kto, _ALL, "prompt completion label", "", "prompt"),
        ("prompt_completion", _completion, _SFT, "prompt completion", "", "prompt"),
        ("text", _text, _SFT, "text", "", "text"),
    )
)
"""All formats. Where a row has the columns of several, the package's own come first, then those
with the most columns; but before the package's own those that have its columns and further ones,
unless the row has a `margin`, which is the package's own."""
NAMES = tuple(dict.fromkeys(form.name for form in FORMATS))


def formats_of(name: str, kind: Kind | None = None) -> list[Format]:
    """Return the formats of a name that hold data of a kind, or of any.

    Those of a function are the package's own.
    """
    name = "native" if ":" in name else name
    named = [form for form in FORMATS if name in (AUTO, form.name)]
    return [form for form in named if kind is None or kind in form.kinds]


def fitting(columns: Collection[str], name: str, kind: Kind) -> Format | None:
    """Return the format of a row with these columns; None if none fits."""
    fit = [form for form in formats_of(name, kind) if {*form.needed(kind)} <= {*columns}]
    best = max(fit, key=lambda form: (form.name == "native", len(form.columns)), default=None)
    if best is None or best.name != "native" or "margin" in columns:
        return best
    whole = [form for form in fit if form.function is not native and {*form.columns} <= {*columns}]
    further = [form for form in whole if {*best.columns} < {*form.columns}]
    return max(further, key=lambda form: len(form.columns), default=best)


def hint(columns: Collection[str], kind: Kind, lacks: str) -> str:
    """Return the forms nearest to a source without the column `lacks`, and how it is read so."""
    plain = tuple(dict.fromkeys(("prompt", *_ORDER[kind][: 1 + (kind in _COMPARED)])))
    others = [f for f in formats_of(AUTO, kind) if f.function is not native or "label" in f.columns]
    forms = [replace(FORMATS[0], columns=plain), *others]
    forms.sort(key=lambda f: -len({*f.needed(kind)} & {*columns}) / len(f.needed(kind)))
    near = " or ".join(f"{form.name} ({', '.join(form.needed(kind))})" for form in forms[:3])
    words, free = "", [column for column in columns if column not in (*forms[0].reads, *NATIVE)]
    for ours in [c for c in forms[0].needed(kind) if c not in columns] or [lacks] if free else ():
        like = re.compile(rf"({ours}|{_ALIKE.get(ours, ours)})(s|_text)?", re.IGNORECASE)
        words += f" data.columns.{ours}={next(filter(like.fullmatch, free), 'NAME')}"
    return f"; data.format=auto reads {kind} as {near}{words and f'; read yours with{words}'}"


def own_row(function: Callable[[dict[str, Any]], Any], row: rows.Row) -> rows.Row:
    """Return the row in the package's own form that a user's function makes of a row.

    The function returns the turns of a dialogue, a dictionary with some columns of NATIVE, or None
    for a row to leave out; other columns stay.
    """
    try:
        found = function(dict(row))
    except FAULTS as error:
        place = place_of(error, function)
        raise rows.BadRow(f"the function of data.format fails{place}", repr(error)[:200]) from error
    if found is None:
        raise rows.UnusedRow("the function of data.format returns None")
    if not isinstance(found, dict | list):
        allowed = f"found {type(found).__name__}; allowed: a list of messages, a dictionary, None"
        raise rows.BadRow("the function of data.format returns no row", allowed)
    others = {key: value for key, value in row.items() if key not in NATIVE}
    return others | ({"messages": found} if isinstance(found, list) else found)
