"""The check before PPO that every reward model is given text in the format of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.errors import CheckpointError, DataError, HubError
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.data.readers import load, sample
from lightning_rlhf.data.rows import prompt_row
from lightning_rlhf.rewards.config import LearnedConfig
from lightning_rlhf.rewards.format_check import (
    COUNT,
    FormatResult,
    compare,
    ranked_backwards,
    read_pairs,
)
from lightning_rlhf.rewards.learned import LearnedReward, TextReward
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.decoded import encode_responses, score_texts
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.folders import reward_role
from lightning_rlhf.stages.launch import Prepared
from lightning_rlhf.stages.reward.reward_fitness import fitting
from lightning_rlhf.stages.stage import reward_key


def check_formats(ready: Prepared, reward: Reward) -> None:
    """Compare every reward model with its scores at training, and print the result.

    Raises CheckpointError where they differ and `format_check` is strict.
    """
    for (name, config), source in zip(ready.settings.reward.items(), reward.sources, strict=True):
        if not isinstance(config, LearnedConfig) or config.format_check == "off":
            continue
        assert isinstance(source, LearnedReward | TextReward)
        key = reward_key(ready.settings, name)
        with Working(f"checking the format of reward {name}"):
            result = check_format(ready, name, source)
        if result is None:
            print_line(
                f"reward {name}: no held-out pairs to check its format with (data.preferences)"
            )
            continue
        lines = result.lines(name, config.format_tolerance, shows_text=ready.settings.debug)
        fits = result.fits(config.format_tolerance)
        for line in lines:
            print_line(line, "bold red" if not fits else "")
        if not fits and config.format_check == "strict":
            raise CheckpointError(f"{lines[0]}. {advice(result, key)}")


def advice(result: FormatResult, key: str) -> str:
    """Return what to do about a reward model whose scores differ from those at training."""
    on = f"{key}.format_check=warn goes on all the same"
    if result.gap is None:
        return f"Mend that; or {on}"
    if result.rendered == result.own_rendered and not result.problems:
        return f"The text is the same: its numbers differ by dtype or quantization. {on}"
    return f"It would be asked about other text than it was trained on. Mend the format; or {on}"


def check_format(
    ready: Prepared, name: str, source: LearnedReward | TextReward
) -> FormatResult | None:
    """Return the comparison for one reward model; None where there are no pairs."""
    final = ready.parents.get(reward_role(ready.settings, name))
    known = read_pairs(final.path) if final is not None else []
    pairs = [(p.row, p.chosen, p.rejected) for p in known] or labelled(ready)
    if not pairs:
        return None
    rows, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
    source = replace(source, uncertainty_coef=0.0)  # the recorded scores are means
    if isinstance(source, TextReward):
        rendered = source.rendered(rows[0], chosen[0])
        problems = source.problems(rows[0], chosen[0])
    else:
        reply = encode_responses(rows[:1], chosen[:1], ready.chat).rollout
        rendered, problems = ready.chat.show(real_tokens(reply.tokens, reply.mask)[0]), []
    high, low = (
        (score_texts(source, name, rows, side, ready.chat, ready.device) * source.std + source.mean)
        for side in (chosen, rejected)
    )
    doubts: list[str] = []
    if not known and isinstance(source, TextReward):
        doubts = source.model.doubts(rows[0], chosen[0])
    if not known and ready.settings.reward[name].weight > 0:
        problems = [*problems, *ranked_backwards(high.tolist(), low.tolist())]
    return compare(known, high.tolist(), low.tolist(), rendered, problems, doubts)


def labelled(ready: Prepared) -> list[tuple[Mapping[str, Any], str, str]]:
    """Return some held-out pairs of the data: (row of the prompt, chosen, rejected)."""
    data = ready.settings.data
    if data.preferences.train is None:
        return []
    try:
        held_out = load("preferences", data, ready.settings.seed).val
    except (DataError, HubError) as error:  # PPO does not need the pairs
        print_line(f"data.preferences, to check the format of rewards with: {error}")
        return []
    some = sample(held_out, data.max_val_rows, ready.settings.seed)
    rows = fitting(some, ready.chat, data).rows[:COUNT]
    return [(prompt_row(row.prompt), row.chosen, row.rejected) for row in rows]
