"""What is dropped and cut. One character is one token; the chat template of these tests

writes `[user]Hi<|eot|>[assistant]` after a bos, so a lone user message of n characters is a prompt
of 1 + 6 + n + 1 + 11 = n + 19 tokens, and a response of n characters is n + 1 tokens.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.lengths import tokenise
from lightning_rlhf.data.rows import Demonstration, Message, Messages, Preference, Prompt, Rows

Ids = Callable[..., list[int]]
MakeConfig = Callable[..., DataConfig]


@pytest.fixture
def chat(llama: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(llama, {})


def user(text: str) -> Messages:
    return (Message("user", text),)


def rows(*items: Any) -> Rows[Any]:
    return Rows("mine.jsonl", items, Counter(), "line", tuple(range(1, len(items) + 1)))


def text(chat: ChatFormat, tokens: Any) -> str:
    return chat.tokenizer.decode(list(tokens))


def test_demonstrations_beyond_the_limits_are_dropped(
    chat: ChatFormat, make_config: MakeConfig, ids: Ids
) -> None:
    config = make_config(max_prompt_tokens=21, max_response_tokens=6)
    pairs = (("Hi!", "Hello"), ("Ho", "Hello"), ("Hi", "Hello!"), ("Hi!", "Hello!"))
    result = tokenise(rows(*(Demonstration(user(p), r) for p, r in pairs)), chat, config)
    (example,) = result.examples
    prompt = ids(chat.tokenizer, "<|bos|>", "[user]Ho", "<|eot|>", "[assistant]")
    assert list(example.prompt) == prompt
    assert list(example.response) == ids(chat.tokenizer, "Hello", "<|eot|>")
    assert example.length == 21 + 6
    assert result.dropped == Counter({"prompt too long": 2, "response too long": 1})
    assert result.numbers == (2,)
    assert not result.cut
    assert result.too_long == 3 / 4


def test_a_cut_response_has_no_end_token(
    chat: ChatFormat, make_config: MakeConfig, ids: Ids
) -> None:
    config = make_config(max_response_tokens=5, long_responses="cut")
    result = tokenise(
        rows(Demonstration(user("Hi"), "Hello"), Demonstration(user("Hi"), "Hell")), chat, config
    )
    expected = [ids(chat.tokenizer, "Hello"), ids(chat.tokenizer, "Hell", "<|eot|>")]
    assert [list(e.response) for e in result.examples] == expected
    assert result.cut == Counter({"response cut": 1})


LONG = (
    Message("system", "Kind."),  # [system]Kind.<|eot|>: 8 + 5 + 1 = 14 tokens
    Message("user", "one"),  # 10 tokens
    Message("assistant", "two"),  # 15 tokens
    Message("user", "three"),  # 12 tokens
    Message("assistant", "four"),  # 16 tokens
    Message("user", "five 6789"),  # 16 tokens; with bos and [assistant] 95 in all
)


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (95, "[system]Kind.<|eot|>[user]one<|eot|>[assistant]two<|eot|>[user]three<|eot|>"
             "[assistant]four<|eot|>[user]five 6789<|eot|>"),
        (94, "[system]Kind.<|eot|>[user]three<|eot|>[assistant]four<|eot|>"
             "[user]five 6789<|eot|>"),
        (69, "[system]Kind.<|eot|>[user]five 6789<|eot|>"),
        # The space before 6789 would come first and is left out with "five".
        (38, "[system]Kind.<|eot|>[user]6789<|eot|>"),
        (34, "[system]Kind.<|eot|>[user]9<|eot|>"),
    ],
)  # fmt: skip
def test_cutting_keeps_the_system_turn_the_latest_turns_and_the_template(
    limit: int, left: str, chat: ChatFormat, make_config: MakeConfig
) -> None:
    config = make_config(max_prompt_tokens=limit, long_prompts="cut")
    result = tokenise(rows(Prompt(LONG, {})), chat, config)
    (example,) = result.examples
    assert text(chat, example.prompt) == f"<|bos|>{left}[assistant]"
    assert len(example.prompt) <= limit
    assert result.cut == (Counter() if limit == 95 else Counter({"prompt cut": 1}))
    assert result.too_long == (limit < 95)


def test_a_prompt_shorter_than_its_template_cannot_be_cut(
    chat: ChatFormat, make_config: MakeConfig
) -> None:
    # 19 tokens of template: 20 leave one character, 19 none.
    prompts = rows(Prompt(user("Hi"), {}))
    config = make_config(max_prompt_tokens=20, long_prompts="cut")
    (example,) = tokenise(prompts, chat, config).examples
    assert text(chat, example.prompt) == "<|bos|>[user]i<|eot|>[assistant]"
    config = make_config(max_prompt_tokens=19, long_prompts="cut")
    with pytest.raises(DataError, match="the chat template alone"):
        tokenise(prompts, chat, config)


def test_prompts_keep_their_positions(chat: ChatFormat, make_config: MakeConfig) -> None:
    config = make_config(max_prompt_tokens=20)
    prompts = rows(*(Prompt(user(t), {}) for t in ("a", "bb", "c", "dd", "e")))
    result = tokenise(prompts, chat, config)
    kept = [(text(chat, e.prompt[7:8]), e.index) for e in result.examples]
    assert kept == [("a", 0), ("c", 2), ("e", 4)]
    assert result.dropped == Counter({"prompt too long": 2})


def test_pairs_that_cutting_makes_identical_are_dropped(
    chat: ChatFormat, make_config: MakeConfig
) -> None:
    config = make_config(max_response_tokens=3, long_responses="cut")
    sides = (("Maybe", "Mayday"), ("Maybe", "Made"), ("Ma", "Maybe"))
    result = tokenise(rows(*(Preference(user("Hi"), *two) for two in sides)), chat, config)
    found = [(text(chat, e.chosen), text(chat, e.rejected)) for e in result.examples]
    assert found == [("May", "Mad"), ("Ma<|eot|>", "May")]
    assert result.dropped == Counter({"chosen and rejected are the same tokens": 1})
    assert result.cut == Counter({"response cut": 2})  # rows, not responses


def test_nothing_left_names_what_to_change(chat: ChatFormat, make_config: MakeConfig) -> None:
    said = r"mine\.jsonl is left: 1 response too long; raise .* data\.max_response_tokens \(5\)"
    config = make_config(max_response_tokens=5)
    with pytest.raises(DataError, match=said):
        tokenise(rows(Demonstration(user("Hi"), "Hello")), chat, config)
