"""What the data configuration says. The values live in conf/data/*.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_rlhf.core.config import require, require_number, require_one_of, require_text

TooLong = Literal["drop", "cut"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Two sources, each a local file or a hub data set; see `data.sources.open_source`."""

    train: str | None
    """null where the stage at hand does not need it."""
    val: str | None
    """null: `val_fraction` of the training prompts are held out."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from, and how long they may be."""

    demonstrations: Split
    preferences: Split
    prompts: Split
    val_fraction: float
    """Share of the prompts held out where a split names no validation source."""
    max_val_rows: int | None
    """Largest number of rows to validate on, drawn from those that fit; null keeps them all."""
    on_bad_row: Literal["stop", "skip"]
    max_prompt_tokens: int
    """Of the prompt as the chat template writes it."""
    long_prompts: TooLong
    """What happens to a longer prompt; "cut" is described in `data.lengths`."""
    max_response_tokens: int
    """Of a response in the data, its end token included."""
    long_responses: TooLong
    """What happens to a longer response; "cut" is described in `data.lengths`."""
    pool_batches: int
    """Batches of alike lengths are formed within so many batches; 1 = lengths as they come."""
    chat_template_kwargs: dict[str, Any]
    """Further arguments of the tokenizer's chat template."""
    judge: str | None
    """`path.py:function` that scores responses in evaluations, or null."""

    def __post_init__(self) -> None:
        for key in ("demonstrations", "preferences", "prompts"):
            split = getattr(self, key)
            require(isinstance(split, Split), f"data.{key}", split, "train and val")
            for part in ("train", "val"):
                source = getattr(split, part)
                if source is not None:
                    require_text(f"data.{key}.{part}", source, "a file, a hub data set, or null")
        require_number("data.val_fraction", self.val_fraction, above=0, below=1)
        if self.max_val_rows is not None:
            require_number("data.max_val_rows", self.max_val_rows, at_least=1, whole=True)
        require_one_of("data.on_bad_row", self.on_bad_row, ("stop", "skip"))
        require_one_of("data.long_prompts", self.long_prompts, ("drop", "cut"))
        require_one_of("data.long_responses", self.long_responses, ("drop", "cut"))
        for key in ("max_prompt_tokens", "max_response_tokens", "pool_batches"):
            require_number(f"data.{key}", getattr(self, key), at_least=1, whole=True)
        kwargs = self.chat_template_kwargs
        require(isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs),
                "data.chat_template_kwargs", kwargs, "a mapping of names to values")  # fmt: skip
        if self.judge is not None:
            require_text("data.judge", self.judge, "path.py:function, or null")
            require(".py:" in self.judge, "data.judge", self.judge, "path.py:function, or null")
