"""The rows that a stage trains on, and those held out from it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning_rlhf.core.errors import ConfigError, DataError
from lightning_rlhf.data.config import DataConfig, Split
from lightning_rlhf.data.readers import (
    OnBadRow,
    Rows,
    read_demonstrations,
    read_preferences,
    read_prompts,
)
from lightning_rlhf.data.rows import Demonstration, Preference, Prompt

T = TypeVar("T", Demonstration, Preference, Prompt)


@dataclass(frozen=True)
class TrainVal(Generic[T]):
    """Rows to train on and rows held out."""

    train: Rows[T]
    val: Rows[T]


def load_demonstrations(config: DataConfig, seed: int) -> TrainVal[Demonstration]:
    """The rows of `data.demonstrations`, for SFT.

    Where no validation source is named, `val_fraction` of the different prompts (at least one),
    drawn by `seed`, are held out with all their rows, so that no prompt is on both sides.
    Rows to validate on are all there; `sample` draws `max_val_rows` of those that fit.

    Raises:
        ConfigError: no source is set.
        DataError, HubError: a source cannot be read, or too little is in it to hold some out.
    """
    needs = 'stage=sft needs demonstrations {"prompt", "response"}'
    train = _source(config.demonstrations, "data.demonstrations", needs)
    return _load(train, config.demonstrations.val, read_demonstrations, config, seed)


def load_preferences(config: DataConfig, seed: int) -> TrainVal[Preference]:
    """The rows of `data.preferences`, for reward modelling; as `load_demonstrations`."""
    needs = 'stage=rm needs preference pairs {"prompt", "chosen", "rejected"}'
    train = _source(config.preferences, "data.preferences", needs)
    return _load(train, config.preferences.val, read_preferences, config, seed)


def load_prompts(config: DataConfig, seed: int) -> TrainVal[Prompt]:
    """The rows of `data.prompts`, for PPO; as `load_demonstrations`."""
    needs = 'stage=ppo needs prompts {"prompt"}'
    train = _source(config.prompts, "data.prompts", needs)
    return _load(train, config.prompts.val, read_prompts, config, seed)


def _source(split: Split, key: str, needs: str) -> str:
    if split.train is None:
        raise ConfigError(f"{key}.train is not set; {needs}: {key}.train=path.jsonl")
    return split.train


def _load(
    train: str,
    val: str | None,
    read: Callable[[str, OnBadRow], Rows[T]],
    config: DataConfig,
    seed: int,
) -> TrainVal[T]:
    rows = read(train, config.on_bad_row)
    if val is None:
        return _hold_out(rows, config.val_fraction, seed)
    return TrainVal(rows, read(val, config.on_bad_row))


def sample(rows: Rows[T], limit: int | None, seed: int) -> Rows[T]:
    """Return `limit` of the rows, drawn by `seed`, in their order; None returns all."""
    if limit is None or len(rows) <= limit:
        return rows
    kept = sorted(random.Random(seed).sample(range(len(rows)), limit))
    left_out = rows.left_out + Counter({"over data.max_val_rows": len(rows) - limit})
    return replace(rows.only(kept), left_out=left_out)


def _hold_out(rows: Rows[T], fraction: float, seed: int) -> TrainVal[T]:
    prompts = list(dict.fromkeys(row.prompt for row in rows.rows))
    if len(prompts) == 1:
        raise DataError(
            f"{rows.source} has one prompt only, so none can be held out for validation; "
            "name a validation file under data, or give more prompts"
        )
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    held_out = set(random.Random(seed).sample(prompts, count))
    is_held_out = [row.prompt in held_out for row in rows.rows]
    train, val = (
        rows.only([i for i, held in enumerate(is_held_out) if held == side])
        for side in (False, True)
    )
    return TrainVal(train, replace(val, left_out=Counter()))  # counted with the others
