"""Forms of rows: the columns that each has, the stages that it serves, and how one is found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data import comparisons, instructions, native
from lightning_rlhf.data.parsing import Row, has, missing

Kind = Literal["demonstrations", "preferences", "prompts"]
Parse = Callable[[Any], Any]
"""Function from a row to a record."""
Format = Literal[
    "auto", "native", "alpaca", "sharegpt", "messages", "hh", "ultrafeedback", "shp", "tldr",
    "helpsteer", "kto", "prompt_completion", "text",
]  # fmt: skip
AUTO: Format = "auto"
"""The format of the rows is found by their columns."""
NEEDS: Mapping[Kind, str] = {
    "demonstrations": (
        'stage=sft, and stage=ppo with ptx_coef > 0, need demonstrations {"prompt", "response"}'
    ),
    "preferences": 'stage=rm and stage=dpo need preference pairs {"prompt", "chosen", "rejected"}',
    "prompts": 'stage=ppo and stage=rank need prompts {"prompt"}',
}
"""Description of the data that each kind's stage needs, for errors."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Columns of a row, and the functions that parse it; a format may have several forms."""

    format: Format
    columns: tuple[str, ...]
    """Columns that a row must have."""
    also: tuple[str, ...] = ()
    """Columns that are read where they are present."""
    parse: Mapping[Kind, Parse]
    """Kind of data -> function from a row to a record, for the kinds that the form holds."""
    is_scored: bool = False
    """True if preferences are parsed as `Scored`, to be paired with others of the same prompt."""
    prompt_columns: tuple[str, ...] = ()
    """Columns that prompts are parsed from where the others are missing; empty: `columns`."""

    @property
    def title(self) -> str:
        """Return the format and its columns, for errors."""
        return f"data.format={self.format} ({', '.join(self.columns)})"

    def needed(self, kind: Kind) -> tuple[str, ...]:
        """Return the columns that a row must have for a kind of data."""
        return self.prompt_columns or self.columns if kind == "prompts" else self.columns

    def optional(self, kind: Kind) -> tuple[str, ...]:
        """Return the columns that a row of a kind may lack, and that belong to no other form."""
        if self.parse[kind] is not _NATIVE[kind]:
            return self.also
        return ("margin",) if kind == "preferences" else ()

    def read(self, kind: Kind, row: Row) -> Any:
        """Return the record that a row holds. Raises BadRow if it holds none."""
        parse = self.parse[kind]
        if parse is not _NATIVE[kind]:  # which names the columns of all its forms
            for column in self.needed(kind):
                if not has(row, column):
                    raise missing(column, row, f"{self.title} is read")
        return parse(row)

    def is_answered(self, row: Row) -> bool:
        """Return whether a row holds more than a prompt; several rows may then share the prompt."""
        if self.parse["prompts"] is _NATIVE["prompts"]:
            return native.is_answered(row)
        return any(has(row, name) for name in self.columns if name not in self.prompt_columns)


_NATIVE: dict[Kind, Parse] = {
    "demonstrations": native.parse_demonstration,
    "preferences": native.parse_preference,
    "prompts": native.parse_prompt,
}


def _native(format: Format, columns: tuple[str, ...], *kinds: Kind) -> Form:
    return Form(
        format=format,
        columns=columns,
        also=(*native.DEMONSTRATION_FIELDS, *native.PREFERENCE_FIELDS),
        parse={kind: _NATIVE[kind] for kind in kinds},
    )


def _form(format: Format, *columns: str, parse: Mapping[Kind, Parse], **fields: Any) -> Form:
    return Form(format=format, columns=columns, parse=parse, **fields)


_COMPLETIONS: Mapping[Kind, Parse] = {
    "demonstrations": instructions.completion_demonstration,
    "prompts": native.parse_prompt,
}
FORMS: tuple[Form, ...] = (
    _native("native", ("prompt", "response"), "demonstrations", "prompts"),
    _native("native", ("messages",), "demonstrations", "prompts"),
    _native("native", ("chosen", "rejected"), "demonstrations", "preferences", "prompts"),
    _native("native", ("chosen",), "demonstrations", "prompts"),
    _native("native", ("prompt",), "prompts"),
    _form("alpaca", "instruction", "output", also=("input",), prompt_columns=("instruction",),
          parse={"demonstrations": instructions.alpaca_demonstration,
                 "prompts": instructions.alpaca_prompt}),
    _form("sharegpt", "conversations",
          parse={"demonstrations": instructions.sharegpt_demonstration,
                 "prompts": instructions.sharegpt_prompt}),
    _form("messages", "messages",
          parse={"demonstrations": instructions.messages_demonstration,
                 "prompts": instructions.messages_prompt}),
    _native("hh", ("chosen", "rejected"), "demonstrations", "preferences", "prompts"),
    _form("ultrafeedback", "chosen", "rejected", "score_chosen", "score_rejected", also=("prompt",),
          prompt_columns=("prompt",),
          parse={"demonstrations": comparisons.ultrafeedback_demonstration,
                 "preferences": comparisons.ultrafeedback_preference,
                 "prompts": native.parse_prompt}),
    _form("shp", "history", "human_ref_A", "human_ref_B", "labels", also=("score_ratio",),
          parse={"demonstrations": comparisons.shp_demonstration,
                 "preferences": comparisons.shp_preference,
                 "prompts": comparisons.shp_prompt}),
    _form("tldr", "prompt", "completion", prompt_columns=("prompt",), parse=_COMPLETIONS),
    _native("tldr", ("prompt", "chosen", "rejected"), "demonstrations", "preferences", "prompts"),
    _form("tldr", "info", "summaries", "choice",
          parse={"preferences": comparisons.tldr_preference,
                 "prompts": comparisons.tldr_compared_prompt}),
    _form("tldr", "subreddit", "title", "post", "summary",
          prompt_columns=("subreddit", "title", "post"),
          parse={"demonstrations": comparisons.tldr_demonstration,
                 "prompts": comparisons.tldr_prompt}),
    _form("helpsteer", "prompt", "response", "helpfulness",
          is_scored=True, prompt_columns=("prompt",),
          parse={"demonstrations": comparisons.helpsteer_demonstration,
                 "preferences": comparisons.helpsteer_scored,
                 "prompts": comparisons.helpsteer_prompt}),
    _form("helpsteer", "prompt", "response_1", "response_2", "preference_strength",
          parse={"preferences": comparisons.helpsteer2_preference,
                 "prompts": comparisons.helpsteer_prompt}),
    _form("helpsteer", "context", "response1", "response2", "overall_preference",
          parse={"preferences": comparisons.helpsteer3_preference,
                 "prompts": comparisons.helpsteer3_prompt}),
    _form("kto", "prompt", "completion", "label", is_scored=True, prompt_columns=("prompt",),
          parse={"demonstrations": comparisons.kto_demonstration,
                 "preferences": comparisons.kto_scored,
                 "prompts": native.parse_prompt}),
    _form("prompt_completion", "prompt", "completion", prompt_columns=("prompt",),
          parse=_COMPLETIONS),
    _form("text", "text", prompt_columns=("text",),
          parse={"demonstrations": instructions.text_demonstration,
                 "prompts": instructions.text_prompt}),
)  # fmt: skip
"""All forms. Where a row has the columns of several, the package's own come first, then those with
the most columns; but before the package's own those that have its columns and further ones, unless
the row has a `margin`, which is the package's own."""


def forms_of(format: Format, kind: Kind) -> list[Form]:
    """Return the forms of a format that hold data of a kind."""
    return [form for form in FORMS if format in (AUTO, form.format) and kind in form.parse]


def columns_of(format: Format) -> list[str]:
    """Return the columns that a format reads, those that a form must have first."""
    forms = [form for form in FORMS if format in (AUTO, form.format)]
    columns = [column for form in forms for column in form.columns]
    return list(dict.fromkeys([*columns, *(column for form in forms for column in form.also)]))


def check_serves(format: Format, kind: Kind, key: str) -> None:
    """Raise DataError unless the format holds data of the kind.

    key: key of the configuration that names the source.
    """
    if not forms_of(format, kind):
        raise DataError(
            f"data.format={format} holds {_held(format)}, no {kind}, which {key} needs; "
            f"{NEEDS[kind]}; allowed: {', '.join(serving(kind))}"
        )


def fitting(names: Collection[str], format: Format, kind: Kind) -> Form | None:
    """Return the form of a row with columns `names`; None if none fits."""
    fit = [form for form in forms_of(format, kind) if set(form.needed(kind)) <= set(names)]
    best = max(fit, key=lambda form: (form.format == "native", len(form.columns)), default=None)
    if best is None or best.format != "native" or "margin" in names:
        return best
    further = [
        form
        for form in fit
        if set(best.columns) < set(form.columns) <= set(names)
        and form.parse[kind] is not _NATIVE[kind]
    ]
    return max(further, key=lambda form: len(form.columns), default=best)


def _held(format: Format) -> str:
    kinds = {kind: None for form in FORMS if form.format == format for kind in form.parse}
    return " and ".join(kinds)


def serving(kind: Kind) -> list[str]:
    """Return the formats that hold data of a kind."""
    return [name for name in get_args(Format) if name != AUTO and forms_of(name, kind)]
