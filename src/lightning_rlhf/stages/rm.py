"""stage=rm: a reward model from preference pairs, with its scale and its fitness report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_rlhf.core.config import RMConfig
from lightning_rlhf.core.errors import DataError
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import SampledResponses
from lightning_rlhf.data.batches import StageData, pad
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.problems import find_problems
from lightning_rlhf.data.rows import Preference, Rows, prompt_row
from lightning_rlhf.evaluation.evaluate_reward import (
    fitting_pairs,
    measure_reward,
    sft_samples,
    write_fitness,
)
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.checkpoint import PAGE as FITNESS_PAGE
from lightning_rlhf.models.config import REFERENCE, REWARD
from lightning_rlhf.models.heads import RewardHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.preferences import RewardModule
from lightning_rlhf.report.curves import RM_PANELS
from lightning_rlhf.report.fitness_page import read_judgement
from lightning_rlhf.rewards.format_check import COUNT, KnownPair, write_pairs
from lightning_rlhf.rewards.weighted import LearnedReward
from lightning_rlhf.rollout.collector import reward_moments, sample_rewards
from lightning_rlhf.runs.console import print_problems
from lightning_rlhf.runs.folders import run_name
from lightning_rlhf.runs.run import Run
from lightning_rlhf.stages.model_card import hand_over
from lightning_rlhf.stages.supervised import Supervised


class RM(Supervised):
    """Training of a reward model on the SFT model, whose responses give the reward's scale."""

    name = "rm"
    title = "Reward model"
    config = RMConfig
    panels = staticmethod(lambda measured: RM_PANELS)
    data = "preferences"
    goal = (("eval/accuracy", "max"), ("eval/rm_loss", "min"))
    headlines = ("update/rm_loss", "update/accuracy", "eval/accuracy")
    summary = ("eval/rm_loss", "eval/accuracy")
    module_class = RewardModule
    role = REWARD
    fitness: TemporaryDirectory[str] | None = None
    """Folder with the files of the fitness report; None for a model without one."""

    def build(self, run: Run) -> tuple[RewardModule, StageData, list[Callback]]:
        config: RMConfig = run.settings.config
        rows = run.rows(self.data)
        if config.margin_coef > 0:
            require_margins(rows.train)
        with Working("looking through the pairs"):
            self.problems = find_problems(rows.val, rows.train)
        print_problems(self.problems)
        data, callbacks = self.read(run, rows)
        roles = self.load(run, data)
        prompts = [e.prompt for e in data.train]
        roles.to(run.device)
        self.below = roles.probe(REFERENCE)  # the SFT model before it is trained
        print_line(
            f"first {config.calibration_samples} responses of the SFT model are sampled "
            f"({self.name}.calibration_samples), for the scale of the reward"
        )
        self.samples = sft_samples(run, roles, prompts, config.calibration_samples, config)
        return self.make_module(run, roles), data, callbacks

    def restore(self, run: Run) -> RewardModule:
        """Return the module; the pairs are read again, for the scale and the fitness report."""
        return self.build(run)[0]

    def make_module(self, run: Run, roles: Roles) -> RewardModule:
        config, seed = run.settings.config, run.settings.seed
        generator = torch.Generator().manual_seed(seed)
        roles.heads[REWARD] = RewardHeads.random(roles.hidden_size, config.heads, generator)
        self.add_roles(run, roles)
        return self.module_class(roles, config, seed=seed, replicas=run.replicas)

    def report(self, run: Run, module: Any, loggers: Sequence[Logger], step: int) -> None:
        """Write the fitness report and the pairs of the format check, also to the loggers."""
        self.fitness = TemporaryDirectory()
        folder, roles, settings = Path(self.fitness.name), module.roles, run.settings
        pairs = fitting_pairs(self.held_out, run.chat, settings.data).rows
        if not pairs:
            print_line("no held-out pair is within the limits of length: no fitness report")
            return
        roles.to(run.device)
        with Working("scoring pairs for the format check"):
            write_pairs(folder, known_pairs(roles, pairs, run.chat))
        batch_size = MicrobatchSize("rm.microbatch_size", settings.config.microbatch_size)
        report = measure_reward(
            run, LearnedReward(roles.rewards, 0.0, 1.0, 0.0, batch_size), pairs,
            (scored_samples(roles, self.samples), self.samples), logit_scale=1.0,
            title=run_name(settings), problems=self.problems,
            sampled_from="prompts of the pairs that the reward model is trained on",
            scale="The scores are raw; PPO pays (score - mean) / std of the SFT samples, unless "
            "`reward.normalization` says otherwise.",
        )  # fmt: skip
        for logger in loggers:
            logger.log_metrics(report.metrics, step=step)
        write_fitness(report, folder, loggers, step)
        print_line(f"fitness report: {run.final / FITNESS_PAGE}")

    def finish(self, run: Run, module: Any, metrics: Mapping[str, float]) -> Path:
        """Measure the scale on the samples and write `final/`."""
        rewards = scored_samples(module.roles.to(run.device), self.samples)
        mean, std = reward_moments(rewards)
        print_line(f"reward on {len(rewards)} SFT samples: mean {mean:z.3f}, std {std:.3f}")
        report = None if self.fitness is None else Path(self.fitness.name)
        verdict = None if report is None else read_judgement(report)
        return hand_over(
            run, module.roles, REWARD, metrics, head=REWARD, reward=(mean, std),
            below=self.below, more=report, verdicts={} if verdict is None else {"rm": verdict},
        )  # fmt: skip


def known_pairs(roles: Roles, pairs: Sequence[Preference], chat: ChatFormat) -> list[KnownPair]:
    """Return some pairs with the reward model's scores in its training format: right-padded."""
    known = []
    for pair in pairs[:COUNT]:
        prompt = chat.prompt_tokens(pair.prompt)
        sides = [[*prompt, *chat.response_tokens(side)] for side in (pair.chosen, pair.rejected)]
        tokens, mask = pad(sides, chat.pad_token_id, "right")
        with torch.no_grad():
            chosen, rejected = roles.reward(tokens.to(roles.device), mask.to(roles.device)).tolist()
        known.append(KnownPair(
            row=prompt_row(pair.prompt), chosen=pair.chosen, rejected=pair.rejected,
            chosen_score=chosen, rejected_score=rejected, rendered=chat.show(sides[0]),
        ))  # fmt: skip
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
