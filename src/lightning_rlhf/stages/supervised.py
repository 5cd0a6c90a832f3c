"""The stages that make passes over rows: supervised fine-tuning, reward models, and DPO."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lightning_rlhf.callbacks import evaluation, files
from lightning_rlhf.callbacks.metrics import StepMetrics
from lightning_rlhf.core import errors, masking, records
from lightning_rlhf.core.config import DPOConfig, RMConfig, SFTConfig
from lightning_rlhf.data import batches, formats, lengths, problems, readers
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Preference, prompt_row
from lightning_rlhf.evaluation import evaluate_reward
from lightning_rlhf.io.console import Working, print_detail, print_line
from lightning_rlhf.models import build_roles, checkpoint, heads
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD
from lightning_rlhf.models.config import SFT as SFT_ROLE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.supervised import DPOModule, KTOModule, RewardModule, SFTModule
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.report import curves, fitness_page, tables
from lightning_rlhf.rewards import format_check, weighted
from lightning_rlhf.rollout import collector, sampler
from lightning_rlhf.runs import folders, stage
from lightning_rlhf.runs.run import Run
from lightning_rlhf.stages.final import hand_over

LONGEST: Mapping[type, str] = {
    lengths.DemonstrationTokens: "the longest demonstration",
    lengths.PreferenceTokens: "the longest prompt of a pair with its response",
    lengths.LabelTokens: "the longest prompt with the longest response, of which kto reads",
}
"""Class of examples -> description of the longest."""


class Supervised(stage.Stage):
    """A stage whose section is a SupervisedConfig: `epochs` passes over its rows.

    `add_roles` and `module_class` are what such a stage has of its own.
    """

    module_class: ClassVar[type[Any]]
    """Class of the module: (roles, config, replicas) -> module."""
    metrics: ClassVar[type[Any]] = StepMetrics
    """Callback that logs the metrics of the module's steps."""
    role: ClassVar[str] = POLICY
    """Role that is trained, and written to `final/`."""

    def build(self, run: Run) -> tuple[LightningModule, batches.StageData, list[Callback]]:
        data, callbacks = self.read(run, run.rows(self.rows_of(run.settings.config)))
        return self.make_module(run, self.load(run, data)), data, callbacks

    def restore(self, run: Run) -> LightningModule:
        return self.make_module(run, run.load_model().to(run.device))

    def summarise(self, run: Run, module: Any, metrics: dict[str, float]) -> dict[str, float]:
        if self.role != REWARD:
            sample_held_out(run, module.roles, self.batches, self.role)
        return super().summarise(run, module, metrics)

    def finish(self, run: Run, module: Any, metrics: Mapping[str, float]) -> Path:
        return hand_over(run, module.roles, self.role, metrics, head=None)

    def read(
        self, run: Run, rows: readers.TrainVal[Any]
    ) -> tuple[batches.StageData, list[Callback]]:
        """Return batches of rows of similar length, the metrics of the steps, and what keeps a
        batch that no update can be made of."""
        config, settings = run.settings.config, run.settings
        self.held_out, train, val = run.tokenised(rows)
        self.batches = data = batches.StageData.of(
            train.examples, val.examples, config, run.chat.pad_token_id, seed=settings.seed,
            pool_batches=settings.data.pool_batches,
        )  # fmt: skip
        count = len(train.examples)
        allowed = f"a number >= {1 / count:.6g}, which is 1 of the {count} examples"
        errors.require(len(data.schedule) > 0, f"{self.name}.epochs", config.epochs, allowed)
        source = replace(rows.train, rows=())  # the texts are not kept while it trains
        keeper = evaluation.KeepLastBatch(run.folder, source, train, data, run.chat)
        return data, [self.metrics(), keeper]

    def load(self, run: Run, data: batches.StageData) -> Roles:
        """Return the model that the stage starts from, which has positions for all rows."""
        roles = run.load_model()
        rows, kind = data.train, type(data.train[0])
        longest = max(e.length for e in rows)
        if kind is lengths.LabelTokens:
            longest = max(len(e.prompt) for e in rows) + max(len(e.response) for e in rows)
        build_roles.check_positions(roles, longest, LONGEST[kind])
        return roles

    def make_module(self, run: Run, roles: Roles) -> LightningModule:
        """Return the module before its first step."""
        self.add_roles(run, roles)
        return self.module_class(roles, run.settings.config, run.replicas)  # type: ignore[no-any-return]

    def add_roles(self, run: Run, roles: Roles) -> None:
        """Add what is trained: a policy equal to the SFT model, or an adapter or all weights."""
        settings = run.settings
        if self.role == POLICY:
            build_roles.add_policy(roles, settings.model, settings.seed)
        elif settings.config.finetune == "lora":
            roles.add_adapter(self.role, settings.model.lora, settings.seed)
        else:
            roles.assign(self.role)


class DPO(Supervised):
    """Direct preference optimization of a policy on pairs, or on labels with loss_type=kto; the SFT
    model that it starts from is the reference."""

    name = "dpo"
    title = "Direct preference optimization"
    config = DPOConfig
    panels = staticmethod(lambda measured: curves.DPO_PANELS)
    data = "preferences"
    goal = (("eval/dpo_loss", "min"),)
    headlines = ("update/dpo_loss", "update/accuracy", "eval/accuracy")
    summary = ("eval/dpo_loss", "eval/accuracy", "eval/reward_margin")
    module_class = DPOModule

    def rows_of(self, config: DPOConfig) -> formats.Kind:
        return "labels" if config.loss_type == "kto" else "preferences"

    def make_module(self, run: Run, roles: Roles) -> LightningModule:
        """Return the module before its first step; that of kto unless the class is the user's."""
        config: DPOConfig = run.settings.config
        is_ours = self.module_class is DPOModule
        self.add_roles(run, roles)
        kind = KTOModule if is_ours and config.loss_type == "kto" else self.module_class
        return kind(roles, config, run.replicas)


class SFT(Supervised):
    """Supervised fine-tuning of a language model, which becomes the SFT model of the run."""

    name = "sft"
    title = "Supervised fine-tuning"
    config = SFTConfig
    panels = staticmethod(lambda measured: curves.SFT_PANELS)
    data = "demonstrations"
    reads_sft = False
    goal = (("eval/loss", "min"),)
    headlines = ("update/loss", "eval/loss")
    summary = ("eval/loss",)
    module_class = SFTModule
    role = SFT_ROLE

    def summarise(self, run: Run, module: Any, metrics: dict[str, float]) -> dict[str, float]:
        data = self.batches
        if data.val:
            texts = ([e.target_tokens for e in some] for some in (data.train, data.val))
            metrics = metrics | {"eval/unigram_perplexity": unigram_perplexity(*texts)}
        return super().summarise(run, module, metrics)


class RM(Supervised):
    """Training of a reward model on the SFT model, whose responses give the reward's scale."""

    name = "rm"
    title = "Reward model"
    config = RMConfig
    panels = staticmethod(lambda measured: curves.RM_PANELS)
    data = "preferences"
    goal = (("eval/accuracy", "max"), ("eval/rm_loss", "min"))
    headlines = ("update/rm_loss", "update/accuracy", "eval/accuracy")
    summary = ("eval/rm_loss", "eval/accuracy")
    module_class = RewardModule
    role = REWARD
    fitness: TemporaryDirectory[str] | None = None
    """Folder with the files of the fitness report; None for a model without one."""

    def build(self, run: Run) -> tuple[RewardModule, batches.StageData, list[Callback]]:
        config: RMConfig = run.settings.config
        rows = run.rows(self.data)
        without = [i for i, row in enumerate(rows.train.rows, start=1) if row.margin is None]
        if config.margin_coef > 0 and without:
            raise errors.DataError(
                f"rm.margin_coef is above 0, but {len(without)} of {len(rows.train)} pairs of "
                f"{rows.train.source} have no field 'margin' (the first is pair {without[0]}); "
                "allowed: a number >= 0 in each"
            )
        with Working("looking through the pairs"):
            self.problems = problems.find_problems(rows.val, rows.train)
        problems.print_problems(self.problems)
        data, callbacks = self.read(run, rows)
        del rows
        roles = self.load(run, data)
        prompts = [e.prompt for e in data.train]
        roles.to(run.device)
        self.below = roles.probe(REFERENCE)  # the SFT model before it is trained
        count = config.calibration_samples
        self.samples = evaluate_reward.sft_samples(run, roles, prompts, count, config)
        return self.make_module(run, roles), data, callbacks

    restore = stage.Stage.restore  # the pairs are read again, for the scale and the report

    def make_module(self, run: Run, roles: Roles) -> RewardModule:
        config, seed = run.settings.config, run.settings.seed
        generator = torch.Generator().manual_seed(seed)
        roles.heads[REWARD] = heads.ScalarHeads.random(roles.hidden_size, config.heads, generator)
        self.add_roles(run, roles)
        return self.module_class(roles, config, seed=seed, replicas=run.replicas)

    def report(self, run: Run, module: Any, loggers: Sequence[Logger], step: int) -> None:
        """Write the fitness report and the pairs of the format check, also to the loggers."""
        self.fitness = TemporaryDirectory()
        folder, roles, settings = Path(self.fitness.name), module.roles, run.settings
        pairs = evaluate_reward.fitting_pairs(self.held_out, run.chat, settings.data).rows
        if not pairs:
            print_line("no held-out pair is within the limits of length: no fitness report")
            return
        roles.to(run.device)
        with Working("scoring pairs for the format check"):
            format_check.write_pairs(folder, known_pairs(roles, pairs, run.chat))
        report = evaluate_reward.measure_reward(
            run, weighted.LearnedReward(roles.rewards, 0.0, 1.0, 0.0, module.microbatch), pairs,
            (scored_samples(roles, self.samples), self.samples), logit_scale=1.0,
            title=folders.run_name(settings), problems=self.problems,
            sampled_from="prompts of the pairs that the reward model is trained on",
            scale="The scores are raw; PPO maximises (score - mean) / std of the SFT samples, "
            "unless `reward.normalization` says otherwise.",
        )  # fmt: skip
        for logger in loggers:
            logger.log_metrics(report.metrics, step=step)
        evaluate_reward.write_fitness(report, folder, loggers, step)
        print_line(f"fitness report: {run.final / checkpoint.PAGE}")

    def finish(self, run: Run, module: Any, metrics: Mapping[str, float]) -> Path:
        """Measure the scale on the samples and write `final/`."""
        rewards = scored_samples(module.roles.to(run.device), self.samples)
        mean, std = collector.reward_moments(rewards)
        print_detail(f"reward on {len(rewards)} SFT samples: mean {mean:z.3f}, std {std:.3f}")
        report = None if self.fitness is None else Path(self.fitness.name)
        verdict = None if report is None else fitness_page.read_judgement(report)
        verdicts = {"rm": verdict} if verdict else None
        return hand_over(
            run, module.roles, REWARD, metrics, head=REWARD, reward=(mean, std),
            verdicts=verdicts, below=self.below, more=report,
        )  # fmt: skip


def known_pairs(
    roles: Roles, pairs: Sequence[Preference], chat: ChatFormat
) -> list[format_check.KnownPair]:
    """Return some pairs with the reward model's scores in its training format: right-padded."""
    known = []
    for pair in pairs[: format_check.COUNT]:
        prompt, row = chat.prompt_tokens(pair.prompt), prompt_row(pair.prompt)
        sides = [[*prompt, *chat.response_tokens(side)] for side in (pair.chosen, pair.rejected)]
        tokens, mask = batches.pad(sides, chat.pad_token_id, "right")
        with torch.no_grad():
            chosen, rejected = roles.reward(tokens.to(roles.device), mask.to(roles.device)).tolist()
        shown = chat.show(sides[0])
        known.append(
            format_check.KnownPair(row, pair.chosen, pair.rejected, chosen, rejected, shown)
        )
    return known


@torch.no_grad()
def scored_samples(
    roles: Roles, rollouts: Sequence[records.SampledResponses]
) -> Float[torch.Tensor, " B"]:
    """Return the raw reward of each response of the SFT model, on the CPU."""
    with Working("scoring SFT samples", sum(len(r.tokens) for r in rollouts)) as working:
        tracked = working.track(rollouts, lambda rollout: len(rollout.tokens))
        moved = (rollout.to(roles.device) for rollout in tracked)
        return torch.cat([roles.reward(one.tokens, one.mask).cpu() for one in moved])


RESPONSES, LONGEST_RESPONSE = 5, 128
"""Number of responses that a trained model samples at its end, and the largest number of their
tokens."""


def sample_held_out(run: Run, roles: Roles, data: batches.StageData, role: str = SFT_ROLE) -> None:
    """Keep a response of `role` to each of RESPONSES held-out prompts, sampled at temperature 1.

    The random numbers are the responses' own: the state of torch's generators stays as it is.
    """
    chat = run.chat
    different = {tuple(e.prompt): getattr(e, "chosen", None) or e.response
                 for e in data.val if e.prompt}  # fmt: skip
    some = tables.spread(list(different.items()), RESPONSES)
    limit: int = getattr(roles.causal_lm.config, "max_position_embeddings", None) or 10**9
    room = min(LONGEST_RESPONSE, limit - max((len(prompt) for prompt, _ in some), default=0))
    if not some or room < 1:
        return
    prompts = [lengths.PromptTokens(prompt, i) for i, (prompt, _) in enumerate(some)]
    batch = batches.collate_prompts(prompts, chat.pad_token_id)
    tokens, ends = min(room, run.settings.data.max_response_tokens), chat.end_token_ids
    (sampled,) = collector.sample_reference(
        roles.to(run.device),
        collector.shard([(batch, 1)], ONE, divides=False),
        sampler.SamplingParams(max_response_tokens=tokens, temperature=1.0, end_token_ids=ends),
        torch.Generator().manual_seed(run.settings.seed),
        role=role,
    )
    responses = masking.real_tokens(sampled.responses, sampled.response_mask)
    texts = []
    for i, response in zip(sampled.index.tolist(), responses, strict=True):
        prompt, known, answer = map(chat.decode_response, (*some[i], response))
        prompt = chat.without_template(prompt)
        texts.append({"prompt": prompt, "demonstration": known, "response": answer})
    files.write_samples(run.folder / files.SAMPLES / files.HELD_OUT, texts)


def unigram_perplexity(known: Iterable[Sequence[int]], texts: Iterable[Sequence[int]]) -> float:
    """Return the perplexity of texts under the frequencies of tokens in others; lower is better.

        exp(- mean over the tokens t of texts of log p(t)),   p(t) = (n(t) + 1) / (N + V)

    n(t) is the number of t in `known`, N that of all its tokens, V that of the different ones and
    one more, which stands for every token that is not there.

    Source: Jurafsky and Martin, Speech and Language Processing, chapter 3, add-one smoothing
    Departs: V counts the tokens of `known`, not those of the tokenizer.
    """
    counts = Counter(chain.from_iterable(known))
    total = counts.total() + len(counts) + 1
    return math.exp(fmean(math.log(total / (counts[t] + 1)) for t in chain.from_iterable(texts)))
