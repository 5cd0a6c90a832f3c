"""The form that is nearest to the columns of a source which no form fits, for its message."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from functools import partial

from lightning_rlhf.data.forms import AUTO, FORMS, Form, Format, Kind, fitting, forms_of, serving

_ALIKE = (
    {"prompt", "question", "query", "instruction", "request", "input", "problem"},
    {"response", "answer", "output", "completion", "reply", "solution"},
    {"chosen", "preferred", "better", "accepted"},
    {"rejected", "dispreferred", "worse"},
    {"messages", "conversations", "conversation", "dialogue", "dialog", "turns"},
    {"text", "content", "body", "document"},
)
"""Names that data sets give to the same column."""
_ALIKE_ENOUGH = 0.75
"""Likeness above which a column of the source is suggested for one of a form."""


def _likeness(column: str, name: str) -> float:
    """Return how alike two names of columns are, from 0 to 1."""
    if any({column, name.lower()} <= alike for alike in _ALIKE):
        return 1.0
    return difflib.SequenceMatcher(None, column.lower(), name.lower()).ratio()


def nearest(names: Collection[str], format: Format, kind: Kind) -> Form:
    """Return the form whose columns are most alike to `names`."""

    def alike(form: Form) -> float:
        ratios = [
            max((_likeness(column, name) for name in names), default=0.0)
            for column in form.needed(kind)
        ]
        return sum(ratios) / len(ratios)

    return max(forms_of(format, kind), key=alike)


def hint(names: Collection[str], kind: Kind) -> str:
    """Return what to do about a source with columns `names`, which its form does not fit."""
    if fits := fitting(names, AUTO, kind):
        return f"; its rows are of {fits.title}"
    if others := [form for form in FORMS if set(form.columns) <= set(names)]:
        found = max(others, key=lambda form: len(form.columns))
        return (
            f"; its rows are of {found.title}, which holds {' and '.join(found.parse)}, no {kind}; "
            f"{kind} are in data.format={', '.join(serving(kind))}"
        )
    near = nearest(names, AUTO, kind)
    lacking = [column for column in near.needed(kind) if column not in names]
    alike = {column: max(names, key=partial(_likeness, column)) for column in lacking}
    if all(_likeness(column, name) > _ALIKE_ENOUGH for column, name in alike.items()):
        maps = " ".join(f"data.columns.{column}={name}" for column, name in alike.items())
        return f"; the nearest is {near.title}: {maps} reads it as such"
    return (
        f"; the nearest is {near.title}; data.columns.{lacking[0]}=COLUMN names the column of the "
        f"source that is its {lacking[0]!r}"
    )
