"""The training run of stage=rm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_rlhf.callbacks.metrics import RewardMetrics
from lightning_rlhf.core.config import RMConfig
from lightning_rlhf.core.errors import DataError
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import SampledResponses
from lightning_rlhf.data.batches import pad
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.problems import Problems, find_problems
from lightning_rlhf.data.readers import Rows, load
from lightning_rlhf.data.rows import Preference, prompt_row
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.build_roles import check_positions, check_vocabulary, start_from
from lightning_rlhf.models.checkpoint import PAGE
from lightning_rlhf.models.config import REFERENCE, REWARD, SFT
from lightning_rlhf.models.heads import RewardHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.report.fitness_page import read_judgement
from lightning_rlhf.rewards.format_check import COUNT, KnownPair, write_pairs
from lightning_rlhf.rewards.learned import LearnedReward
from lightning_rlhf.rollout.build_sampler import reward_moments, sample_rewards
from lightning_rlhf.stages.console import print_evaluation, print_problems
from lightning_rlhf.stages.evaluate_reward import (
    check_lengths,
    fitting_pairs,
    report_on,
    sft_samples,
    tell_fitness,
)
from lightning_rlhf.stages.folder.changes import Export
from lightning_rlhf.stages.folder.folders import FINAL, find_parents, run_name
from lightning_rlhf.stages.launch import print_compute
from lightning_rlhf.stages.model_card import hand_over
from lightning_rlhf.stages.prepare import Prepared, make_ready, tokenised
from lightning_rlhf.stages.select import load_weights
from lightning_rlhf.stages.stage import Settings
from lightning_rlhf.stages.supervised import SupervisedTraining, fit_supervised, supervised_data


@dataclass(frozen=True, kw_only=True)
class RMTraining(SupervisedTraining):
    """Reward modelling before its first step."""

    held_out: Rows[Preference]
    """Pairs that are validated on."""
    problems: Problems
    """Problems of the pairs."""
    samples: Sequence[SampledResponses]
    """Responses of the SFT model, whose rewards give the scale."""
    below: Tensor
    """Fingerprint of the SFT model before it is trained."""

    def save(self, metrics: Mapping[str, float], report: Path | None = None) -> Path:
        """Measure the scale on the samples and write `final/`.

        report: folder with the files of the fitness report; None for a model without one.
        """
        rewards = scored_samples(self.roles.to(self.ready.device), self.samples)
        mean, std = reward_moments(rewards)
        print_line(f"reward on {len(rewards)} SFT samples: mean {mean:z.3f}, std {std:.3f}")
        verdict = None if report is None else read_judgement(report)
        return hand_over(
            self.ready, self.roles, REWARD, metrics, head=REWARD, reward=(mean, std),
            below=self.below, more=report, verdicts={} if verdict is None else {"rm": verdict},
        )  # fmt: skip


def run_rm(settings: Settings, config: RMConfig) -> Path:
    """Train a reward model on pairs and hand it over; return the path of `final/`."""
    training = prepare_rm(settings, config)
    with TemporaryDirectory() as more:
        at_end = partial(report_fitness, training, Path(more), config)
        metrics = fit_supervised(training, RewardMetrics(), at_end)
        print_evaluation(metrics)
        return training.save(metrics | print_compute(training.ready.folder), Path(more))


def prepare_rm(settings: Settings, config: RMConfig) -> RMTraining:
    """Read the pairs, load the SFT model and sample the responses that give the scale."""
    parents = find_parents(settings)
    with Working("reading the data"):
        rows = load("preferences", settings.data, settings.seed)
    if config.margin_coef > 0:
        require_margins(rows.train)
    with Working("looking through the pairs"):
        problems = find_problems(rows.val, rows.train)
    print_problems(problems)
    ready = make_ready(settings, parents)
    held_out, train, val = tokenised(ready, rows)
    data = supervised_data(ready, config, train, val)

    with Working("loading the model"):
        roles = start_from(
            settings.model, ready.parents.get(SFT), trainable=config.finetune == "full",
            seed=settings.seed,
        )  # fmt: skip
    check_vocabulary(roles, ready.tokenizer)
    longest = max(len(e.prompt) + max(len(e.chosen), len(e.rejected)) for e in train.examples)
    check_positions(roles, longest, "the longest prompt of a preference with its response")
    prompts = [e.prompt for e in train.examples]
    check_lengths(ready, roles, prompts, config)
    roles.to(ready.device)
    below = roles.probe(REFERENCE)
    print_line(
        f"first {config.calibration_samples} responses of the SFT model are sampled "
        f"({settings.stage}.calibration_samples), for the scale of the reward"
    )
    samples = sft_samples(ready, roles, prompts, config.calibration_samples, config)
    module = build_module(ready, roles, config)
    return RMTraining(
        ready=ready, roles=roles, module=module, data=data, rows=rows.train, train=train,
        held_out=held_out, problems=problems, samples=samples, below=below,
    )  # fmt: skip


def export_rm(settings: Settings, config: RMConfig, export: Export) -> Path:
    """Write the reward model of a checkpoint as a folder like `final/`.

    The pairs are read again, for the scale and the fitness report.
    """
    training = (settings.definition.prepare or prepare_rm)(settings, config)
    training = replace(training, ready=replace(training.ready, export=export))
    load_weights(training.module, export.checkpoint, export.origin)
    with TemporaryDirectory() as more:
        report_fitness(training, Path(more), config, [], export.ending.step)
        return training.save(export.metrics, Path(more))


def build_module(ready: Prepared, roles: Roles, config: RMConfig) -> RewardModule:
    """Return the module before its first step, with new heads."""
    settings = ready.settings
    generator = torch.Generator().manual_seed(settings.seed)
    roles.heads[REWARD] = RewardHeads.random(roles.hidden_size, config.heads, generator)
    if config.finetune == "lora":
        roles.add_adapter(REWARD, settings.model.lora, settings.seed)
    else:
        roles.assign(REWARD)
    return RewardModule(roles, config, seed=settings.seed, replicas=ready.replicas)


def report_fitness(
    training: RMTraining, folder: Path, config: RMConfig, loggers: Sequence[Logger], step: int
) -> None:
    """Write the fitness report and the pairs of the format check to `folder` and the loggers."""
    ready, roles, samples = training.ready, training.roles, training.samples
    settings, chat = ready.settings, ready.chat
    pairs = fitting_pairs(training.held_out, chat, settings.data).rows
    if not pairs:
        print_line("no held-out pair is within the limits of length: no fitness report")
        return
    roles.to(ready.device)
    with Working("scoring pairs for the format check"):
        write_pairs(folder, known_pairs(roles, pairs, chat))
    batch_size = MicrobatchSize("rm.microbatch_size", config.microbatch_size)
    source = LearnedReward(roles.rewards, 0.0, 1.0, 0.0, batch_size)
    written = report_on(
        ready,
        source,
        pairs,
        (scored_samples(roles, samples), samples),
        training.problems,
        folder,
        title=run_name(settings),
        sampled_from="prompts of the pairs that the reward model is trained on",
        scale="The scores are raw; PPO pays (score - mean) / std of the SFT samples, unless "
        "`reward.normalization` says otherwise.",
        logit_scale=1.0,
    )
    for logger in loggers:
        logger.log_metrics(written[0], step=step)
    tell_fitness(written, loggers, step)
    print_line(f"fitness report: {ready.folder / FINAL / PAGE}")


def known_pairs(roles: Roles, pairs: Sequence[Preference], chat: ChatFormat) -> list[KnownPair]:
    """Return some pairs with the reward model's scores in its training format: right-padded."""
    known = []
    for pair in pairs[:COUNT]:
        prompt = chat.prompt_tokens(pair.prompt)
        sides = [[*prompt, *chat.response_tokens(side)] for side in (pair.chosen, pair.rejected)]
        tokens, mask = pad(sides, chat.pad_token_id, "right")
        with torch.no_grad():
            chosen, rejected = roles.reward(tokens.to(roles.device), mask.to(roles.device)).tolist()
        known.append(
            KnownPair(
                row=prompt_row(pair.prompt),
                chosen=pair.chosen,
                rejected=pair.rejected,
                chosen_score=chosen,
                rejected_score=rejected,
                rendered=chat.show(sides[0]),
            )
        )
    return known


def scored_samples(roles: Roles, rollouts: Sequence[SampledResponses]) -> Float[Tensor, " B"]:
    """Return the raw reward of each response of the SFT model, on the CPU."""
    with Working("scoring SFT samples", sum(len(r.tokens) for r in rollouts)) as working:
        return sample_rewards(roles, working.track(rollouts, lambda r: len(r.tokens)))


def require_margins(rows: Rows[Preference]) -> None:
    """Raise DataError unless every pair has a margin between its two responses."""
    without = [i for i, row in enumerate(rows.rows) if row.margin is None]
    if without:
        raise DataError(
            f"rm.margin_coef is above 0, but {len(without)} of {len(rows)} pairs of {rows.source} "
            f"have no field 'margin' (the first is pair {without[0] + 1}); allowed: a number >= 0 "
            "in each"
        )
