"""The errors a user can cause. Each says what was found, what is allowed and what to change."""

from __future__ import annotations

from typing import Any


def first_line(error: Exception) -> str:
    """Return what a library's error says first; its name where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


class RLHFError(Exception):
    """Base of every error that the command line prints as one message, without a traceback."""


class ConfigError(RLHFError):
    """A configuration value is missing, unknown, out of range or does not fit another one."""


class DataError(RLHFError):
    """A data file is missing or holds a row that cannot be used; names file and line."""


class CheckpointError(RLHFError):
    """A checkpoint is missing, incomplete or does not fit what it is asked to work with."""


class StorageError(RLHFError):
    """The disk, a quota or the limit of a file's size leaves no room for what is to be written."""


class TrainingError(RLHFError):
    """A model has come to where nothing can be sampled from it or learned any more."""


class DivergedError(TrainingError):
    """A model's logits, weights or losses are NaN or infinite, so that it is of no use."""


class NotFiniteError(TrainingError):
    """Update after update has a loss or a gradient that is NaN or infinite.

    Its arguments are sentences: what was found, and what to do about it.
    """

    def __str__(self) -> str:
        return ". ".join(map(str, self.args))


class RewardError(RLHFError):
    """A reward source gives no number for a response, or cannot be asked any more."""


class HubError(RLHFError):
    """A model or data set is neither a local path nor reachable on the hub."""


def require(holds: bool, key: str, found: Any, allowed: str) -> None:
    """Raise ConfigError naming the key, what was found and what is allowed, unless it holds."""
    if not holds:
        raise ConfigError(refused(key, found, allowed))


def refused(key: str, found: Any, allowed: str) -> str:
    """Return the line about a value that is refused; a long text is shortened."""
    is_long = isinstance(found, str) and len(found) > 200
    shown = f"{found[:40]}… ({len(found)} characters)" if is_long else found
    return f"{key} is {shown!r}; allowed: {allowed}"
