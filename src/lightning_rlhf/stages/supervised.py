"""The stages that make passes over rows: their base class, supervised fine-tuning, and DPO."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback

from lightning_rlhf.callbacks.files import HELD_OUT, SAMPLES, write_samples
from lightning_rlhf.callbacks.metrics import StepMetrics
from lightning_rlhf.callbacks.recorder import KeepLastBatch
from lightning_rlhf.core.config import DPOConfig, SFTConfig
from lightning_rlhf.core.errors import require
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.records import Record
from lightning_rlhf.data.batches import (
    Schedule,
    StageData,
    collate_demonstrations,
    collate_preferences,
    collate_prompts,
)
from lightning_rlhf.data.lengths import PromptTokens
from lightning_rlhf.data.readers import TrainVal
from lightning_rlhf.io.console import print_line, visible_line
from lightning_rlhf.models.build_roles import add_policy, check_positions
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.config import SFT as SFT_ROLE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.supervised import SFTModule
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.report.curves import DPO_PANELS, SFT_PANELS
from lightning_rlhf.report.tables import spread
from lightning_rlhf.rollout.collector import sample_reference, shard
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Stage
from lightning_rlhf.stages.model_card import hand_over

COLLATE: Mapping[str, Callable[..., Record]] = {
    "demonstrations": collate_demonstrations,
    "preferences": collate_preferences,
}
"""Kind of data -> (examples, id of the padding token) -> batch."""
LONGEST = {
    "demonstrations": "the longest demonstration",
    "preferences": "the longest prompt of a preference with its response",
}
"""Kind of data -> description of its longest row."""


class Supervised(Stage):
    """A stage whose section is a SupervisedConfig: `epochs` passes over its rows.

    `add_roles` and `module_class` are what such a stage has of its own.
    """

    module_class: ClassVar[type[Any]]
    """Class of the module: (roles, config, replicas) -> module."""
    metrics: ClassVar[type[Any]] = StepMetrics
    """Callback that logs the metrics of the module's steps."""
    role: ClassVar[str] = POLICY
    """Role that is trained, and handed over."""

    def build(self, run: Run) -> tuple[LightningModule, StageData, list[Callback]]:
        data, callbacks = self.read(run, run.rows(self.data))
        return self.make_module(run, self.load(run, data)), data, callbacks

    def restore(self, run: Run) -> LightningModule:
        return self.make_module(run, run.load_model().to(run.device))

    def finish(self, run: Run, module: Any, metrics: Mapping[str, float]) -> Path:
        return hand_over(run, module.roles, self.role, metrics, head=None)

    def read(self, run: Run, rows: TrainVal[Any]) -> tuple[StageData, list[Callback]]:
        """Return batches of rows of similar length, the metrics of the steps, and what keeps a
        batch that no update can be made of."""
        config, settings = run.settings.config, run.settings
        self.held_out, train, val = run.tokenised(rows)
        count = len(train.examples)
        batches = math.ceil(round(config.epochs * count, 6) / config.batch_size)
        require(batches > 0, f"{self.name}.epochs", config.epochs,
                f"a number >= {1 / count:.6g}, which is 1 of the {count} examples")  # fmt: skip
        data = StageData(
            train=train.examples,
            val=val.examples,
            columns=(),
            collate=partial(COLLATE[self.data], pad_id=run.chat.pad_token_id),
            val_batch_size=config.microbatch_size,
            schedule=Schedule(
                lengths=[example.length for example in train.examples],
                batch_size=config.batch_size,
                batches=batches,
                seed=settings.seed,
                pool_batches=settings.data.pool_batches,
            ),
        )
        return data, [self.metrics(), KeepLastBatch(run.folder, rows.train, train, data, run.chat)]

    def load(self, run: Run, data: StageData) -> Roles:
        """Return the model that the stage starts from, which has positions for all rows."""
        roles = run.load_model()
        check_positions(roles, max(e.length for e in data.train), LONGEST[self.data])
        return roles

    def make_module(self, run: Run, roles: Roles) -> LightningModule:
        """Return the module before its first step."""
        self.add_roles(run, roles)
        module: LightningModule = self.module_class(roles, run.settings.config, run.replicas)
        return module

    def add_roles(self, run: Run, roles: Roles) -> None:
        """Add what is trained: a policy equal to the SFT model, or an adapter or all weights."""
        settings = run.settings
        if self.role == POLICY:
            add_policy(roles, settings.model, settings.seed)
        elif settings.config.finetune == "lora":
            roles.add_adapter(self.role, settings.model.lora, settings.seed)
        else:
            roles.assign(self.role)


class DPO(Supervised):
    """Direct preference optimization of a policy on pairs; the SFT model that it starts from is the
    reference."""

    name = "dpo"
    title = "Direct preference optimization"
    config = DPOConfig
    panels = staticmethod(lambda measured: DPO_PANELS)
    data = "preferences"
    goal = (("eval/dpo_loss", "min"),)
    headlines = ("update/dpo_loss", "update/accuracy", "eval/accuracy")
    summary = ("eval/dpo_loss", "eval/accuracy", "eval/reward_margin")
    module_class = DPOModule


class SFT(Supervised):
    """Supervised fine-tuning of a language model, which becomes the SFT model of the run."""

    name = "sft"
    title = "Supervised fine-tuning"
    config = SFTConfig
    panels = staticmethod(lambda measured: SFT_PANELS)
    data = "demonstrations"
    reads_sft = False
    goal = (("eval/loss", "min"),)
    headlines = ("update/loss", "eval/loss")
    summary = ("eval/loss",)
    module_class = SFTModule
    role = SFT_ROLE

    def load(self, run: Run, data: StageData) -> Roles:
        self.batches = data
        return super().load(run, data)

    def summarise(self, run: Run, module: Any, metrics: dict[str, float]) -> dict[str, float]:
        data = self.batches
        if data.val:
            texts = ([e.imitated for e in some] for some in (data.train, data.val))
            metrics = metrics | {"eval/unigram_perplexity": unigram_perplexity(*texts)}
        metrics = super().summarise(run, module, metrics)
        sample_held_out(run, module.roles, data)
        return metrics


RESPONSES, LONGEST_RESPONSE = 5, 128
"""Number of responses that SFT samples at its end, and the largest number of their tokens."""


def sample_held_out(run: Run, roles: Roles, data: StageData) -> None:
    """Print and keep a response to each of RESPONSES held-out prompts, sampled at temperature 1.

    The random numbers are the responses' own: the state of torch's generators stays as it is.
    """
    chat = run.chat
    different = {tuple(e.prompt): e.response for e in data.val if e.prompt}
    some = spread(list(different.items()), RESPONSES)
    limit: int = getattr(roles.causal_lm.config, "max_position_embeddings", None) or 10**9
    room = min(LONGEST_RESPONSE, limit - max((len(prompt) for prompt, _ in some), default=0))
    if not some or room < 1:
        return
    prompts = [PromptTokens(prompt, i) for i, (prompt, _) in enumerate(some)]
    (sampled,) = sample_reference(
        roles.to(run.device),
        shard([(collate_prompts(prompts, chat.pad_token_id), 1)], ONE, divides=False),
        SamplingParams(
            max_response_tokens=min(room, run.settings.data.max_response_tokens),
            temperature=1.0,
            end_token_ids=chat.end_token_ids,
        ),
        torch.Generator().manual_seed(run.settings.seed),
        role=SFT_ROLE,
    )
    said = real_tokens(sampled.responses, sampled.response_mask)
    keys = ("prompt", "demonstration", "response")
    texts = [
        dict(zip(keys, map(chat.decode_response, (*some[i], response)), strict=True))
        for i, response in zip(sampled.index.tolist(), said, strict=True)
    ]
    write_samples(run.folder / SAMPLES / HELD_OUT, texts)
    if run.settings.samples:
        print_line("responses to held-out prompts, sampled from the trained model:")
        for one in texts:
            print_line(visible_line(f"  {one['prompt'][:160]} -> {one['response'][:160]}"))


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
