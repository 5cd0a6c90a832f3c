"""The only place that turns messages into tokens, and tokens back into text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation import StopStringCriteria

from lightning_rlhf.core.bounded import write_dialogue
from lightning_rlhf.core.errors import ConfigError, DataError, require
from lightning_rlhf.data.rows import Message, Messages

PLAIN_TEMPLATE = (
    "{{ bos_token if bos_token }}"
    "{% for message in messages %}"
    "{{ message.role | capitalize + ':\\n' + message.content }}"
    "{{ eos_token if message.role == 'assistant' }}"
    "{{ '\\n\\n' }}"
    "{% endfor %}"
    "{{ 'Assistant:\\n' if add_generation_prompt }}"
)
"""For a tokenizer without a chat template: the speaker, a colon, and the text on the next line.

    User:
    What is the capital of France?

    Assistant:
    Paris.

The response starts on a line of its own because a word after a newline is tokenised as the word
alone; after "Assistant: " a model would meet a lone space that it seldom saw before a word.
"""

_TAKEN = {"self", "messages", *inspect.signature(
    PreTrainedTokenizerBase.apply_chat_template
).parameters} - {"tools", "documents", "kwargs"}  # fmt: skip
"""Names that a chat template is given already, or that are not for it."""

_SENTINELS = (Message("user", "sentinel question"), Message("assistant", "sentinel answer"))


class ChatFormat:
    """Turns prompts and responses into tokens the way the policy will meet them.

    A training sequence is `prompt_tokens` followed by `response_tokens`. These are the tokens of
    generation: the prompt with the template's opening of the assistant's turn, then what the
    policy says, then its end token. The template never renders the response itself, so nothing
    depends on the rendering of a dialogue being a prefix of the rendering with one more turn;
    templates that rewrite earlier turns (hidden reasoning, say) are safe.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
    ) -> None:
        """A `tokenizer` without a chat template is given PLAIN_TEMPLATE, to be saved with it.

        Raises:
            ConfigError: the template loses or rewrites what was said, no token can end a
                response, or `template_kwargs` has a name that is taken.
        """
        for name in template_kwargs:
            require(name not in _TAKEN, "a name in data.chat_template_kwargs", name,
                    "one that the chat template itself reads, such as enable_thinking")  # fmt: skip
        if tokenizer.chat_template is None:
            tokenizer.chat_template = PLAIN_TEMPLATE
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs)
        self.end_token_id = self._find_end_token()
        """What the policy says last: the template's end-of-turn marker, else the eos token."""
        eos = tokenizer.eos_token_id
        self.end_token_ids = tuple(
            dict.fromkeys(token for token in (self.end_token_id, eos) if token is not None)
        )
        """Tokens that end a response in generation, `end_token_id` first."""
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self.end_token_ids[-1] if pad is None else pad
        """A filler; masks, not ids, say what is padding, so that it may equal an end token."""

    def prompt_tokens(self, prompt: str | Messages) -> list[int]:
        """The prompt and the opening of the assistant's turn. Text is one user message.

        Raises:
            DataError: the chat template refuses these messages.
            ConfigError: the chat template takes more time or memory than it may.
        """
        try:
            text = self._written(prompt, add_generation_prompt=True)
        except ConfigError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            roles = ", ".join(turn["role"] for turn in _as_dicts(prompt))
            raise DataError(
                f"the chat template refuses a prompt with the turns {roles}: {_told(error)}"
            ) from error
        return self._encode(text)

    def response_tokens(self, response: str) -> list[int]:
        """The response and its end token."""
        return [*self._encode(response), self.end_token_id]

    def decode_response(self, tokens: Iterable[int]) -> str:
        """What was said, without the end tokens and padding after it.

        Special tokens before the end stay visible: the policy did say them.
        """
        said = [int(token) for token in tokens]
        while said and said[-1] in (*self.end_token_ids, self.pad_token_id):
            said.pop()
        return self.show(said)

    def show(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones visible."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def stop_at(self, texts: Sequence[str]) -> StoppingCriteria | None:
        """Whether rows of tokens end with one of `texts`; None where there is none."""
        return StopStringCriteria(self.tokenizer, list(texts)) if texts else None

    def render(self, messages: str | Messages) -> str:
        """The dialogue as the chat template writes it, without an opening for the next turn.

        Raises whatever a chat template that refuses these messages raises.
        """
        return self._written(messages)

    def _written(self, messages: str | Messages, **form: bool) -> str:
        return write_dialogue(self.tokenizer, _as_dicts(messages), **form, **self.template_kwargs)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def _find_end_token(self) -> int:
        """The special token that follows an assistant's text in the template, else eos."""
        name = self.tokenizer.name_or_path
        question, answer = (message.content for message in _SENTINELS)
        try:
            _, found_question, rest = self.render(_SENTINELS).partition(question)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the chat template of tokenizer {name!r} fails on a user and an assistant turn: "
                f"{_told(error)}; data.chat_template_kwargs is {self.template_kwargs}"
            ) from error
        _, found_answer, after = rest.partition(answer)
        if not (found_question and found_answer):
            lost = "assistant's" if found_question else "user's"
            raise ConfigError(
                f"the chat template of tokenizer {name!r} does not reproduce the {lost} text; "
                "give the tokenizer a template that writes every turn as it is"
            )
        marker = self._encode(after.lstrip())[:1]
        added = self.tokenizer.added_tokens_decoder
        if marker and marker[0] in added and added[marker[0]].special:
            return marker[0]
        eos: int | None = self.tokenizer.eos_token_id
        if eos is None:
            raise ConfigError(
                f"tokenizer {name!r} has no eos token, and its chat template ends an assistant's "
                "turn with no special token, so that no response could end; set eos_token"
            )
        return eos


def _told(error: Exception) -> str:
    """What a template said in its own words, or how else it failed; in one line."""
    words = " ".join(str(error).split())[:200]
    return words if isinstance(error, TemplateError) else f"{type(error).__name__}: {words}"


def _as_dicts(messages: str | Messages) -> list[dict[str, str]]:
    if isinstance(messages, str):
        messages = (Message("user", messages),)
    return [{"role": message.role, "content": message.content} for message in messages]
