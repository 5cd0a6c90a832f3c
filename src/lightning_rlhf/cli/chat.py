"""lightning-rlhf chat: a conversation with one or several models in a terminal."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from rich import get_console
from rich.table import Table
from rich.text import Text
from torch.nn import functional as F
from transformers import DynamicCache

from lightning_rlhf.cli.arguments import FLAG, Options, parse_command
from lightning_rlhf.cli.commands import checked_final
from lightning_rlhf.core import errors
from lightning_rlhf.core.validation import PositiveInt, Seed, Temperature, check_value, described
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message
from lightning_rlhf.evaluation import build_rewards, policies
from lightning_rlhf.io.console import Working, print_line, visible
from lightning_rlhf.io.storage import Kind, make_folder, written_whole
from lightning_rlhf.models import build_roles, checkpoint, loading
from lightning_rlhf.models.config import POLICY, REFERENCE, SFT
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout import collector, native
from lightning_rlhf.rollout.score import predict
from lightning_rlhf.runs import accelerator, folders

HELP = """/temperature NUMBER   0 takes the most probable token
/system TEXT          system message before the first turn; without TEXT none. Starts over
/reset                forget all turns
/save [FILE]          write the dialogues to a new file of JSON lines, a row for each model
/quit, Ctrl-D         end; the dialogues are saved
/help                 this list
Ctrl-C stops a reply."""
OPTIONS: Options = {
    "finals": {
        "nargs": "+",
        "metavar": "FINAL",
        "help": "run or final/ of sft or later, or hub id",
    },
    "--reward": {"metavar": "FINAL", "help": "model of the scores (that of the last stage)"},
    "--temperature": {"type": float, "help": "divisor of logits; 0: likeliest token (as in run)"},
    "--max-tokens": {"type": int, "metavar": "N", "help": "tokens of a reply (as in the run)"},
    "--system": {"metavar": "TEXT", "help": "system message before the first turn"},
    "--seed": {"type": int, "default": 0, "help": "seed of what is sampled (%(default)s)"},
    "--trust-remote-code": FLAG | {"help": "run code that a model brings, where it asks for it"},
}
SAVED = "outputs/chats"
"""Folder in which dialogues are saved that have no name."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Last character of a text that ends within a character of several tokens."""
ZeroOrTemperature = Annotated[
    Annotated[float, Field(ge=0, le=0)] | Annotated[Temperature, Field(le=100)],
    described("0, or a number from 1e-6 to 100"),
]


@dataclass(frozen=True)
class Reply:
    """A question, and the reply of a model."""

    question: str
    text: str
    tokens: int
    """Number of tokens, the end token included."""
    score: float | None
    """Score of the reward; None without a reward."""
    kl: float | None
    """log p(reply) - log q(reply), nats, of the model p and the SFT model q; None of the latter."""


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """A model that replies, and its turns."""

    name: str
    roles: Roles
    role: str
    """Role of the model among `roles`; the reference is the SFT model where it is another."""
    chat: ChatFormat
    turns: list[Reply] = field(default_factory=list)

    @torch.no_grad()
    def tokens(
        self, prompt: Sequence[int], most: int, temperature: float, generator: torch.Generator
    ) -> Iterator[int]:
        """Yield the tokens of a response, at most `most`, the end token included.

        temperature: divisor of the logits; 0 takes the most probable token.

        Raises LogitsError where there is no distribution to draw from.
        """
        roles = self.roles
        cache = DynamicCache(config=roles.causal_lm.config) if roles.cache_argument else None
        read, new = torch.tensor([prompt], device=roles.device), len(prompt)
        for _ in range(most):
            mask = torch.ones_like(read, dtype=torch.bool)
            at = native.position_ids(mask)[:, -new:]
            with roles.use_role(self.role):
                if cache is None:
                    hidden = roles.hidden(read)[:, -1]
                else:
                    hidden = native.last_hidden(roles, cache, read[:, -new:], mask, at)
                logits = roles.head(hidden).float().cpu()
            if not logits.isfinite().any() or logits.isnan().any():
                raise errors.LogitsError(f"model {self.name}")
            shares = F.softmax(logits / (temperature or 1.0), dim=-1)
            drawn = torch.multinomial(shares, 1, generator=generator) if temperature else None
            yield (token := int(logits.argmax() if drawn is None else drawn))
            if token in self.chat.end_token_ids:
                return
            read, new = F.pad(read, (0, 1), value=token), 1

    @torch.no_grad()
    def kl(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float
    ) -> float | None:
        """Return log p(response) - log q(response), nats, of the model p and the SFT model q.

        Both are at `temperature`, or at 1 where that is 0. None where the model is the SFT model.
        """
        if self.role == REFERENCE:
            return None
        roles, found, pad = self.roles, list[float](), self.chat.pad_token_id
        batch = collector.as_responses([prompt], [response], pad).to(roles.device)
        for role in (self.role, REFERENCE):
            with roles.use_role(role):
                logprobs, _ = predict(batch, roles, None, temperature or 1.0, 1)
            found.append(float(logprobs.double().sum()))
        return found[0] - found[1]


def load_chat_model(name: str, final: checkpoint.Final, device: torch.device) -> ChatModel:
    """Load the model of a `final/` folder, with its SFT model as the reference on the same base.

    Whole weights of a later stage have no reference beside them, nor has an adapter on the base
    that was copied without its SFT model.

    Raises CheckpointError where the folder is no language model of a stage, or does not fit its
    base.
    """
    config, template_kwargs = folders.trained_as(final)
    manifest, parent = final.manifest, final.parent(SFT)
    assert manifest is not None
    if manifest.stage == "rm":
        message = f"{final.path} is a reward model; allowed: --reward {final.path}"
        raise errors.CheckpointError(message)
    config = replace(config, gradient_checkpointing=False)
    is_on_base = False
    if final.is_adapter:  # one on the base weights includes that of SFT
        adapter = checkpoint.json_object(final.path / checkpoint.ADAPTER)
        is_on_base = adapter.get("base_model_name_or_path") == manifest.base
    below: checkpoint.Final | None = final
    sft: checkpoint.Final | None = None
    if final.is_adapter and parent is not None and (parent.is_dir() or not is_on_base):
        sft = checkpoint.find(str(parent), f"the SFT model of {final.path}")
        base = final.base_folder if sft.is_adapter else str(sft.path)
        below = None if base is None else checkpoint.find(base, f"the base of {final.path}")
    roles = build_roles.start_from(config, below, trainable=False, seed=manifest.base_seed)
    if sft is not None:
        roles.load_adapter(POLICY, final.path, trainable=False)
        if sft.is_adapter:  # the policy's adapter includes it, so it is no part of the policy
            roles.load_adapter(SFT, sft.path, trainable=False)
        build_roles.check_fingerprint(roles, POLICY, final, "self")
    chat = ChatFormat(loading.load_tokenizer(config, final.path), template_kwargs)
    role = REFERENCE if sft is None else POLICY
    return ChatModel(name=name, roles=roles.to(device), role=role, chat=chat)


@dataclass(kw_only=True)
class Conversation:
    """The same questions to each model, which sees its own replies alone."""

    models: Sequence[ChatModel]
    score: Callable[[list[Any], list[str], Mapping[str, Any]], Sequence[float]] | None
    """Function of the reward that scores replies; None without one."""
    temperature: float
    """Divisor of the logits; 0 takes the most probable token."""
    max_tokens: int
    """Largest number of tokens of a reply."""
    generator: torch.Generator
    system: str | None = None
    """System message before the first turn."""

    def ask(self, text: str, show: Callable[[str], object]) -> None:
        """Add the reply of each model; `show` is called with the pieces of each as it grows.

        The turn is kept once all have replied, so that an interrupted one leaves nothing.

        Raises:
            DataError: the chat template refuses the turns.
            ConfigError: a model has no positions for a dialogue of this length.
        """
        replies = []
        for one in self.models:
            chat, tokens, reply, shown = one.chat, list[int](), "", ""
            dialogue = [*self.messages(one), Message("user", text)]
            prompt, most = chat.prompt_tokens(tuple(dialogue)), self.max_tokens
            what = "the dialogue and a token of the reply"
            free = build_roles.check_positions(one.roles, len(prompt) + 1, what, "use /reset")
            most = most if free is None else min(most, free + 1)
            for token in one.tokens(prompt, most, self.temperature, self.generator):
                tokens.append(token)
                reply = chat.decode_response(tokens)
                if len(reply) > len(shown) and not reply.endswith(UNFINISHED):
                    show(reply[len(shown) :])
                    shown = reply
            rows: Any = [[message.as_dict() for message in dialogue]]
            score = None if self.score is None else float(self.score(rows, [reply], {})[0])
            kl = one.kl(prompt, tokens, self.temperature)
            replies.append(Reply(question=text, text=reply, tokens=len(tokens), score=score, kl=kl))
        for one, found in zip(self.models, replies, strict=True):
            one.turns.append(found)

    def messages(self, model: ChatModel) -> list[Message]:
        """Return the dialogue of a model."""
        turns = [] if self.system is None else [Message("system", self.system)]
        for turn in model.turns:
            turns += [Message("user", turn.question), Message("assistant", turn.text)]
        return turns

    def restart(self, system: str | None) -> None:
        """Forget all turns; the next one follows the system message, where there is one."""
        self.system = system
        for model in self.models:
            model.turns.clear()
        print_line(f"all turns are forgotten; system message: {system}")

    def save(self, file: Path, kind: Kind) -> None:
        """Write each model's dialogue as a row of data, with the numbers of its replies.

        Raises StorageError where the file cannot be written.
        """
        rows = ""
        for one in self.models:
            row: dict[str, Any] = {"model": one.name}
            row["messages"] = [message.as_dict() for message in self.messages(one)]
            row |= {"scores": [x.score for x in one.turns], "kl": [x.kl for x in one.turns]}
            rows += json.dumps(row, ensure_ascii=False) + "\n"
        try:
            make_folder(file.parent)
            with written_whole(file, kind=kind) as path:
                path.write_text(rows, encoding="utf-8")
        except OSError as error:
            raise errors.StorageError(f"{file} cannot be written: {error}") from error
        print_line(f"saved: {file}")


def chat(arguments: Sequence[str]) -> None:
    """Talk to one model, or to several beside each other. Below each reply are the score of the
    reward and the KL to the SFT model."""
    conversation = opened(arguments)
    with suppress(ImportError):
        import readline  # noqa: F401  lines can be edited and called back
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # of bytes that are not UTF-8
    file = Path(SAVED) / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.jsonl"
    answer_lines(conversation, iter(partial(input, "> "), None), file)


def opened(arguments: Sequence[str]) -> Conversation:
    """Return the conversation of the command line's arguments, with its models loaded.

    Raises an RLHFError where an argument is wrong or a model cannot be loaded.
    """
    keys = "While it runs: " + HELP.replace("\n", "; ")
    given = parse_command(chat, arguments, OPTIONS, keys)
    check_value("--temperature", given.temperature, ZeroOrTemperature | None)
    check_value("--max-tokens", given.max_tokens, PositiveInt | None)
    check_value("--seed", given.seed, Seed)
    # The folder of a run stands for the final/ in it.
    insides = {source: Path(source, folders.FINAL, checkpoint.MANIFEST) for source in given.finals}
    sources = [str(insides[x].parent) if insides[x].is_file() else x for x in given.finals]
    finals = [checked_final(source, trusted=given.trust_remote_code) for source in sources]
    paths = [str(final.path.resolve()) for final in finals]
    errors.require(len({*paths}) == len(paths), "FINAL", paths, "each model once")
    temperatures, lengths = zip(*map(folders.sampled_as, finals), strict=True)
    rewards = (final.parent("reward") for final in finals)  # the one that a policy was trained on
    reward = given.reward or next((str(path) for path in rewards if path and path.is_dir()), None)
    accelerator.quiet_libraries()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Working("loading the models"):
        return Conversation(
            models=list(map(load_chat_model, policies.short_names(paths), finals, repeat(device))),
            score=None if reward is None else build_rewards.text_scorer(reward, []),
            temperature=temperatures[-1] if given.temperature is None else given.temperature,
            max_tokens=given.max_tokens or max(lengths),
            generator=torch.Generator().manual_seed(given.seed),
            system=None if given.system is None else clean(given.system),
        )


def clean(text: str) -> str:
    """Return `text` with U+FFFD for what is no UTF-8, and for NUL, which no file name has."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\0", UNFINISHED)


def answer_lines(conversation: Conversation, lines: Iterable[str], file: Path) -> None:
    """Answer each line, or run it where it begins with a slash; save the dialogues at the end.

    file: where the dialogues are saved that have not been since their last turn.
    """
    models, is_saved = conversation.models, True
    names = ", ".join(model.name for model in models)
    print_line(f"{names} at temperature {conversation.temperature:g}; /help lists the commands")

    def show(piece: str) -> None:
        if len(models) == 1:
            get_console().print(Text(visible(piece)), end="", soft_wrap=True)

    try:
        for line in lines:
            word, _, rest = (text := clean(line).strip()).partition(" ")
            rest = rest.strip()
            try:
                match word:
                    case "":
                        continue
                    case "/quit":
                        break
                    case "/help":
                        print_line(HELP)
                    case "/save":
                        named = Path(os.path.expanduser(rest)) if rest else file
                        conversation.save(named, "new file" if rest else "file")
                        is_saved = True
                    case "/reset":
                        conversation.restart(conversation.system)
                    case "/system":
                        conversation.restart(rest or None)
                    case "/temperature":
                        heat: Any = rest
                        with suppress(ValueError):
                            heat = float(rest)
                        check_value(word, heat, ZeroOrTemperature)
                        conversation.temperature = heat
                    case _ if word.startswith("/"):
                        errors.require(False, "the command", word, "those of /help")
                    case _:
                        conversation.ask(text, show)
                        is_saved = False
                        get_console().print(last_turn(models))
            except KeyboardInterrupt:
                print_line("stopped; the turn is not kept")
            except errors.RLHFError as error:
                print_line(str(error), "red")
    except (EOFError, KeyboardInterrupt):
        print()
    finally:
        if not is_saved:
            conversation.save(file, "file")


def last_turn(models: Sequence[ChatModel]) -> Text | Table:
    """Return the numbers of the only reply, or all replies beside each other with their numbers."""
    replies, numbers = [model.turns[-1] for model in models], []
    for reply in replies:
        score = "" if reply.score is None else f"score {reply.score:+z.2f} · "
        kl = "" if reply.kl is None else f"KL {reply.kl:+z.2f} nats · "
        numbers.append(Text(score + kl + errors.counted(reply.tokens, "token"), style="dim"))
    if len(replies) == 1:
        return Text("\n").append(numbers[0])
    table = Table(expand=True)
    for model in models:
        table.add_column(Text(model.name), ratio=1, overflow="fold")
    table.add_row(*(Text(visible(reply.text)) for reply in replies), end_section=True)
    table.add_row(*numbers)
    return table
