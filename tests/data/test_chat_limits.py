"""Chat templates that never end, or take or write too much, are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.io import bounded

Make = Callable[..., PreTrainedTokenizerFast]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TIME, MEMORY = "takes more processor time than it may", "takes more memory than it may"
BOMBS = {
    "nested loops": (LOOP, TIME),
    "macros": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
               "{{ f(60) }}", TIME),
    "generated text": ("{{ lipsum(n=99999999) }}", TIME),
    "a power": ("{{ 7 ** (10 ** 9) % 3 }}", TIME),
    "ten terabytes": ("{{ 'a' * 10 ** 13 }}", MEMORY),
    "a format": ("{{ '%9999999999999d' | format(1) }}", MEMORY),
    "a filter": ("{{ 'a' | center(9999999999999) }}", MEMORY),
    "long text": ("{{ 'a' * 2000000 }}", "writes 2000000 characters, of which 1000320 are allowed"),
}  # fmt: skip
"""1,000,000 and ten times the 17 + 15 characters of "sentinel question" and "sentinel answer"."""


@pytest.mark.parametrize(("template", "found"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused(
    template: str, found: str, make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found == TIME:
        monkeypatch.setattr(bounded, "SECONDS", 0.5)
    tokenizer = make_tokenizer(template, eos_token="<|eos|>")
    tokenizer.name_or_path = "org/model"
    with pytest.raises(ConfigError) as error:
        ChatFormat(tokenizer, {})
    told = str(error.value)
    assert told.startswith(f"the chat template of tokenizer 'org/model' {found}; allowed for one ")
    assert len(told.splitlines()) == 1


def test_a_bomb_that_waits_for_a_word(
    make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    template = (
        "{% for m in messages %}{{ m.content }}{% if 'boom' in m.content %}"
        + LOOP
        + "{% endif %}{% endfor %}"
    )
    chat = ChatFormat(make_tokenizer(template, eos_token="<|eos|>"), {})
    assert chat.render("hello") == "hello"
    with pytest.raises(ConfigError, match="processor time"):
        chat.prompt_tokens("boom")


def test_long_messages_are_written(make_tokenizer: Make) -> None:
    """3,000,000 characters: above the million, below ten times what is said."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = ChatFormat(make_tokenizer(template, eos_token="<|eos|>"), {})
    assert chat.render("x" * 3_000_000) == "x" * 3_000_000
