"""Shows a replayed update on the terminal, on an HTML page, and in one line beside the record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich import get_console

from lightning_rlhf.core.losses import clip_bounds
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.wording import counted
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.replay.page import replay_page
from lightning_rlhf.replay.plan import plan_replay
from lightning_rlhf.replay.replayed import most_changed
from lightning_rlhf.replay.run_updates import Replayed, run_once_more
from lightning_rlhf.replay.table import on_terminal
from lightning_rlhf.stages.accelerator import check_accelerator
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.run import computing
from lightning_rlhf.stages.settings import Settings

NAMED = 3
"""Number of differences that are printed; the rest are counted."""


def replay_update(folder: Path, settings: Settings, iteration: int | None, count: int) -> bool:
    """Replay an update of PPO and show it; return whether it equals the record.

    iteration: number of the iteration; None for the newest recorded one.
    count: number of responses to show.
    """
    plan = plan_replay(folder, settings, iteration)
    if iteration is None:
        print_line(
            f"iteration {plan.iteration} is the newest that is recorded; --iteration N for another"
        )
    iteration = plan.iteration
    check_accelerator(plan.settings)
    if plan.weights is not None:
        print_line(
            f"showing iteration {iteration} with the weights of {plan.weights}; no update is run"
        )
    else:
        origin = "the start of the run" if plan.checkpoint is None else str(plan.checkpoint)
        print_line(f"replaying {len(plan.iterations)} of {iteration} iterations, from {origin}")
    with computing(plan.settings):
        replayed = run_once_more(plan)
    config = plan.settings.config
    assert isinstance(config, PPOConfig)
    responses = most_changed(
        replayed.recorded,
        replayed.logprobs,
        replayed.values,
        show=replayed.chat.show,
        clip_range=clip_bounds(config.clip_range, config.clip_range_high),
        count=count,
    )
    batch = len(replayed.recorded.responses)
    for part in on_terminal(responses, batch):
        get_console().print(part)
    text = verdict(replayed)
    page = folder / f"replay_{iteration}.html"
    title = f"Iteration {iteration} of {folder}"
    content = replay_page(title, text, responses, batch).encode()
    with written_whole(page, len(content), "page") as beside:
        beside.write_bytes(content)
    print_line(f"page: {page}")
    print_line(
        text, "red" if replayed.differences else "yellow" if replayed.not_finite else "green"
    )
    return not replayed.differences


def verdict(replayed: Replayed) -> str:
    """Return in one line whether the update equals the record, and could be made at all."""
    before = "; before its first update there were not finite already: "
    bad = before + ", ".join(replayed.not_finite) if replayed.not_finite else ""
    return outcome(replayed) + bad


def outcome(replayed: Replayed) -> str:
    """Return in one line whether the update equals the record."""
    recorded = replayed.recorded
    name = f"iteration {recorded.iteration}"
    if replayed.differences:
        parts = list(replayed.differences[:NAMED])
        if len(replayed.differences) > NAMED:
            parts.append(f"{len(replayed.differences) - NAMED} more")
        if replayed.machine != recorded.machine:
            parts.append(f"recorded with {words(recorded.machine)}, here {words(replayed.machine)}")
        return f"{name} is not the recorded one: {'; '.join(parts)}"
    if replayed.made is not None:
        updates = counted(replayed.made, "update")
        return (
            f"{name} broke the run off after {updates} of it: no update was run once more, and "
            "'after' means after these, with the weights that the run ended with"
        )
    if recorded.updates is None or recorded.parameters is None:
        end = "" if replayed.ended is None else f"; here it ended with: {replayed.ended}"
        return f"{name} broke the run off, so that there is no outcome to compare with{end}"
    return (
        f"{name} is the recorded one bit for bit: {counted(len(recorded.updates), 'update')}, and "
        f"the parameters after it (SHA-256 {recorded.parameters[:12]}…)"
    )


def words(facts: Mapping[str, str]) -> str:
    """Return the facts of a machine as text: torch 2.13.0, device cpu."""
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())
