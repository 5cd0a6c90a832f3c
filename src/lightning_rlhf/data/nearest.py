"""The form that is nearest to the columns of a source which no form fits, for its message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from lightning_rlhf.data.forms import AUTO, FORMS, Form, Format, Kind, fitting, forms_of, serving

_ALIKE = (
    {"prompt", "question", "query", "instruction", "request", "input", "problem"},
    {"response", "answer", "output", "completion", "reply", "solution"},
    {"chosen", "preferred", "better", "accepted", "winner", "good", "chosen_response"},
    {"rejected", "dispreferred", "worse", "loser", "bad", "rejected_response"},
    {"messages", "conversations", "conversation", "dialogue", "dialog", "turns"},
    {"text", "content", "body", "document"},
)
"""Names that data sets give to the same column."""
_ALIKE_ENOUGH = 0.75
"""Likeness, from 0 to 1, from which a column of the source is suggested for one of a form."""
_PLAIN = (("prompt",), ("prompt", "response"), ("chosen", "rejected"))
"""Columns of the forms that are suggested where no column of the source is alike to any."""
_SHARED = {"prompt", "chosen"}
"""Columns that rows of several kinds have, by which alone a form is not recognised."""


def closest(column: str, names: Collection[str]) -> str | None:
    """Return the name that is spelled most like a column, else the first that data sets use for it.

    None where there is none.
    """
    small = {name.lower(): name for name in names}
    if close := difflib.get_close_matches(column.lower(), small, n=1, cutoff=_ALIKE_ENOUGH):
        return small[close[0]]
    alike = {name for group in _ALIKE if column.lower() in group for name in group}
    return next((name for name in names if name.lower() in alike), None)


def _columns(form: Form, kind: Kind) -> list[str]:
    """Return the columns that a form needs, and the prompt where it may be a column too."""
    needed = form.needed(kind)
    return [*needed, *(name for name in ("prompt",) if name in form.also and name not in needed)]


def _renamed(columns: Sequence[str], names: Collection[str]) -> Mapping[str, str]:
    """Return, for columns that are not among `names`, the name that is alike, each name once."""
    free = [name for name in names if name not in columns]
    found = {}
    for column in columns:
        if column not in names and (name := closest(column, free)) is not None:
            found[column] = name
            free.remove(name)
    return found


def nearest(names: Collection[str], format: Format, kind: Kind) -> Form:
    """Return the form with most of its columns, or names alike to them, among `names`."""

    def found_less_missing(form: Form) -> int:
        columns = _columns(form, kind)
        found = {*(column for column in columns if column in names), *_renamed(columns, names)}
        if not found and form.columns not in _PLAIN:
            return -len(names) - len(_ALIKE)
        return len(found) - sum(column not in found for column in form.needed(kind))

    return max(forms_of(format, kind), key=found_less_missing)


def hint(names: Collection[str], kind: Kind) -> str:
    """Return what to do about a source with columns `names`, which its form does not fit."""
    if fits := fitting(names, AUTO, kind):
        return f"; its rows are of {fits.title}"
    near = nearest(names, AUTO, kind)
    renamed = _renamed(_columns(near, kind), names)
    lacking = [name for name in near.needed(kind) if name not in (*names, *renamed)]
    if lacking and (other := _of_another_kind(names)):
        form, word = other
        return (
            f"; its rows are {word} {form.title}, which holds {' and '.join(form.parse)}, no "
            f"{kind}; {kind} are in data.format={', '.join(serving(kind))}"
        )
    maps = [_override(column, name) for column, name in renamed.items()]
    maps += [f"data.columns.{name}=COLUMN" for name in lacking]
    return f"; the nearest is {near.title}: {' '.join(maps)} reads it as such"


def _of_another_kind(names: Collection[str]) -> tuple[Form, str] | None:
    """Return the form whose columns, or names alike to them, are all there, with "of" or "like".

    The form is of another kind of data than the one that no form fits. None where there is none.
    """
    found = []
    for form in FORMS:
        renamed = _renamed(form.columns, names)
        is_shared = len(names) > 1 and set(form.columns) <= _SHARED
        if not is_shared and set(form.columns) <= {*names, *renamed}:
            found.append((form, "like" if renamed else "of"))
    return max(found, key=lambda one: (one[1] == "of", len(one[0].columns)), default=None)


def _override(column: str, name: str) -> str:
    """Return the override that reads a column of the source as one of the form, for a shell."""
    if re.fullmatch(r"[\w-]+", name):
        return f"data.columns.{column}={name}"
    return f"""'data.columns.{column}="{name}"'"""
