"""The run of stage=eval_reward."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.callbacks.loggers import close_loggers
from lightning_rlhf.core.errors import DataError
from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import DecodedResponses
from lightning_rlhf.core.shaping import NO_SCORES, RunningMoments, paid_sum
from lightning_rlhf.data.problems import find_problems
from lightning_rlhf.data.readers import Rows, sample
from lightning_rlhf.data.rows import Preference, prompt_row
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.parallel.replicas import Replicas
from lightning_rlhf.report.fitness_page import Written
from lightning_rlhf.rewards.config import HeadConfig, TextModelConfig
from lightning_rlhf.rewards.learned import LearnedReward, TextReward
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.collector import decode_responses
from lightning_rlhf.stages.console import note_on_few, print_problems
from lightning_rlhf.stages.folder.folders import FINAL, run_name
from lightning_rlhf.stages.reward.build_rewards import build_reward, light_sources
from lightning_rlhf.stages.reward.reward_fitness import (
    check_formats,
    check_lengths,
    fitting,
    log_fitness,
    response_lengths,
    sft_samples,
    write_report,
)
from lightning_rlhf.stages.run import Run
from lightning_rlhf.stages.run_report import leave_report


def run_eval(ready: Run) -> Path:
    """Score held-out pairs, samples of the SFT model and probes; write the report."""
    settings, config = ready.settings, ready.settings.config
    rows = ready.rows("preferences")
    with Working("looking through the pairs"):
        problems = find_problems(rows.val, rows.train)
    print_problems(problems)
    light = light_sources(ready, {"prompt", "messages"})
    pairs = held_out_pairs(rows.val, ready)
    roles = ready.load_model()
    prompts = [ready.chat.prompt_tokens(pair.prompt) for pair in pairs]
    check_lengths(ready, roles, prompts, config)
    reward = build_reward(
        ready, roles, light, MicrobatchSize(f"{settings.stage}.batch_size", config.batch_size)
    )
    roles.to(ready.device)
    check_formats(ready, reward)

    rollouts = sft_samples(ready, roles, prompts, config.samples, config, ready.replicas)
    texts = [prompt_row(pair.prompt) for pair in pairs]
    decoded = [
        decode_responses(rollout.to(ready.device), texts, ready.chat) for rollout in rollouts
    ]
    with Working("scoring SFT samples", config.samples) as working:
        shown = working.track(decoded, lambda some: len(some.responses))
        parts = torch.cat([divided(reward, some, ready.replicas) for some in shown])
    moments = [NO_SCORES.including(part) for part in parts.unbind(dim=1)]

    def paid(decoded: DecodedResponses) -> Float[Tensor, " B"]:
        """Return scores as PPO gets them at its start; running moments are of the SFT samples."""
        found = divided(reward, decoded, ready.replicas)
        return paid_sum(found, reward.terms, moments)

    scores = paid_sum(parts, reward.terms, moments).cpu()
    with TemporaryDirectory() as beside:
        page, numbers = write_report(
            Path(beside),
            paid,
            pairs,
            (scores, response_lengths(rollouts)),
            problems,
            title=f"{run_name(settings)}: {', '.join(settings.reward)}",
            sampled_from="prompts of the held-out pairs",
            scale="The scores are what PPO would be paid at its start: weighted, normalised and "
            "clipped as the reward says; running moments are those of the SFT samples.",
            logit_scale=logit_scale(ready, reward, moments[0]),
            chat=ready.chat,
            longest=settings.data.max_response_tokens,
            device=ready.device,
            seed=settings.seed,
        )
        if not ready.replicas.is_first:
            sys.exit()
        return hand_over_fitness(ready, Path(beside), page, numbers)


def divided(reward: Reward, decoded: DecodedResponses, replicas: Replicas) -> Float[Tensor, "B K"]:
    """Return the components of all responses, of which each process scores a share."""
    mine = replicas.share(by_length(decoded.rollout.mask))
    parts = reward(decoded.select(mine)).tolist() if len(mine) else []
    return torch.tensor(replicas.merged(mine, parts), device=decoded.rollout.tokens.device)


def hand_over_fitness(
    ready: Run, written: Path, page: Written, numbers: Mapping[str, float]
) -> Path:
    """Log the numbers of a report, and copy the folder it was written to; return `final/`."""
    settings = ready.settings
    folder = ready.claim()
    loggers = ready.open_loggers()
    final, exit_code = folder / FINAL, 1
    try:
        log_fitness(page, numbers, loggers, 0)
        exit_code = 0
    finally:
        with Working("closing the loggers"):
            close_loggers(loggers, exit_code)
    with written_whole(final, kind="folder") as whole:
        shutil.copytree(written, whole, dirs_exist_ok=True)
    leave_report(folder, settings.definition)
    print_line(f"{settings.stage} finished: {final / page.page.name}")
    return final


def held_out_pairs(rows: Rows[Preference], ready: Run) -> Sequence[Preference]:
    """Return 1 to data.max_val_rows of the pairs that no length limit drops or cuts.

    Raises DataError where there is none.
    """
    data = ready.settings.data
    fits = fitting(rows, ready.chat, data)
    pairs = sample(fits, data.max_val_rows, ready.settings.seed).rows
    if not pairs:
        raise DataError(
            f"no held-out pair of {rows.source} is within data.max_prompt_tokens "
            f"({data.max_prompt_tokens}) and data.max_response_tokens ({data.max_response_tokens})"
        )
    notes = note_on_few(len(pairs), to_validate=True)
    print_line(", ".join([f"{len(pairs)} held-out pairs", *notes]))
    return pairs


def logit_scale(ready: Run, reward: Reward, seen: RunningMoments) -> float | None:
    """Return the factor that turns a difference of scores into log-odds; None where none does."""
    (config, *others), source = list(ready.settings.reward.values()), reward.sources[0]
    is_learned = isinstance(config, HeadConfig | TextModelConfig)
    if others or not is_learned or config.clip is not None or config.weight <= 0:
        return None
    assert isinstance(source, LearnedReward | TextReward)
    running = seen.std if config.normalization == "running" else 1.0
    return source.std * running / config.weight
