"""A conversation with one or several models: text in, events out. No terminal is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from lightning_rlhf.core.errors import CheckpointError, LogitsError
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message, Messages
from lightning_rlhf.models.build_roles import check_fingerprint, check_positions, start_from
from lightning_rlhf.models.checkpoint import ADAPTER, Final, find, json_object
from lightning_rlhf.models.config import POLICY, REFERENCE, SFT
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.collector import as_responses
from lightning_rlhf.rollout.native import last_hidden, position_ids
from lightning_rlhf.rollout.score import predict
from lightning_rlhf.runs.parents import trained_as

if TYPE_CHECKING:  # its imports are in the extra "serve"
    from lightning_rlhf.rewards.server import Score

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Last character of a text that ends within a character of several tokens."""


@dataclass(frozen=True)
class Piece:
    """The next piece of a reply."""

    model: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole reply."""

    model: str
    text: str
    tokens: int
    """Number of tokens, the end token included."""
    score: float | None
    """Score of the reward; None without a reward."""
    kl: float | None
    """log p(reply) - log q(reply), nats, of the model p and the SFT model q; None of the latter."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A model that replies."""

    name: str
    roles: Roles
    role: str
    """Role of the model among `roles`; the reference is the SFT model where it is another."""
    chat: ChatFormat

    @torch.no_grad()
    def tokens(
        self, prompt: Sequence[int], most: int, temperature: float, generator: torch.Generator
    ) -> Iterator[int]:
        """Yield the tokens of a response, at most `most`, the end token included.

        temperature: divisor of the logits; 0 takes the most probable token.

        Raises LogitsError where there is no distribution to draw from.
        """
        roles = self.roles
        cache = DynamicCache(config=roles.causal_lm.config) if roles.caches else None
        read, new = torch.tensor([prompt], device=roles.device), len(prompt)
        for _ in range(most):
            with roles.use_role(self.role):
                if cache is None:
                    hidden = roles.hidden(read)[:, -1]
                else:
                    mask = torch.ones_like(read, dtype=torch.bool)
                    positions = position_ids(mask)[:, -new:]
                    hidden = last_hidden(roles, cache, read[:, -new:], mask, positions)
                logits = roles.head(hidden).float().cpu()[0]
            if not logits.isfinite().any() or logits.isnan().any():
                raise LogitsError(f"model {self.name}")
            if temperature == 0:
                token = int(logits.argmax())
            else:
                shares = F.softmax(logits / temperature, dim=-1)
                token = int(torch.multinomial(shares, 1, generator=generator))
            yield token
            if token in self.chat.end_token_ids:
                return
            read, new = F.pad(read, (0, 1), value=token), 1

    def kl(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float
    ) -> float | None:
        """Return log p(response) - log q(response), nats, of the model p and the SFT model q.

        Both are at `temperature`, or at 1 where that is 0. None where the model is the SFT model.
        """
        roles = self.roles
        if self.role == REFERENCE or not response:
            return None
        batch = as_responses([list(prompt)], [list(response)], self.chat.pad_token_id)
        rows, logprobs = MicrobatchSize("chat", 1), []
        for role in (self.role, REFERENCE):
            with roles.use_role(role):
                found = predict(batch.to(roles.device), roles, None, temperature or 1.0, rows.rows)
                logprobs.append(found[0].cpu().double().sum())
        return float(logprobs[0] - logprobs[1])


@dataclass(kw_only=True)
class Conversation:
    """The same questions to each model, which sees its own replies alone."""

    speakers: Sequence[Speaker]
    score: Score | None
    """Function of the reward that scores replies; None without one."""
    temperature: float
    """Divisor of the logits; 0 takes the most probable token."""
    max_tokens: int
    """Largest number of tokens of a reply."""
    generator: torch.Generator
    system: str | None = None
    """System message before the first turn."""
    turns: dict[str, list[Message]] = field(default_factory=dict)
    """Name of a model -> the turns of its dialogue, without the system message."""
    numbers: dict[str, list[Reply]] = field(default_factory=dict)
    """Name of a model -> its replies, with their numbers."""

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self.numbers.clear()

    def ask(self, text: str) -> Iterator[Piece | Reply]:
        """Yield the pieces of each model's reply, then the reply; the models take turns.

        The turn is kept once all have replied, so that an interrupted one leaves nothing.

        Raises:
            DataError: the chat template refuses the turns.
            ConfigError: a model has no positions for a dialogue of this length.
        """
        asked = {speaker.name: self._asked(speaker, text) for speaker in self.speakers}
        speaking = [self._speak(speaker, asked[speaker.name]) for speaker in self.speakers]
        replies: list[Reply] = []
        while speaking:
            for one in list(speaking):
                event = next(one, None)
                if event is None:
                    speaking.remove(one)
                    continue
                if isinstance(event, Reply):
                    replies.append(event)
                yield event
        for reply in replies:
            turns = self.turns.setdefault(reply.model, [])
            turns += [Message("user", text), Message("assistant", reply.text)]
            self.numbers.setdefault(reply.model, []).append(reply)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each model's dialogue as a row of data, with the numbers of its replies."""
        for speaker in self.speakers:
            turns = [*self._before(), *self.turns.get(speaker.name, ())]
            replies = self.numbers.get(speaker.name, [])
            yield {
                "model": speaker.name,
                "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
                "scores": [reply.score for reply in replies],
                "kl": [reply.kl for reply in replies],
            }

    def _before(self) -> Messages:
        return () if self.system is None else (Message("system", self.system),)

    def _asked(self, speaker: Speaker, text: str) -> Messages:
        return (*self._before(), *self.turns.get(speaker.name, ()), Message("user", text))

    def _speak(self, speaker: Speaker, asked: Messages) -> Iterator[Piece | Reply]:
        chat, tokens, shown = speaker.chat, [], ""
        prompt = chat.prompt_tokens(asked)
        check_positions(
            speaker.roles, len(prompt) + self.max_tokens, "the dialogue with a reply", "use /reset"
        )
        for token in speaker.tokens(prompt, self.max_tokens, self.temperature, self.generator):
            tokens.append(token)
            text = chat.decode_response(tokens)
            if len(text) > len(shown) and not text.endswith(UNFINISHED):
                yield Piece(speaker.name, text[len(shown) :])
                shown = text
        text = chat.decode_response(tokens)
        yield Reply(
            model=speaker.name,
            text=text,
            tokens=len(tokens),
            score=None if self.score is None else self._scored(asked, text),
            kl=speaker.kl(prompt, tokens, self.temperature),
        )

    def _scored(self, asked: Messages, text: str) -> float:
        assert self.score is not None
        turns: Any = [{"role": turn.role, "content": turn.content} for turn in asked]
        return float(self.score([turns], [text], {})[0])


def load_speaker(name: str, final: Final, device: torch.device) -> Speaker:
    """Load the model of a `final/` folder, with its SFT model as the reference on the same base.

    Whole weights of a later stage have no reference beside them, nor has an adapter on the base
    that was copied without its SFT model.

    Raises CheckpointError where the folder is no language model of a stage, or does not fit its
    base.
    """
    config, template_kwargs = trained_as(final)
    manifest = final.manifest
    assert manifest is not None
    if manifest.stage == "rm":
        raise CheckpointError(f"{final.path} is a reward model; allowed: --reward {final.path}")
    parent = final.parent(SFT)
    config = replace(config, gradient_checkpointing=False)
    is_alone = parent is None or (not parent.is_dir() and stands_on_base(final))
    if manifest.stage == "sft" or not final.is_adapter or is_alone:
        roles, role = start_from(config, final, trainable=False, seed=manifest.base_seed), REFERENCE
    else:
        assert parent is not None
        sft, role = find(str(parent), f"the SFT model of {final.path}"), POLICY
        base = final.base_folder if sft.is_adapter else str(sft.path)
        below = None if base is None else find(base, f"the base of {final.path}")
        roles = start_from(config, below, trainable=False, seed=manifest.base_seed)
        roles.load_adapter(POLICY, final.path, trainable=False)
        if sft.is_adapter:  # the policy's adapter includes it, so it is no part of the policy
            roles.load_adapter(SFT, sft.path, trainable=False)
        check_fingerprint(roles, POLICY, final, "self")
    chat = ChatFormat(load_tokenizer(config, final.path), template_kwargs)
    return Speaker(name=name, roles=roles.to(device), role=role, chat=chat)


def stands_on_base(final: Final) -> bool:
    """Return True if an adapter is one on the base weights, in which SFT's adapter is included."""
    assert final.manifest is not None
    return final.is_adapter and (
        json_object(final.path / ADAPTER)["base_model_name_or_path"] == final.manifest.base
    )
