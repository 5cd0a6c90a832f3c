"""Messages to tokens, and what is learned of a prompt with data.train_on=all, by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_rlhf.core.errors import ConfigError, DataError
from lightning_rlhf.data.batches import collate_demonstrations
from lightning_rlhf.data.chat import PLAIN_TEMPLATE, ChatFormat
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.lengths import tokenise, turn_targets
from lightning_rlhf.data.rows import Demonstration, Message, Messages, Rows
from lightning_rlhf.runs.console import HOME

from .conftest import CHATML, LLAMA

Make = Callable[..., PreTrainedTokenizerFast]
Ids = Callable[..., list[int]]

DIALOGUE = (
    Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Hello"),
    Message("user", "Bye"),
)  # fmt: skip


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


def test_a_text_without_a_prompt_starts_with_bos_or_after_eos(
    chatml: PreTrainedTokenizerFast, llama: PreTrainedTokenizerFast, ids: Ids
) -> None:
    assert ChatFormat(llama, {}).prompt_tokens(()) == ids(llama, "<|bos|>")
    assert ChatFormat(chatml, {}).prompt_tokens(()) == ids(chatml, "<|eos|>")


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        # The marker may be missing, follow white space, or be no special token.
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


def test_a_template_that_loses_text_is_refused(make_tokenizer: Make) -> None:
    template = "{{ messages[0].content }}{{ messages[1].content[:5] }}"
    with pytest.raises(ConfigError, match="does not write the assistant's text"):
        ChatFormat(make_tokenizer(template, eos_token="<|eos|>"), {})
    with pytest.raises(ConfigError, match="does not write the user's text"):
        ChatFormat(make_tokenizer("{{ messages[1].content }}", eos_token="<|eos|>"), {})


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


def test_decoding_shows_the_responses(chatml: PreTrainedTokenizerFast, ids: Ids) -> None:
    chat = ChatFormat(chatml, {})
    assert chat.decode_response(ids(chatml, "Hello", "<|im_end|>", "<|pad|>", "<|pad|>")) == "Hello"
    shown = chat.decode_response(ids(chatml, "Hel", "<|im_start|>", "lo", "<|im_end|>"))
    assert shown == "Hel<|im_start|>lo"


CALL = {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}
TOOLS = (
    Message("user", "Time?"),
    Message.of({"role": "assistant", "content": "", "tool_calls": [CALL]}),
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
        tokenizer, *("<|im_start|>", "user\nTime?", "<|im_end|>", "\n"),
        *("<|im_start|>", 'assistant\nclock {"zone": "UTC"}', "<|im_end|>", "\n"),
        *("<|im_start|>", "tool\nnoon", "<|im_end|>", "\n"), *("<|im_start|>", "assistant\n"),
    )  # fmt: skip


def test_a_template_that_leaves_out_calls_of_tools(chatml: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="leaves out the call of the tool 'clock'"):
        ChatFormat(chatml, {}).prompt_tokens(TOOLS)


MakeConfig = Callable[..., DataConfig]
EOS = {"eos_token": "<|eos|>", "bos_token": "<|bos|>"}
ANSWERED = (
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
    ],
)
def test_learned_by_hand(template: str | None, learned: list[str], make_tokenizer: Make) -> None:
    assert pieces(ChatFormat(make_tokenizer(template, **EOS), {}), ANSWERED) == learned


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
    tokens, expected = chat.prompt_tokens(ANSWERED), []
    for i, turn in enumerate(ANSWERED):
        if turn.role == "assistant":
            before = chat.prompt_tokens(ANSWERED[:i])
            assert tokens[: len(before)] == before
            end = tokens.index(chat.end_token_id, len(before))
            expected += range(len(before), end + 1)
    assert turn_targets(chat, ANSWERED) == expected
    # Each is what generation would have to produce: the response and its end token.
    turns = [turn.content for turn in ANSWERED if turn.role == "assistant"]
    assert [tokens[i] for i in expected] == [
        token for text in turns for token in chat.response_tokens(text)
    ]


def test_calls_of_tools_are_learned_and_their_answers_are_not(make_tokenizer: Make) -> None:
    again = Message.of({"role": "assistant", "content": "So:", "tool_calls": [CALL]})
    prompt = (*TOOLS[:2], Message("tool", 'clock {"zone": "UTC"}'), again, TOOLS[2])
    said = 'clock {"zone": "UTC"}<|im_end|>'
    assert pieces(ChatFormat(make_tokenizer(CALLS, **EOS), {}), prompt) == [said, f"So:{said}"]


def test_the_targets_of_a_batch(make_config: MakeConfig, chatml: PreTrainedTokenizerFast) -> None:
    """The sequence is the same; with "all" the earlier turns of the assistant are targets too."""
    chat, row = ChatFormat(chatml, {}), Demonstration(ANSWERED, "So long")
    rows: Rows[Demonstration] = Rows("x.jsonl", (row,), Counter(), "line", (1,))
    configs = [make_config(max_prompt_tokens=500, train_on=on) for on in ("last", "all")]
    (last,), (every,) = (tokenise(rows, chat, config).examples for config in configs)
    assert asdict(every) == asdict(last) | {"learned": every.learned}
    batches = [collate_demonstrations([e], chat.pad_token_id) for e in (last, every)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    shown = [chat.show(batch.tokens[batch.target_mask].tolist()) for batch in batches]
    assert shown[0] == "So long<|im_end|>"
    assert shown[1] == "Hello, who?<|im_end|> Ann. <|im_end|>So long<|im_end|>"
