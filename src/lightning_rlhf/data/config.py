"""The validated configuration of the data. The values live in conf/data/*.yaml."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core import validation
from lightning_rlhf.data.formats import AUTO, NAMES, formats_of

FormatName = Annotated[
    str,
    Field(
        pattern=rf"^({'|'.join((AUTO, *NAMES))})$|.:.",
        description=f"{', '.join((AUTO, *NAMES))}, path.py:function",
    ),
]
TooLong = Literal["drop", "cut"]
Source = Annotated[validation.Text, validation.described("a file, a hub data set")]
ColumnNames = Annotated[
    dict[str, str], validation.described("a mapping of columns to columns of the source")
]
JudgePath = Annotated[validation.Text, Field(pattern=r"\.py:", description="path.py:function")]


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class Split:
    """Two sources, each a local file or a hub data set; see `data.readers.open_source`."""

    train: Source | None
    """null where the stage at hand does not need it."""
    val: Source | None
    """null: `val_fraction` of the training prompts are held out."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class DataConfig:
    """Sources of the rows, and how long a prompt and a response may be."""

    demonstrations: Annotated[Split, validation.nested(Split)]
    preferences: Annotated[Split, validation.nested(Split)]
    prompts: Annotated[Split, validation.nested(Split)]
    format: FormatName
    """Form of the rows, see `data.formats`; "auto" finds it by their columns. A function turns a
    row into the package's own form, see `data.readers.own_row`."""
    columns: ColumnNames
    """Column that the form reads -> column of the source that is read as it."""
    train_on: Literal["last", "all"]
    """Turns of the assistant that SFT learns; the last one is the response."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)]
    """Share of the prompts held out where a split names no validation source."""
    max_val_rows: validation.PositiveInt | None
    """Largest number of rows to validate on, drawn from those that fit; null keeps them all."""
    on_bad_row: Literal["stop", "skip"]
    max_prompt_tokens: validation.PositiveInt
    """Largest number of tokens of a prompt as the chat template writes it."""
    long_prompts: TooLong
    """What happens to a longer prompt; "cut" is described in `data.lengths`."""
    max_response_tokens: validation.PositiveInt
    """Largest number of tokens of a response in the data, its end token included."""
    long_responses: TooLong
    """What happens to a longer response; "cut" is described in `data.lengths`."""
    pool_batches: validation.PositiveInt
    """Batches of alike lengths are formed within so many batches; 1 = lengths as they come."""
    chat_template_kwargs: validation.Options
    """Further arguments of the tokenizer's chat template."""
    judge: JudgePath | None
    """`path.py:function` that scores responses in evaluations, or null."""

    def __post_init__(self) -> None:
        known = {column for form in formats_of(self.format) for column in form.reads}
        for name, column in self.columns.items():
            words = f"one that data.format={self.format} reads: {', '.join(sorted(known))}"
            if column in known:
                words = f"the sides the other way round, data.columns.{column}={name}"
            validation.rule(name in known or ":" in self.format, f"columns.{name}", column, words)
