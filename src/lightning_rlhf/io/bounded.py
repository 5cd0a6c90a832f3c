"""Limits of time and memory for chat templates and regular expressions that come with a model."""

from __future__ import annotations

import mmap
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from lightning_rlhf.core.errors import ConfigError

SECONDS = 10.0
"""Largest processor time of one rendering of a chat template, in seconds."""
MEMORY = 1 << 30
"""Largest memory of one rendering of a chat template, in bytes."""
CHARACTERS = 1_000_000
"""Largest number of characters of a rendered chat template, beyond ten times the messages'."""


class Tokenizer(Protocol):
    """A tokenizer of transformers, through which a chat template is rendered."""

    name_or_path: str

    def apply_chat_template(self, conversation: Any, **arguments: Any) -> Any:
        """Return the dialogue as rendered by the chat template."""


@contextmanager
def bounded(seconds: float, memory: int) -> Iterator[None]:
    """Limit the code inside to `seconds` of processor time and `memory` bytes more than now.

    Works in the main thread alone, since only it handles signals; memory is limited on Linux alone.

    Raises:
        TimeoutError, MemoryError: raised inside where a limit is exceeded.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return

    def stop(*_: object) -> None:
        raise _Expired

    with _address_space(memory):
        before = signal.signal(signal.SIGPROF, stop)
        # Again every second: an exception is lost where Python calls back out of C.
        signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
        try:
            yield
        except _Expired as error:
            raise TimeoutError(f"more than {seconds:g} s of processor time") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


class _Expired(BaseException):
    """Raised when the time is over; not an Exception, since Jinja's compiler catches these."""


@contextmanager
def _address_space(more: int) -> Iterator[None]:
    """Limit the process inside to `more` bytes of address space beyond its present, on Linux."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource  # not there on Windows

    with open("/proc/self/statm", "rb") as file:
        has = int(file.read().split()[0]) * mmap.PAGESIZE
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = has + more
    lower = limit if soft == resource.RLIM_INFINITY else min(soft, limit)
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def write_dialogue(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **arguments: Any
) -> str:
    """Return the dialogue as rendered by the tokenizer's chat template, within the limits above.

    arguments: further arguments of `apply_chat_template`.

    Raises:
        ConfigError: the template exceeds a limit of time, memory or length.
        Exception: any error of a template that refuses these messages.
    """
    most = CHARACTERS + 10 * sum(len(message["content"]) for message in messages)
    text: str = _bounded_template(tokenizer, messages, tokenize=False, **arguments)
    if len(text) > most:
        raise _beyond(tokenizer, f"writes {len(text)} characters, of which {most} are allowed")
    return text


def assistant_mask(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **arguments: Any
) -> list[int]:
    """Return 1 for each token inside `{% generation %}` of the chat template, and 0 for the others.

    Raises the errors of `write_dialogue`.
    """
    encoded = _bounded_template(
        tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True, **arguments
    )
    mask: list[int] = encoded["assistant_masks"]
    return mask


def _bounded_template(tokenizer: Tokenizer, messages: Any, **arguments: Any) -> Any:
    try:
        with bounded(SECONDS, MEMORY):
            return tokenizer.apply_chat_template(messages, **arguments)
    except (TimeoutError, MemoryError) as error:
        found = "more memory" if isinstance(error, MemoryError) else "more processor time"
        raise _beyond(tokenizer, f"takes {found} than it may") from error


def _beyond(tokenizer: Tokenizer, found: str) -> ConfigError:
    return ConfigError(
        f"the chat template of tokenizer {tokenizer.name_or_path!r} {found}; allowed for one "
        f"dialogue: {SECONDS:g} s, {MEMORY >> 30} GiB, and {CHARACTERS} characters beyond ten "
        "times those of its messages"
    )
