"""The errors that a user can cause. Each states what was found, what is allowed and what to change.

Errors of a training carry facts, from which `stages.fit` derives the advice.
"""

import copyreg
import difflib
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 300


def quoted(value: Any) -> str:
    """Return the `repr` of a value, with at most about 300 characters of each text."""
    try:
        return _REPR.repr(value)
    except Exception:  # an integer of more than 4300 digits, or a foreign object's own error
        return f"a {type(value).__name__} that cannot be shown"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 pair", "2 pairs"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def percent(share: float, decimals: int = 1) -> str:
    """Return the fraction `share` as a percentage; zero has no sign: -1e-9 -> 0.0%."""
    return f"{share:z.{decimals}%}"


def first_line(error: Exception) -> str:
    """Return the first line of a library's error; the name of its class where it has no text."""
    return (str(error) or type(error).__name__).splitlines()[0]


class RLHFError(Exception):
    """Base of every error that the command line prints as one message, without a traceback."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process make the same error, without a call of its class's `__init__`."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(RLHFError):
    """A configuration value is missing, unknown, out of range or does not fit another one."""


class DataError(RLHFError):
    """A data file is missing or holds a row that cannot be used; names file and line."""


class CheckpointError(RLHFError):
    """A checkpoint is missing, incomplete or does not fit the model, data or configuration."""


class StorageError(RLHFError):
    """The disk, a quota or the limit of a file's size leaves no room, or a file cannot be used."""


class TrainingError(RLHFError):
    """A training cannot continue: nothing can be sampled from a model, or learned by it."""

    advice: str | None = None
    """Text on what to do about the error, printed after the message; None without advice."""

    def __str__(self) -> str:
        found = super().__str__()
        return found if self.advice is None else f"{found.rstrip('.')}. {self.advice}"


class DivergedError(TrainingError):
    """A model's logits, weights or losses are NaN or infinite, which makes it unusable."""


class LogitsError(DivergedError):
    """The logits of a model are NaN or infinite, so that nothing can be sampled from it."""

    def __init__(
        self, where: str = "", *, iterations: int | None = None, nonfinite: int = 0
    ) -> None:
        """Make the error from its facts.

        where: description of the model or the iteration; may be empty.
        iterations: number of finished iterations of PPO; None for a model that it does not train.
        nonfinite: number of updates just before that were not made, because not finite.
        """
        found = "the model's logits are NaN or infinite, and nothing can be sampled from it"
        super().__init__(f"{where}: {found}" if where else found)
        self.iterations, self.nonfinite = iterations, nonfinite


class NotFiniteError(TrainingError):
    """Several updates in a row have a loss or a gradient that is NaN or infinite."""

    rewards_overflow = False
    """True if the rewards of PPO are so large that their squares are not finite."""
    batch: str | None = None
    """Sentence on the file that holds the batch of the last update, and on its rows."""

    def __init__(
        self, stage: str, *, in_a_row: int, loss: float, grad_norm: float, made: int
    ) -> None:
        """Make the error from its facts.

        loss, grad_norm: values at the last of `in_a_row` updates that were not made.
        made: number of optimizer steps of the run that were made before.
        """
        super().__init__(
            f"{counted(in_a_row, 'update')} in a row ({stage}.max_nonfinite) had a loss or "
            f"gradient that is not finite (the last: {loss:g}, and a norm of {grad_norm:g}) and "
            f"{'was' if in_a_row == 1 else 'were'} not made"
        )
        self.stage, self.made = stage, made


class PreflightError(RLHFError):
    """A check before the first update failed, and the run is not to start then."""


class RewardError(RLHFError):
    """A reward source returns no number for a response, or does not answer any more."""


class SamplerError(RLHFError):
    """A sampler from outside the package raises an exception, or returns no valid responses."""


class InterruptedPassError(RLHFError):
    """A pass through a model that the processes share has failed in this process, midway."""


class ProcessEndedError(RLHFError):
    """Another process of the run has ended, so that this one cannot go on."""

    def __str__(self) -> str:
        return "another process of the run has ended, and this one ends too"


class PrintedError(RLHFError):
    """An error that a process which this one has started has printed already."""


class HubError(RLHFError):
    """A model or data set is neither a local path nor available on the hub."""


def own_keys(text: str, stage: str, keys: Collection[str]) -> str:
    """Return a text on keys of PPO with those of a stage that is derived from it.

    keys: keys of the stage's section. Other words, as the file ppo.jsonl, stay as they are.
    """
    return re.sub(rf"(?<![\w./-])ppo\.(?=({'|'.join(keys)})\b)", f"{stage}.", text)


@contextmanager
def naming_own_keys(stage: str, keys: Collection[str]) -> Iterator[None]:
    """Let errors on keys of PPO that are raised inside name those of a stage derived from it."""
    try:
        yield
    except RLHFError as error:
        named = (own_keys(x, stage, keys) if isinstance(x, str) else x for x in error.args)
        error.args = tuple(named)
        raise


def require(holds: bool, key: str, found: Any, allowed: str) -> None:
    """Raise ConfigError naming the key, what was found and what is allowed, unless it holds."""
    if not holds:
        raise ConfigError(refusal(key, found, allowed))


def refusal(key: str, found: Any, allowed: str) -> str:
    """Return the message about a value that is refused; a long text is shortened."""
    shown = quoted(found) if isinstance(found, str) else repr(found)
    return f"{key} is {shown}; allowed: {allowed}"


ELSEWHERE = {
    "beta": "kl_coef", "num_generations": "samples_per_prompt", "cliprange": "clip_range",
    "max_completion_length": "max_response_tokens", "max_new_tokens": "max_response_tokens",
    "learning_rate": "lr", "lam": "gae_lambda", "num_ppo_epochs": "ppo_epochs",
    "epsilon": "clip_range", "reward_funcs": "reward",
}  # fmt: skip
"""Name of a key in other libraries -> that of the same value here."""


def unknown_key(key: str, known: Collection[str], prefix: str, node: Mapping[Any, Any]) -> str:
    """Return the message about a key that nothing reads, with the one that is probably meant.

    known: keys of the section `node`.
    prefix: name of the section and a dot; empty for the whole configuration.
    """
    parts = {n: part for n, part in node.items() if n in known and isinstance(part, Mapping)}
    stage = str(node.get("stage"))  # as sft.lr for lr, or ppo.rollout_batch_size for batch_size
    own = [inner for inner in parts.get(stage, ()) if f"_{inner}".endswith(f"_{key}")]
    meant = [f"{stage}.{inner}" for inner in ([key] if key in own else own)]
    meant = meant or [f"{name}.{key}" for name, part in parts.items() if key in part]
    same = ELSEWHERE.get(key, "")
    meant = [f"{stage}.{same}"] if same in parts.get(stage, ()) else meant
    meant = [same] if same in known else meant or difflib.get_close_matches(key, known, n=1)
    names = " or ".join(prefix + name for name in meant)
    hint = f"did you mean {names}?" if meant else f"allowed: {', '.join(sorted(known))}"
    return f"{prefix}{key} is not a known key; {hint}"
