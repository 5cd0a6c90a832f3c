"""The errors a user can cause. Each says what was found, what is allowed and what to change."""


def first_line(error: Exception) -> str:
    """What a library's error says first; its name where it says nothing."""
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
