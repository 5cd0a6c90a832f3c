"""Messages to tokens, against tokens counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.core.errors import ConfigError, DataError
from lightning_rlhf.data.chat import PLAIN_TEMPLATE, ChatFormat
from lightning_rlhf.data.rows import Message

Make = Callable[..., PreTrainedTokenizerFast]
Ids = Callable[..., list[int]]

DIALOGUE = (
    Message("system", "Be kind."),
    Message("user", "Hi"),
    Message("assistant", "Hello"),
    Message("user", "Bye"),
)


def test_a_response_ends_with_the_marker_and_not_with_the_newline_after_it(
    chatml: PreTrainedTokenizerFast, ids: Ids
) -> None:
    chat = ChatFormat(chatml, {})
    assert chat.response_tokens("Hello") == ids(chatml, "Hello", "<|im_end|>")
    assert chat.end_token_id == ids(chatml, "<|im_end|>")[0]
    assert chat.end_token_ids == tuple(ids(chatml, "<|im_end|>", "<|eos|>"))
    assert chat.pad_token_id == ids(chatml, "<|pad|>")[0]


def test_bos_once_and_never_in_the_response(llama: PreTrainedTokenizerFast, ids: Ids) -> None:
    # Called plainly this tokenizer puts a bos before any text.
    assert llama("Hi").input_ids == ids(llama, "<|bos|>", "Hi")
    chat = ChatFormat(llama, {})
    assert chat.prompt_tokens("Hi") == ids(llama, "<|bos|>", "[user]Hi", "<|eot|>", "[assistant]")
    assert chat.response_tokens("Hello") == ids(llama, "Hello", "<|eot|>")


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        # The marker may be eos itself, be missing, follow white space, or be no special token.
        ("{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}", ["<|eos|>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ["<|eos|>"]),
        ("{% for m in messages %}{{ m.content }} \n<|eot|>{% endfor %}", ["<|eot|>", "<|eos|>"]),
        ("{% for m in messages %}{{ m.content }}---{% endfor %}", ["<|eos|>"]),
    ],
)
def test_the_tokens_that_end_a_response(
    template: str, ends: list[str], make_tokenizer: Make, ids: Ids
) -> None:
    tokenizer = make_tokenizer(template, eos_token="<|eos|>")
    tokenizer.add_tokens(["---"])
    chat = ChatFormat(tokenizer, {})
    assert chat.end_token_ids == tuple(ids(tokenizer, *ends))
    assert chat.response_tokens("A") == ids(tokenizer, "A", ends[0])


def test_without_marker_and_eos_nothing_could_end(make_tokenizer: Make) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ConfigError, match="no eos token"):
        ChatFormat(make_tokenizer(template), {})


@pytest.mark.parametrize("pad", [{}, {"pad_token": "<|eos|>"}])
def test_padding_falls_back_to_eos(pad: dict[str, str], make_tokenizer: Make, ids: Ids) -> None:
    tokenizer = make_tokenizer(None, eos_token="<|eos|>", **pad)
    chat = ChatFormat(tokenizer, {})
    assert chat.pad_token_id == ids(tokenizer, "<|eos|>")[0]
    assert chat.response_tokens("A") == ids(tokenizer, "A", "<|eos|>")


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "assistant's"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "user's"),
        ("{{ messages[0].content }}{{ messages[1].content[:5] }}", "assistant's"),
    ],
)
def test_a_template_that_loses_text_is_refused(
    template: str, lost: str, make_tokenizer: Make
) -> None:
    with pytest.raises(ConfigError, match=f"does not reproduce the {lost} text"):
        ChatFormat(make_tokenizer(template, eos_token="<|eos|>"), {})


def test_arguments_reach_a_template_whose_dialogues_are_no_prefixes(
    make_tokenizer: Make, ids: Ids
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{{ opening }}{% endif %}"
    )
    tokenizer = make_tokenizer(template, eos_token="<|eos|>")
    chat = ChatFormat(tokenizer, {"opening": "(thought)"})
    sequence = chat.prompt_tokens("Hi") + chat.response_tokens("Hello")
    assert sequence == ids(
        tokenizer, "<user>Hi", "<|eot|>", "<assistant>(thought)", "Hello", "<|eot|>"
    )


def test_the_plain_template(make_tokenizer: Make, ids: Ids) -> None:
    tokenizer = make_tokenizer(None, bos_token="<|bos|>", eos_token="<|eos|>")
    chat = ChatFormat(tokenizer, {})
    assert chat.render(DIALOGUE) == (
        "<|bos|>System:\nBe kind.\n\nUser:\nHi\n\nAssistant:\nHello<|eos|>\n\nUser:\nBye\n\n"
    )
    assert chat.prompt_tokens(" Hi\n") == ids(tokenizer, "<|bos|>", "User:\n Hi\n\n\nAssistant:\n")
    assert chat.response_tokens("Hello") == ids(tokenizer, "Hello", "<|eos|>")
    assert tokenizer.chat_template == PLAIN_TEMPLATE


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (("Hello", "<|im_end|>"), "Hello"),
        (("Hello", "<|im_end|>", "<|pad|>", "<|pad|>"), "Hello"),
        ((" Hello \n", "<|im_end|>"), " Hello \n"),
        (("Hel", "<|im_start|>", "lo", "<|im_end|>"), "Hel<|im_start|>lo"),
        (("<|im_end|>",), ""),
    ],
)
def test_decoding_shows_what_was_said(
    pieces: tuple[str, ...], said: str, chatml: PreTrainedTokenizerFast, ids: Ids
) -> None:
    assert ChatFormat(chatml, {}).decode_response(ids(chatml, *pieces)) == said


def test_a_text_without_a_prompt_starts_with_bos_or_after_eos(
    chatml: PreTrainedTokenizerFast, llama: PreTrainedTokenizerFast, ids: Ids
) -> None:
    assert ChatFormat(llama, {}).prompt_tokens(()) == ids(llama, "<|bos|>")
    assert ChatFormat(chatml, {}).prompt_tokens(()) == ids(chatml, "<|eos|>")


TOOLS = (
    Message("user", "Time?"),
    Message.of(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
        }
    ),
    Message("tool", "noon"),
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_of_tools_reach_the_template(make_tokenizer: Make, ids: Ids) -> None:
    tokenizer = make_tokenizer(CALLS, eos_token="<|eos|>")
    assert ChatFormat(tokenizer, {}).prompt_tokens(TOOLS) == ids(
        tokenizer,
        *("<|im_start|>", "user\nTime?", "<|im_end|>", "\n"),
        *("<|im_start|>", 'assistant\nclock {"zone": "UTC"}', "<|im_end|>", "\n"),
        *("<|im_start|>", "tool\nnoon", "<|im_end|>", "\n"),
        *("<|im_start|>", "assistant\n"),
    )


def test_a_template_that_leaves_out_calls_of_tools(chatml: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="leaves out the call of the tool 'clock'"):
        ChatFormat(chatml, {}).prompt_tokens(TOOLS)
