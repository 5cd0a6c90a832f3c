"""lightning-rlhf chat: a conversation with one or several models in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rlhf.cli.export import refuse_code
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RLHFError, counted, require
from lightning_rlhf.core.validation import PositiveInt, Seed, Temperature, check_value, described
from lightning_rlhf.evaluation.build_rewards import text_scorer
from lightning_rlhf.io.console import Working, visible
from lightning_rlhf.io.storage import Kind, written_whole
from lightning_rlhf.models.checkpoint import MANIFEST, check_weights, find
from lightning_rlhf.runs.console import quiet_libraries
from lightning_rlhf.runs.folders import FINAL
from lightning_rlhf.runs.parents import reward_of, sampled_as, short_names
from lightning_rlhf.stages.chat import Conversation, Piece, Reply, load_speaker

HELP = """/temperature NUMBER   0 takes the most probable token
/system TEXT          system message before the first turn; without TEXT none. Starts over
/reset                forget all turns
/save [FILE]          write the dialogues to a new file of JSON lines, a row for each model
/quit, Ctrl-D         end; the dialogues are saved
/help                 this list
Ctrl-C stops a reply."""
SAVED = "outputs/chats"
"""Folder in which dialogues are saved that have no name."""
ZeroOrTemperature = Annotated[
    Annotated[float, Field(ge=0, le=0)] | Annotated[Temperature, Field(le=100)],
    described("0, or a number from 1e-6 to 100"),
]


def chat(arguments: Sequence[str]) -> None:
    """Talk until /quit or the end of the input."""
    conversation = opened(parser().parse_args(arguments))
    file = Path(SAVED) / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.jsonl"
    talk(conversation, typed(), Console(), file)


def opened(given: argparse.Namespace) -> Conversation:
    """Return the conversation of the command line's arguments, with its models loaded.

    Raises an RLHFError where an argument is wrong or a model cannot be loaded.
    """
    check_value("--temperature", given.temperature, ZeroOrTemperature | None)
    check_value("--max-tokens", given.max_tokens, PositiveInt | None)
    check_value("--seed", given.seed, Seed)
    # The folder of a run stands for the final/ in it.
    inside = [Path(source) / FINAL for source in given.finals]
    finals = [
        find(str(final) if (final / MANIFEST).is_file() else source, "FINAL")
        for source, final in zip(given.finals, inside, strict=True)
    ]
    for final in finals:
        check_weights(final.path)
        if final.manifest is None:
            raise CheckpointError(
                f"{final.path} has no manifest.json; allowed: the final/ of a run"
            )
        if not given.trust_remote_code:
            refuse_code(final.manifest.config, final.path / "manifest.json")
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
    names = ", ".join(speaker.name for speaker in conversation.speakers)
    shown = f"{names} at temperature {conversation.temperature:g}; /help lists the commands"
    console.print(visible(shown), markup=False)
    is_saved = True
    try:
        for line in lines:
            word, _, rest = clean(line).strip().partition(" ")
            try:
                if word == "/quit":
                    break
                if word == "/save":
                    named = Path(os.path.expanduser(rest.strip()))
                    save(conversation, console, *((named, "new file") if rest else (file,)))
                    is_saved = True
                elif word.startswith("/"):
                    obey(conversation, word, rest.strip(), console)
                elif word:
                    answer(conversation, clean(line).strip(), console)
                    is_saved = False
            except KeyboardInterrupt:
                console.print("stopped; the turn is not kept")
            except RLHFError as error:
                console.print(visible(str(error)), style="red", markup=False, highlight=False)
    finally:
        if not is_saved:
            save(conversation, console, file)


def obey(conversation: Conversation, word: str, rest: str, console: Console) -> None:
    """Carry out a command. Raises ConfigError for one that is not known, or a wrong value."""
    match word:
        case "/help":
            console.print(HELP, markup=False, highlight=False)
        case "/reset":
            conversation.reset()
            console.print("all turns are forgotten")
        case "/system":
            conversation.reset()
            conversation.system = rest or None
            console.print("all turns are forgotten; the next one follows the system message"
                          if rest else "all turns are forgotten; no system message")  # fmt: skip
        case "/temperature":
            value: float | str = rest
            with contextlib.suppress(ValueError):
                value = float(rest)
            check_value(word, value, ZeroOrTemperature)
            conversation.temperature = float(value)
            console.print(f"temperature {conversation.temperature:g}")
        case _:
            known = ("/temperature", "/system", "/reset", "/save", "/quit", "/help")
            require(False, "the command", word, ", ".join(known))


def answer(conversation: Conversation, text: str, console: Console) -> None:
    """Print the reply as it grows with its numbers below; of several models, all at the end."""
    replies: list[Reply] = []
    is_alone = len(conversation.speakers) == 1
    for event in conversation.ask(text):
        if not isinstance(event, Piece):
            replies.append(event)
        elif is_alone:
            console.print(
                visible(event.text), end="", markup=False, highlight=False, soft_wrap=True
            )
    if is_alone:
        console.print()
        console.print(numbers(*replies), style="dim", highlight=False)
        return
    order = [speaker.name for speaker in conversation.speakers]
    replies.sort(key=lambda reply: order.index(reply.model))
    table = Table(expand=True)
    for name in order:
        table.add_column(Text(name), ratio=1, overflow="fold")
    table.add_row(*(Text(visible(reply.text)) for reply in replies))
    table.add_section()
    table.add_row(*(Text(numbers(reply), style="dim") for reply in replies))
    console.print(table)


def numbers(reply: Reply) -> str:
    """Return the numbers of a reply in a line."""
    parts = [] if reply.score is None else [f"score {reply.score:+z.2f}"]
    parts += [] if reply.kl is None else [f"KL {reply.kl:+z.2f} nats"]
    return " · ".join([*parts, counted(reply.tokens, "token")])


def save(conversation: Conversation, console: Console, file: Path, kind: Kind = "file") -> None:
    """Write the dialogues to a file. Raises ConfigError where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file, kind=kind) as beside:
            rows = (json.dumps(row, ensure_ascii=False) for row in conversation.rows())
            beside.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    console.print(f"saved: {file}", markup=False, highlight=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf chat",
        description="Talk to one model, or to several beside each other. Below each reply are the "
        "score of the reward and the KL to the SFT model.",
        epilog="While it runs: " + HELP.replace("\n", "; "),
    )
    parser.add_argument(
        "finals", nargs="+", metavar="FINAL",
        help="folder of a run of stage=sft or a later one, its final/, or the hub id of one",
    )  # fmt: skip
    parser.add_argument(
        "--reward", metavar="FINAL",
        help="reward model or sequence classifier that scores the replies (that of the last stage)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, metavar="T",
        help="divisor of the logits, 0 for the most probable token (that of the last model's run)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="tokens of a reply (as in the model's run)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the first turn")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is sampled (%(default)s)")
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run code that comes with the model where the folder's configuration asks for it",
    )  # fmt: skip
    return parser
