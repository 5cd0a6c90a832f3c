"""Conversion between messages and tokens; the only place that tokenises and decodes text."""

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

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
"""Chat template of a tokenizer that has none: the role and a colon, then the text on the next line.

    User:
    What is the capital of France?

    Assistant:
    Paris.

The response starts on a line of its own because a word after a newline is tokenised as the word
alone; after "Assistant: " a model would read a separate space token, which it has seldom seen
before a word.
"""

_SENTINELS = (Message("user", "sentinel question"), Message("assistant", "sentinel answer"))
"""Dialogue that is rendered to find out what the template writes around an assistant's text."""


class ChatFormat:
    """Conversion of prompts and responses into the tokens that the policy reads and generates.

    A training sequence is `prompt_tokens` followed by `response_tokens`, the same tokens as in
    generation: the prompt with the template's generation prompt (the opening of the assistant's
    turn), the response, and the end token. The template never renders the response itself, so
    nothing depends on a rendered dialogue being a prefix of the rendering with one more turn;
    templates that rewrite earlier turns (by removing reasoning, for example) are safe.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Store the tokenizer and find its end and padding tokens.

        Args:
            tokenizer: without a chat template it is given PLAIN_TEMPLATE, which is then saved with
                it.
            template_kwargs: extra variables for the chat template.

        Raises ConfigError where the template fails, or drops or rewrites the text of a turn, or no
        token can end a response, or `template_kwargs` has a name that the template never sees.
        """
        template_kwargs = dict(template_kwargs or {})
        taken = {*signature(tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
        names = ", ".join(sorted(taken & template_kwargs.keys()))
        allowed = f"variables of the chat template, which {names} is not"
        require(not names, "data.chat_template_kwargs", template_kwargs, allowed)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = PLAIN_TEMPLATE
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.end_token_id, self.end_marker = self._find_end_token()
        """Last token of every response, which is the template's end-of-turn marker, else the eos
        token; and the text of the marker, None if the template has none."""
        eos = tokenizer.eos_token_id
        ends = [self.end_token_id] if eos is None else [self.end_token_id, eos]
        self.end_token_ids = tuple(dict.fromkeys(ends))
        """Tokens that end a response in generation, `end_token_id` first."""
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self.end_token_ids[-1] if pad is None else pad
        """Token at padding positions; may equal an end token, since masks mark padding, not ids."""

    def prompt_tokens(self, prompt: str | Messages) -> list[int]:
        """Return the tokens of the prompt and of the opening of the assistant's turn.

        A string is treated as one user message. Without a message, it is the token with which a
        text starts: bos, else the eos of the text before it.

        Raises DataError where the chat template rejects these messages, or leaves out calls of
        tools.
        """
        if not prompt:
            bos = self.tokenizer.bos_token_id
            return [self.end_token_ids[-1] if bos is None else bos]
        return self._encode(self.opened(prompt))

    def response_tokens(self, response: str) -> list[int]:
        """Return the tokens of the response followed by the end token."""
        return [*self._encode(response), self.end_token_id]

    def decode_response(self, tokens: Iterable[int]) -> str:
        """Return the text of a response without the end and padding tokens that follow it.

        Special tokens before the end stay visible, since the policy generated them.
        """
        shown = [int(token) for token in tokens]
        while shown and shown[-1] in (*self.end_token_ids, self.pad_token_id):
            shown.pop()
        return self.show(shown)

    def show(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, with special tokens visible."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))

    def render(self, messages: Messages, **form: bool) -> str:
        """Return the dialogue as the chat template renders it, without a generation prompt.

        form: further arguments of `apply_chat_template`.
        Raises whatever exception a chat template that rejects these messages raises.
        """
        turns, options = [message.as_dict() for message in messages], form | self.template_kwargs
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **options))

    def opened(self, prompt: str | Messages) -> str:
        """Return the prompt as the template renders it, with the opening of the next turn."""
        turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        try:
            text = self.render(turns, add_generation_prompt=True)
        except Exception as error:  # a template is a program and may raise anything
            what = f"a prompt with the turns {', '.join(turn.role for turn in turns)}"
            raise DataError(f"the chat template refuses {what}: {error!r:.200}") from error
        names = [call["function"]["name"] for turn in turns for call in turn.tool_calls]
        if lost := [name for name in names if name not in text]:
            raise DataError(
                f"the chat template of tokenizer {self.tokenizer.name_or_path!r} leaves out the "
                f"call of the tool {lost[0]!r}; allowed: a model whose template writes them"
            )
        return text

    def without_template(self, prompt: str) -> str:
        """Return a rendered prompt without what the template writes around a single user turn."""
        before, text, after = self.opened(_SENTINELS[0].content).partition(_SENTINELS[0].content)
        return prompt.removeprefix(before).removesuffix(after) if text else prompt

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _find_end_token(self) -> tuple[int, str | None]:
        """Return the special token that follows an assistant's text in the template and its text,
        else eos and None."""
        name = self.tokenizer.name_or_path
        question, answer = (message.content for message in _SENTINELS)
        try:
            _, has_question, rest = self.render(_SENTINELS).partition(question)
        except Exception as error:
            raise ConfigError(
                f"the chat template of tokenizer {name!r} fails on a user and an assistant turn: "
                f"{error!r:.200}; data.chat_template_kwargs is {self.template_kwargs}"
            ) from error
        _, found, after = rest.partition(answer)
        if not found:
            lost = "the assistant's" if has_question else "the user's"
            raise ConfigError(
                f"the chat template of tokenizer {name!r} does not write {lost} text as it is, in "
                "a user and an assistant turn; give the tokenizer a template that writes every turn"
            )
        marker = self._encode(after.lstrip())[:1]
        added = self.tokenizer.added_tokens_decoder
        if marker and marker[0] in added and added[marker[0]].special:
            return marker[0], added[marker[0]].content
        eos: int | None = self.tokenizer.eos_token_id
        if eos is None:
            raise ConfigError(
                f"tokenizer {name!r} has no eos token, and its chat template ends an assistant's "
                "turn with no special token, so that no response could end; set eos_token"
            )
        return eos, None
