"""lightning-rlhf replay: a recorded update of PPO, or the batch that broke a run off, once more."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.core.storage import full_disk_told, written_whole
from lightning_rlhf.core.validation import PositiveInt, check_value
from lightning_rlhf.stages.console import say_error

if TYPE_CHECKING:
    from lightning_rlhf.replay.run import Replayed
    from lightning_rlhf.stages.settings import Settings

NAMED = 3
"""Differences that are told; the rest are counted."""


def replay(arguments: Sequence[str]) -> None:
    """Replay and show; exit status 1 after an error or a difference from the record."""
    given = parser().parse_args(arguments)
    try:
        if given.iteration is not None:
            check_value("--iteration", given.iteration, PositiveInt)
        check_value("--responses", given.responses, PositiveInt)
        with full_disk_told():
            same = replay_run(
                Path(given.run), given.iteration, given.responses, given.trust_remote_code
            )
    except RLHFError as error:
        say_error(without_secrets(str(error)))
        sys.exit(1)
    if not same:
        sys.exit(1)


def replay_run(folder: Path, iteration: int | None, count: int, trust_remote_code: bool) -> bool:
    """Whether it came out as recorded; libraries load here, so that --help is quick."""
    from lightning_rlhf.replay.plan import settings_of
    from lightning_rlhf.replay.rows import plan_rows, show_rows
    from lightning_rlhf.stages.console import quiet_libraries
    from lightning_rlhf.stages.launch import check_accelerator
    from lightning_rlhf.stages.run import computing

    quiet_libraries()
    settings = settings_of(folder, trust_remote_code=trust_remote_code)
    if settings.stage == "ppo":
        return replay_update(folder, settings, iteration, count)
    batch, checkpoint = plan_rows(folder, settings, iteration)
    check_accelerator(settings)
    with computing(settings):
        return show_rows(batch, checkpoint, settings, count)


def replay_update(folder: Path, settings: Settings, iteration: int | None, count: int) -> bool:
    """Whether the update was the recorded one."""
    from rich import get_console

    from lightning_rlhf.core.ppo_config import PPOConfig
    from lightning_rlhf.replay.page import replay_page
    from lightning_rlhf.replay.plan import plan_replay
    from lightning_rlhf.replay.replayed import most_changed
    from lightning_rlhf.replay.run import run_once_more
    from lightning_rlhf.replay.table import on_terminal
    from lightning_rlhf.stages.console import say
    from lightning_rlhf.stages.launch import check_accelerator
    from lightning_rlhf.stages.run import computing

    plan = plan_replay(folder, settings, iteration)
    if iteration is None:
        say(f"iteration {plan.iteration} is the newest that is recorded; --iteration N for another")
    iteration = plan.iteration
    check_accelerator(plan.settings)
    if plan.weights is not None:
        say(f"showing iteration {iteration} with the weights of {plan.weights}; no update is run")
    else:
        origin = "the start of the run" if plan.checkpoint is None else str(plan.checkpoint)
        say(f"replaying {len(plan.iterations)} of {iteration} iterations, from {origin}")
    with computing(plan.settings):
        replayed = run_once_more(plan)
    config = plan.settings.config
    assert isinstance(config, PPOConfig)
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    responses = most_changed(
        replayed.recorded,
        replayed.logprobs,
        replayed.values,
        show=replayed.chat.show,
        clip_range=(1 - config.clip_range, 1 + high),
        count=count,
    )
    batch = len(replayed.recorded.responses)
    for part in on_terminal(responses, batch):
        get_console().print(part)
    said = verdict(replayed)
    page = folder / f"replay_{iteration}.html"
    title = f"Iteration {iteration} of {folder}"
    content = replay_page(title, said, responses, batch).encode()
    with written_whole(page, len(content)) as beside:
        beside.write_bytes(content)
    say(f"page: {page}")
    say(said, "red" if replayed.differences else "yellow" if replayed.not_finite else "green")
    return not replayed.differences


def verdict(replayed: Replayed) -> str:
    """Whether the update was the recorded one, and could be made at all, in one line."""
    before = "; before its first update there were not finite already: "
    bad = before + ", ".join(replayed.not_finite) if replayed.not_finite else ""
    return outcome(replayed) + bad


def outcome(replayed: Replayed) -> str:
    """Whether the update was the recorded one."""
    recorded = replayed.recorded
    name = f"iteration {recorded.iteration}"
    if replayed.differences:
        told = list(replayed.differences[:NAMED])
        if len(replayed.differences) > NAMED:
            told.append(f"{len(replayed.differences) - NAMED} more")
        if replayed.machine != recorded.machine:
            told.append(f"recorded with {words(recorded.machine)}, here {words(replayed.machine)}")
        return f"{name} is not the recorded one: {'; '.join(told)}"
    if replayed.made is not None:
        updates = f"{replayed.made} update{'s' * (replayed.made != 1)}"
        return (
            f"{name} broke the run off after {updates} of it: no update was run once more, and "
            "'after' means after these, with the weights that the run ended with"
        )
    if recorded.updates is None or recorded.parameters is None:
        end = "" if replayed.ended is None else f"; here it ended with: {replayed.ended}"
        return f"{name} broke the run off, so that there is no outcome to compare with{end}"
    return (
        f"{name} is the recorded one bit for bit: {len(recorded.updates)} updates, and the "
        f"parameters after it (SHA-256 {recorded.parameters[:12]}…)"
    )


def words(facts: Mapping[str, str]) -> str:
    """ "torch 2.13.0, device cpu"."""
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())


def parser() -> argparse.ArgumentParser:
    """What may be said on the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf replay",
        description="Run a recorded update of stage=ppo record=true once more, compare it bit for "
        "bit with the record, and show what it did to each token: here and in replay_N.html in "
        "the run folder. Of stage=sft and stage=rm, show the batch that broke the run off as not "
        "finite: which rows, token by token.",
    )
    parser.add_argument("run", help="folder of the run, as outputs/<run>/<model>/ppo")
    parser.add_argument(
        "--iteration", type=int, metavar="N",
        help="which, from 1 as in metrics.csv (the newest that is recorded)",
    )  # fmt: skip
    parser.add_argument(
        "--responses", type=int, default=3, metavar="K",
        help="how many to show, those first that the update changed most, or whose loss is largest "
        "(%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run code that comes with the model where the folder's configuration asks for it; "
        "without this such a folder is refused",
    )  # fmt: skip
    return parser
