"""lightning-rlhf chat: a conversation with one or several models in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.nn import functional as F
from transformers import DynamicCache

from lightning_rlhf.cli.export import checked_final
from lightning_rlhf.core.errors import (
    CheckpointError,
    ConfigError,
    LogitsError,
    RLHFError,
    counted,
    require,
)
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.validation import PositiveInt, Seed, Temperature, check_value, described
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message
from lightning_rlhf.evaluation.build_rewards import text_scorer
from lightning_rlhf.io.console import Working, visible
from lightning_rlhf.io.storage import Kind, written_whole
from lightning_rlhf.models.build_roles import check_fingerprint, check_positions, start_from
from lightning_rlhf.models.checkpoint import ADAPTER, MANIFEST, Final, find, json_object
from lightning_rlhf.models.config import POLICY, REFERENCE, SFT
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.collector import as_responses
from lightning_rlhf.rollout.native import last_hidden, position_ids
from lightning_rlhf.rollout.score import predict
from lightning_rlhf.runs.console import quiet_libraries
from lightning_rlhf.runs.folders import FINAL
from lightning_rlhf.runs.parents import reward_of, sampled_as, short_names, trained_as

if TYPE_CHECKING:  # its imports are in the extra "serve"
    from lightning_rlhf.rewards.server import Score

HELP = """/temperature NUMBER   0 takes the most probable token
/system TEXT          system message before the first turn; without TEXT none. Starts over
/reset                forget all turns
/save [FILE]          write the dialogues to a new file of JSON lines, a row for each model
/quit, Ctrl-D         end; the dialogues are saved
/help                 this list
Ctrl-C stops a reply."""
SAVED = "outputs/chats"
"""Folder in which dialogues are saved that have no name."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Last character of a text that ends within a character of several tokens."""
ZeroOrTemperature = Annotated[
    Annotated[float, Field(ge=0, le=0)] | Annotated[Temperature, Field(le=100)],
    described("0, or a number from 1e-6 to 100"),
]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of a model."""

    model: str
    text: str
    tokens: int
    """Number of tokens, the end token included."""
    score: float | None
    """Score of the reward; None without a reward."""
    kl: float | None
    """log p(reply) - log q(reply), nats, of the model p and the SFT model q; None of the latter."""

    @property
    def numbers(self) -> str:
        """Return the numbers of the reply in a line."""
        parts = [] if self.score is None else [f"score {self.score:+z.2f}"]
        parts += [] if self.kl is None else [f"KL {self.kl:+z.2f} nats"]
        return " · ".join([*parts, counted(self.tokens, "token")])


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
    # An adapter on the base weights includes that of SFT.
    is_on_base = final.is_adapter and (
        json_object(final.path / ADAPTER)["base_model_name_or_path"] == manifest.base
    )
    is_alone = parent is None or (is_on_base and not parent.is_dir())
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
    turns: list[tuple[str, Mapping[str, Reply]]] = field(default_factory=list)
    """Each question with the replies by the name of the model."""

    def ask(self, text: str, show: Callable[[str], None]) -> list[Reply]:
        """Return the reply of each model; `show` is called with the pieces of each as it grows.

        The turn is kept once all have replied, so that an interrupted one leaves nothing.

        Raises:
            DataError: the chat template refuses the turns.
            ConfigError: a model has no positions for a dialogue of this length.
        """
        replies = [self._reply(speaker, text, show) for speaker in self.speakers]
        self.turns.append((text, {reply.model: reply for reply in replies}))
        return replies

    def messages(self, name: str) -> list[Message]:
        """Return the dialogue of a model."""
        turns = [] if self.system is None else [Message("system", self.system)]
        for text, replies in self.turns:
            turns += [Message("user", text), Message("assistant", replies[name].text)]
        return turns

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each model's dialogue as a row of data, with the numbers of its replies."""
        for name in (speaker.name for speaker in self.speakers):
            replies = [found[name] for _, found in self.turns]
            yield {
                "model": name,
                "messages": as_columns(self.messages(name)),
                "scores": [reply.score for reply in replies],
                "kl": [reply.kl for reply in replies],
            }

    def _reply(self, speaker: Speaker, text: str, show: Callable[[str], None]) -> Reply:
        chat, tokens, shown = speaker.chat, list[int](), ""
        asked = [*self.messages(speaker.name), Message("user", text)]
        prompt = chat.prompt_tokens(tuple(asked))
        check_positions(
            speaker.roles, len(prompt) + self.max_tokens, "the dialogue with a reply", "use /reset"
        )
        for token in speaker.tokens(prompt, self.max_tokens, self.temperature, self.generator):
            tokens.append(token)
            reply = chat.decode_response(tokens)
            if len(reply) > len(shown) and not reply.endswith(UNFINISHED):
                show(reply[len(shown) :])
                shown = reply
        reply = chat.decode_response(tokens)
        return Reply(
            model=speaker.name,
            text=reply,
            tokens=len(tokens),
            score=None
            if self.score is None
            else float(self.score([as_columns(asked)], [reply], {})[0]),
            kl=speaker.kl(prompt, tokens, self.temperature),
        )


def as_columns(turns: Sequence[Message]) -> Any:
    """Return turns as they stand in a row of data."""
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def chat(arguments: Sequence[str]) -> None:
    """Talk until /quit or the end of the input."""
    conversation = opened(arguments)
    file = Path(SAVED) / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.jsonl"
    talk(conversation, typed(), Console(), file)


def opened(arguments: Sequence[str]) -> Conversation:
    """Return the conversation of the command line's arguments, with its models loaded.

    Raises an RLHFError where an argument is wrong or a model cannot be loaded.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf chat",
        description="Talk to one model, or to several beside each other. Below each reply are the "
        "score of the reward and the KL to the SFT model.",
        epilog="While it runs: " + HELP.replace("\n", "; "),
    )
    option = parser.add_argument
    option(
        "finals", nargs="+", metavar="FINAL",
        help="folder of a run of stage=sft or a later one, its final/, or the hub id of one",
    )  # fmt: skip
    option(
        "--reward", metavar="FINAL",
        help="reward model or sequence classifier that scores the replies (that of the last stage)",
    )  # fmt: skip
    option(
        "--temperature", type=float, metavar="T",
        help="divisor of the logits, 0 for the most probable token (that of the last model's run)",
    )  # fmt: skip
    option("--max-tokens", type=int, metavar="N", help="tokens of a reply (as in the model's run)")
    option("--system", metavar="TEXT", help="system message before the first turn")
    option("--seed", type=int, default=0, help="seed of what is sampled (%(default)s)")
    option(
        "--trust-remote-code", action="store_true",
        help="run code that comes with the model where the folder's configuration asks for it",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    check_value("--temperature", given.temperature, ZeroOrTemperature | None)
    check_value("--max-tokens", given.max_tokens, PositiveInt | None)
    check_value("--seed", given.seed, Seed)
    finals = []
    for source in given.finals:  # the folder of a run stands for the final/ in it
        is_run = (Path(source) / FINAL / MANIFEST).is_file()
        path = str(Path(source) / FINAL) if is_run else source
        finals.append(checked_final(path, trusted=given.trust_remote_code))
    trained = [sampled_as(final) for final in finals]
    names = short_names(finals)
    reward = given.reward or reward_of(finals)

    quiet_libraries()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Working("loading the models"):
        speakers = [load_speaker(*one, device) for one in zip(names, finals, strict=True)]
        score = None if reward is None else text_scorer(reward, [])
    return Conversation(
        speakers=speakers,
        score=score,
        temperature=trained[-1][0] if given.temperature is None else given.temperature,
        max_tokens=given.max_tokens or max(most for _, most in trained),
        generator=torch.Generator().manual_seed(given.seed),
        system=None if given.system is None else clean(given.system),
    )


def typed() -> Iterator[str]:
    """Yield the lines that are typed, until the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited and called back
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # of bytes that are not UTF-8
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def clean(text: str) -> str:
    """Return `text` with U+FFFD for what is no character: Python reads a byte that is not UTF-8 as
    half of a surrogate pair, which tokenizers and files refuse, as names of files refuse NUL."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def talk(conversation: Conversation, lines: Iterator[str], console: Console, file: Path) -> None:
    """Answer each line, or obey it where it begins with a slash; save what was said at the end.

    file: where the dialogues are saved that have not been since their last turn.
    """

    def show(text: str, end: str = "\n", style: str = "") -> None:
        console.print(
            visible(text), end=end, style=style, markup=False, highlight=False, soft_wrap=True
        )

    names = [speaker.name for speaker in conversation.speakers]
    show(f"{', '.join(names)} at temperature {conversation.temperature:g}; "
         "/help lists the commands")  # fmt: skip
    is_saved = True
    try:
        for line in lines:
            word, _, rest = (text := clean(line).strip()).partition(" ")
            rest = rest.strip()
            try:
                match word:
                    case "":
                        pass
                    case "/quit":
                        break
                    case "/help":
                        show(HELP)
                    case "/save":
                        named = Path(os.path.expanduser(rest))
                        write_rows(conversation, *((named, "new file") if rest else (file, "file")))
                        show(f"saved: {named if rest else file}")
                        is_saved = True
                    case "/reset":
                        conversation.turns.clear()
                        show("all turns are forgotten")
                    case "/system":
                        conversation.turns.clear()
                        conversation.system = rest or None
                        show("all turns are forgotten; the next one follows the system message"
                             if rest else "all turns are forgotten; no system message")  # fmt: skip
                    case "/temperature":
                        value: float | str = rest
                        with contextlib.suppress(ValueError):
                            value = float(rest)
                        check_value(word, value, ZeroOrTemperature)
                        conversation.temperature = float(value)
                        show(f"temperature {conversation.temperature:g}")
                    case _ if word.startswith("/"):
                        known = "/temperature, /system, /reset, /save, /quit, /help"
                        require(False, "the command", word, known)
                    case _ if len(names) == 1:  # the reply as it grows
                        (reply,) = conversation.ask(text, lambda piece: show(piece, end=""))
                        show("")
                        show(reply.numbers, style="dim")
                        is_saved = False
                    case _:
                        console.print(beside(conversation.ask(text, lambda piece: None)))
                        is_saved = False
            except KeyboardInterrupt:
                show("stopped; the turn is not kept")
            except RLHFError as error:
                show(str(error), style="red")
    finally:
        if not is_saved:
            write_rows(conversation, file, "file")
            show(f"saved: {file}")


def beside(replies: Sequence[Reply]) -> Table:
    """Return the replies to a question beside each other, with their numbers below."""
    table = Table(expand=True)
    for reply in replies:
        table.add_column(Text(reply.model), ratio=1, overflow="fold")
    table.add_row(*(Text(visible(reply.text)) for reply in replies))
    table.add_section()
    table.add_row(*(Text(reply.numbers, style="dim") for reply in replies))
    return table


def write_rows(conversation: Conversation, file: Path, kind: Kind) -> None:
    """Write the dialogues to a file. Raises ConfigError where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file, kind=kind) as path:
            rows = (json.dumps(row, ensure_ascii=False) for row in conversation.rows())
            path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
