"""Training rows and held-out rows of a stage."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from lightning_rlhf.core.errors import ConfigError, DataError
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.forms import NEEDS, Kind, check_serves
from lightning_rlhf.data.readers import (
    OnBadRow,
    Rows,
    read_demonstrations,
    read_preferences,
    read_prompts,
)
from lightning_rlhf.data.reading import Columns
from lightning_rlhf.data.rows import Demonstration, Messages, Preference, Prompt
from lightning_rlhf.data.sources import open_source

T = TypeVar("T", Demonstration, Preference, Prompt)


@dataclass(frozen=True)
class TrainVal(Generic[T]):
    """Rows to train on and held-out rows."""

    train: Rows[T]
    val: Rows[T]


def load_demonstrations(config: DataConfig, seed: int) -> TrainVal[Demonstration]:
    """Load the rows of `data.demonstrations`, for SFT.

    Without a validation source, `val_fraction` of the different prompts (at least one), drawn with
    `seed`, are held out with all their rows, so that no prompt is on both sides. All validation
    rows are returned; `sample` draws `max_val_rows` of those that fit.

    Raises:
        ConfigError: no source is set.
        DataError, HubError: a source cannot be read, or has too few prompts to hold some out.
    """
    return _load("demonstrations", read_demonstrations, config, seed)


def load_preferences(config: DataConfig, seed: int) -> TrainVal[Preference]:
    """Load the rows of `data.preferences`, for reward modelling and DPO, as `load_demonstrations`
    does.
    """
    return _load("preferences", read_preferences, config, seed)


def load_prompts(config: DataConfig, seed: int) -> TrainVal[Prompt]:
    """Load the rows of `data.prompts`, for PPO and ranking, as `load_demonstrations` does."""
    return _load("prompts", read_prompts, config, seed)


LOAD: Mapping[Kind, Callable[[DataConfig, int], TrainVal[Any]]] = {
    "demonstrations": load_demonstrations,
    "preferences": load_preferences,
    "prompts": load_prompts,
}
"""Kind of data -> (configuration, seed) -> its rows."""


def check_sources(config: DataConfig, kind: Kind) -> tuple[str, str | None]:
    """Return the training source and the validation source, checked by their names alone.

    Raises ConfigError if there is no training source, and DataError if a file is missing, its name
    has no supported form, or data.format holds no such data; all name the key.
    """
    splits = {
        "demonstrations": config.demonstrations,
        "preferences": config.preferences,
        "prompts": config.prompts,
    }
    split, key = splits[kind], f"data.{kind}"
    if split.train is None:
        raise ConfigError(f"{key}.train is not set; {NEEDS[kind]}: {key}.train=path.jsonl")
    check_serves(config.format, kind, f"{key}.train={split.train}")
    for part, source in (("train", split.train), ("val", split.val)):
        try:
            if source is not None:
                open_source(source)
        except DataError as error:
            raise DataError(f"{key}.{part}: {error}") from error
    return split.train, split.val


def _load(
    kind: Kind, read: Callable[[str, OnBadRow, Columns], Rows[T]], config: DataConfig, seed: int
) -> TrainVal[T]:
    train, val = check_sources(config, kind)
    columns = Columns(config.format, config.columns)
    rows = read(train, config.on_bad_row, columns)
    if val is None:
        return _hold_out(rows, config.val_fraction, seed)
    return TrainVal(rows, read(val, config.on_bad_row, columns))


def sample(rows: Rows[T], limit: int | None, seed: int) -> Rows[T]:
    """Return `limit` of the rows, drawn with `seed`, in their order; None returns all."""
    if limit is None or len(rows) <= limit:
        return rows
    kept = sorted(random.Random(seed).sample(range(len(rows)), limit))
    left_out = rows.left_out + Counter({"over data.max_val_rows": len(rows) - limit})
    return replace(rows.only(kept), left_out=left_out)


def _hold_out(rows: Rows[T], fraction: float, seed: int) -> TrainVal[T]:
    prompts = list(dict.fromkeys(_prompt_or_text(row) for row in rows.rows))
    if len(prompts) == 1:
        raise DataError(
            f"{rows.source} has one prompt only, so none can be held out for validation; "
            "name a validation file under data, or give more prompts"
        )
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    held_out = set(random.Random(seed).sample(prompts, count))
    is_held_out = [_prompt_or_text(row) in held_out for row in rows.rows]
    train, val = (
        rows.only([i for i, held in enumerate(is_held_out) if held == side])
        for side in (False, True)
    )
    return TrainVal(train, replace(val, left_out=Counter()))  # counted in `train`


def _prompt_or_text(row: Demonstration | Preference | Prompt) -> Messages | str:
    """Return the prompt of a row; of a text without a prompt, the text."""
    return row.response if isinstance(row, Demonstration) and not row.prompt else row.prompt
