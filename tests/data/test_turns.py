"""What is learned of a prompt with data.train_on=all, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.data.batches import collate_demonstrations
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.lengths import tokenise, turn_targets
from lightning_rlhf.data.rows import Demonstration, Message, Messages, Rows
from lightning_rlhf.runs.console import HOME

from .conftest import CHATML, LLAMA

Make = Callable[..., PreTrainedTokenizerFast]
MakeConfig = Callable[..., DataConfig]
EOS = {"eos_token": "<|eos|>", "bos_token": "<|bos|>"}
DIALOGUE = (
    Message("system", "Be kind."),
    Message("user", "Hi"),
    Message("assistant", "Hello, who?"),
    Message("user", "Hello, who?"),  # the same text, which is not learned
    Message("assistant", " Ann. "),
    Message("user", "Bye"),
)


def pieces(chat: ChatFormat, prompt: Messages) -> list[str]:
    """The runs of tokens that are learned, as text."""
    tokens, positions = chat.prompt_tokens(prompt), turn_targets(chat, prompt)
    assert positions == sorted(set(positions))
    runs: list[list[int]] = []
    for last, position in zip([-2, *positions], positions, strict=False):
        runs += [[]] if position != last + 1 else []
        runs[-1].append(tokens[position])
    return [chat.show(run) for run in runs]


GENERATION = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + GENERATION
    + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (CHATML, ["Hello, who?<|im_end|>", " Ann. <|im_end|>"]),
        (LLAMA, ["Hello, who?<|eot|>", " Ann. <|eot|>"]),
        (None, ["Hello, who?<|eos|>", " Ann. <|eos|>"]),
        (CHATML_MARKED, ["Hello, who?<|im_end|>", " Ann. <|im_end|>"]),
        # A template may trim the text, write a space before the marker, or have no marker.
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|eot|>{% endfor %}",
            ["Hello, who?<|eot|>", "Ann.<|eot|>"],
        ),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content | trim }} <|eot|>{% endfor %}",
            ["Hello, who?", "<|eot|>", "Ann.", "<|eot|>"],
        ),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}\n{% endfor %}",
            ["Hello, who?", "Ann."],
        ),
        # The author of a template decides what is learned.
        (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
            "{% generation %}<|eot|>{% endgeneration %}{% endif %}{% endfor %}",
            ["<|eot|>", "<|eot|>"],
        ),
    ],
)
def test_learned_by_hand(template: str | None, learned: list[str], make_tokenizer: Make) -> None:
    assert pieces(ChatFormat(make_tokenizer(template, **EOS), {}), DIALOGUE) == learned


@pytest.fixture(scope="module")
def tiny() -> ChatFormat:
    """The embedded tokenizer, whose tokens are words and parts of words."""
    found = sorted((HOME / "src").rglob("tokenizer.json")) or sorted(HOME.rglob("tokenizer.json"))
    return ChatFormat(AutoTokenizer.from_pretrained(found[0].parent), {})


@pytest.mark.parametrize("template", [CHATML, LLAMA, "tiny"])
def test_the_same_as_by_prefixes(template: str, make_tokenizer: Make, tiny: ChatFormat) -> None:
    """Turn i is learned from where the prompt before it ends up to the end token.

    Of templates whose dialogues are prefixes of longer ones, as these are.
    """
    chat = tiny if template == "tiny" else ChatFormat(make_tokenizer(template, **EOS), {})
    tokens, expected = chat.prompt_tokens(DIALOGUE), []
    for i, turn in enumerate(DIALOGUE):
        if turn.role == "assistant":
            before = chat.prompt_tokens(DIALOGUE[:i])
            assert tokens[: len(before)] == before
            end = tokens.index(chat.end_token_id, len(before))
            expected += range(len(before), end + 1)
    assert turn_targets(chat, DIALOGUE) == expected
    # Each is what generation would have to produce: the response and its end token.
    turns = [turn.content for turn in DIALOGUE if turn.role == "assistant"]
    assert [tokens[i] for i in expected] == [
        token for text in turns for token in chat.response_tokens(text)
    ]


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns(make_tokenizer: Make) -> None:
    """No dialogue is a prefix here; what the template leaves of a turn is learned."""
    prompt = (*DIALOGUE[:2], Message("assistant", "<think>Hm.</think>Hello"), *DIALOGUE[3:])
    chat = ChatFormat(make_tokenizer(THINKING, **EOS), {})
    assert pieces(chat, prompt) == ["Hello<|im_end|>", " Ann. <|im_end|>"]


def test_calls_of_tools_are_learned_and_their_answers_are_not(make_tokenizer: Make) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    calls = [{"function": {"name": "clock", "arguments": {}}}]
    prompt = (
        Message("user", "Time?"),
        Message.of({"role": "assistant", "content": "", "tool_calls": calls}),
        Message("tool", "(clock)"),
        Message.of({"role": "assistant", "content": "So:", "tool_calls": calls}),
        Message("tool", "noon"),
    )
    chat = ChatFormat(make_tokenizer(template, **EOS), {})
    assert pieces(chat, prompt) == ["(clock)<|im_end|>", "So:(clock)<|im_end|>"]


def test_a_tokenizer_without_characters_is_refused(
    chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatFormat(chatml, {})
    monkeypatch.setattr(type(chatml), "is_fast", False)
    with pytest.raises(ConfigError, match=r"^data\.train_on is 'all'; allowed: last, as tokenizer"):
        turn_targets(chat, DIALOGUE)


def examples(train_on: str, make_config: MakeConfig, chat: ChatFormat, **limits: Any) -> Any:
    row = Demonstration(DIALOGUE, "So long")
    rows: Rows[Demonstration] = Rows("x.jsonl", (row,), Counter(), "line", (1,))
    config = make_config(**{"max_prompt_tokens": 500, "train_on": train_on, **limits})
    return tokenise(rows, chat, config).examples


def test_the_targets_of_a_batch(make_config: MakeConfig, chatml: PreTrainedTokenizerFast) -> None:
    """The sequence is the same; with "all" the earlier turns of the assistant are targets too."""
    chat = ChatFormat(chatml, {})
    (last,), (every,) = (examples(on, make_config, chat) for on in ("last", "all"))
    assert asdict(every) == asdict(last) | {"learned": every.learned}
    batches = [collate_demonstrations([e], chat.pad_token_id) for e in (last, every)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    shown = [chat.show(batch.tokens[batch.target_mask].tolist()) for batch in batches]
    assert shown[0] == "So long<|im_end|>"
    assert shown[1] == "Hello, who?<|im_end|> Ann. <|im_end|>So long<|im_end|>"
    assert batches[1].target_mask.sum() == len(every.learned) + len(last.response)


def test_turns_that_are_cut_are_not_learned(
    make_config: MakeConfig, chatml: PreTrainedTokenizerFast
) -> None:
    chat = ChatFormat(chatml, {})
    whole = len(chat.prompt_tokens(DIALOGUE))
    (cut,) = examples("all", make_config, chat, max_prompt_tokens=whole - 1, long_prompts="cut")
    assert chat.show([cut.prompt[i] for i in cut.learned]) == " Ann. <|im_end|>"
