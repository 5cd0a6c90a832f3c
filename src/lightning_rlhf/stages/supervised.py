"""The training runs of SFT and DPO, and what reward modelling shares with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_rlhf.callbacks.evaluation import HELD_OUT, SAMPLES
from lightning_rlhf.callbacks.metrics import DPOMetrics, SFTMetrics
from lightning_rlhf.callbacks.recorder import KeepLastBatch
from lightning_rlhf.core.config import DPOConfig, SFTConfig, SupervisedConfig
from lightning_rlhf.core.errors import require
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.records import Record
from lightning_rlhf.core.text_metrics import unigram_perplexity
from lightning_rlhf.data.batches import (
    StageData,
    collate_demonstrations,
    collate_preferences,
    collate_prompts,
)
from lightning_rlhf.data.lengths import PromptTokens, Tokenised
from lightning_rlhf.data.readers import Rows, load
from lightning_rlhf.io.console import Working, json_line, print_line, visible_line
from lightning_rlhf.io.storage import make_folder, written_whole
from lightning_rlhf.models.build_roles import (
    add_policy,
    check_positions,
    check_vocabulary,
    start_from,
)
from lightning_rlhf.models.config import POLICY, SFT
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.supervised import SFTModule
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.report.tables import spread
from lightning_rlhf.rollout.build_sampler import deal, sample_reference
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.stages.console import print_evaluation
from lightning_rlhf.stages.folder.changes import Export
from lightning_rlhf.stages.launch import AtEnd, fit, print_compute
from lightning_rlhf.stages.model_card import hand_over
from lightning_rlhf.stages.prepare import Prepared, Training, make_ready, tokenised
from lightning_rlhf.stages.select import load_weights
from lightning_rlhf.stages.stage import Settings

COLLATE: Mapping[str, Callable[..., Record]] = {
    "demonstrations": collate_demonstrations,
    "preferences": collate_preferences,
}
"""Kind of data -> (examples, id of the padding token) -> batch."""


def read_batches(ready: Prepared) -> StageData:
    """Return the batches for a stage whose section is a SupervisedConfig.

    Raises ConfigError or DataError where the data cannot be read.
    """
    settings = ready.settings
    with Working("reading the data"):
        rows = load(settings.definition.data, settings.data, settings.seed)
    _, train, val = tokenised(ready, rows)
    return supervised_data(ready, settings.config, train, val)


def supervised_data(
    ready: Prepared,
    config: SupervisedConfig,
    train: Tokenised[Any],
    val: Tokenised[Any],
) -> StageData:
    """Return batches of rows of similar length, over `config.epochs` passes."""
    return StageData(
        train=train.examples,
        val=val.examples,
        columns=(),
        collate=partial(COLLATE[ready.settings.definition.data], pad_id=ready.chat.pad_token_id),
        batch_size=config.batch_size,
        val_batch_size=config.microbatch_size,
        batches=batches(ready.settings.stage, config, len(train.examples)),
        seed=ready.settings.seed,
        pool_batches=ready.settings.data.pool_batches,
    )


def batches(stage: str, config: SupervisedConfig, examples: int) -> int:
    """Return the number of batches in `config.epochs` passes over the examples, rounded up.

    Raises ConfigError where it is 0.
    """
    count = math.ceil(round(config.epochs * examples, 6) / config.batch_size)
    require(count > 0, f"{stage}.epochs", config.epochs,
            f"a number >= {1 / examples:.6g}, which is 1 of the {examples} examples")  # fmt: skip
    return count


@dataclass(frozen=True, kw_only=True)
class SupervisedTraining(Training):
    """SFT, reward modelling or DPO before the first step."""

    rows: Rows[Any]
    """Rows that are trained on."""
    train: Tokenised[Any]
    """Tokens of the rows that are trained on."""


def fit_supervised(
    training: SupervisedTraining, metrics: Callback, at_end: AtEnd | None = None
) -> dict[str, float]:
    """Train as `fit` does; keep the batch that no update can be made of.

    Raises NotFiniteError, which names the file.
    """
    ready, data = training.ready, training.data
    keeper = KeepLastBatch(ready.folder, training.rows, training.train, data, ready.chat)
    return fit(ready, training.module, data, [metrics, keeper], at_end)


RESPONSES, LONGEST = 5, 128
"""Number of responses that are sampled at the end, and the largest number of their tokens."""
SHOWN = ("prompt", "demonstration", "response")
"""Keys of the texts that are kept of each of them."""


class SFTTraining(SupervisedTraining):
    """Supervised fine-tuning before its first step."""

    def save(self, metrics: Mapping[str, float]) -> Path:
        return hand_over(self.ready, self.roles, SFT, metrics, head=None)


def run_sft(settings: Settings, config: SFTConfig) -> Path:
    """Fine-tune a model on demonstrations and hand it over; return the path of `final/`."""
    training = prepare_sft(settings, config)
    metrics = fit_supervised(training, SFTMetrics())
    if training.data.val:
        texts = ([e.imitated for e in some] for some in (training.data.train, training.data.val))
        metrics |= {"eval/unigram_perplexity": unigram_perplexity(*texts)}
    print_evaluation(metrics)
    sample_held_out(training)
    return training.save(metrics | print_compute(training.ready.folder))


def prepare_sft(settings: Settings, config: SFTConfig) -> SFTTraining:
    """Read the data and load the model."""
    with Working("reading the data"):
        rows = load("demonstrations", settings.data, settings.seed)
    ready = make_ready(settings, {})
    _, train, val = tokenised(ready, rows)
    data = supervised_data(ready, config, train, val)

    with Working("loading the model"):
        roles = start_from(
            settings.model, None, trainable=config.finetune == "full", seed=settings.seed
        )
    check_vocabulary(roles, ready.tokenizer)
    longest = max(len(e.prompt) + len(e.response) for e in train.examples)
    check_positions(roles, longest, "the longest demonstration")
    module = build_sft_module(ready, roles, config)
    return SFTTraining(
        ready=ready, roles=roles, module=module, data=data, rows=rows.train, train=train
    )


def sample_held_out(training: SFTTraining) -> None:
    """Print and keep a response to each of RESPONSES held-out prompts, sampled at temperature 1.

    The random numbers are the responses' own: the state of torch's generators stays as it is.
    """
    ready, roles, chat = training.ready, training.roles, training.ready.chat
    different = {tuple(e.prompt): e.response for e in training.data.val if e.prompt}
    some = spread(list(different.items()), RESPONSES)
    limit: int = getattr(roles.causal_lm.config, "max_position_embeddings", None) or 10**9
    room = min(LONGEST, limit - max((len(prompt) for prompt, _ in some), default=0))
    if not some or room < 1:
        return
    prompts = [PromptTokens(prompt, i) for i, (prompt, _) in enumerate(some)]
    (sampled,) = sample_reference(
        roles.to(ready.device),
        deal([(collate_prompts(prompts, chat.pad_token_id), 1)], ONE, divides=False),
        SamplingParams(
            max_response_tokens=min(room, ready.settings.data.max_response_tokens),
            temperature=1.0,
            end_token_ids=chat.end_token_ids,
        ),
        torch.Generator().manual_seed(ready.settings.seed),
        role=SFT,
    )
    said = real_tokens(sampled.responses, sampled.response_mask)
    texts = [
        dict(zip(SHOWN, map(chat.decode_response, (*some[i], response)), strict=True))
        for i, response in zip(sampled.index.tolist(), said, strict=True)
    ]
    make_folder(ready.folder / SAMPLES)
    with written_whole(ready.folder / SAMPLES / HELD_OUT) as beside:
        beside.write_text("".join(json_line(one) + "\n" for one in texts), encoding="utf-8")
    if ready.settings.samples:
        print_line("responses to held-out prompts, sampled from the trained model:")
        for one in texts:
            print_line(visible_line(f"  {one['prompt'][:160]} -> {one['response'][:160]}"))


def export_sft(settings: Settings, config: SFTConfig, export: Export) -> Path:
    """Write the model of a checkpoint as a folder like `final/`; no data is read."""
    ready = replace(make_ready(settings, {}), export=export)
    with Working("loading the model"):
        roles = start_from(
            settings.model, None, trainable=config.finetune == "full", seed=settings.seed
        )
    roles.to(ready.device)
    build = settings.definition.build or build_sft_module
    load_weights(build(ready, roles, config), export.checkpoint, export.origin)
    return hand_over(ready, roles, SFT, export.metrics, head=None)


def build_sft_module(ready: Prepared, roles: Roles, config: SFTConfig) -> SFTModule:
    """Return the module before its first step."""
    settings = ready.settings
    if config.finetune == "lora":
        roles.add_adapter(SFT, settings.model.lora, settings.seed)
    else:
        roles.assign(SFT)
    return SFTModule(roles, config, ready.replicas)


class DPOTraining(SupervisedTraining):
    """Direct preference optimization before its first step."""

    def save(self, metrics: Mapping[str, float]) -> Path:
        return hand_over(self.ready, self.roles, POLICY, metrics, head=None)


def run_dpo(settings: Settings, config: DPOConfig) -> Path:
    """Train a policy on pairs and hand it over; return the path of `final/`."""
    training = prepare_dpo(settings, config)
    metrics = fit_supervised(training, DPOMetrics())
    print_evaluation(metrics)
    return training.save(metrics | print_compute(training.ready.folder))


def prepare_dpo(settings: Settings, config: DPOConfig) -> DPOTraining:
    """Read the pairs and load the SFT model, which is the reference."""
    with Working("reading the data"):
        rows = load("preferences", settings.data, settings.seed)
    ready = make_ready(settings)
    _, train, val = tokenised(ready, rows)
    data = supervised_data(ready, config, train, val)
    roles = load_sft(ready)
    check_vocabulary(roles, ready.tokenizer)
    longest = max(example.length for example in train.examples)
    check_positions(roles, longest, "the longest prompt of a preference with its response")
    module = build_dpo_module(ready, roles, config)
    return DPOTraining(
        ready=ready, roles=roles, module=module, data=data, rows=rows.train, train=train
    )


def export_dpo(settings: Settings, config: DPOConfig, export: Export) -> Path:
    """Write the policy of a checkpoint as a folder like `final/`; no data is read."""
    ready = replace(make_ready(settings), export=export)
    roles = load_sft(ready).to(ready.device)
    build = settings.definition.build or build_dpo_module
    load_weights(build(ready, roles, config), export.checkpoint, export.origin)
    return hand_over(ready, roles, POLICY, export.metrics, head=None)


def load_sft(ready: Prepared) -> Roles:
    """Load the SFT model that the run starts from."""
    settings = ready.settings
    with Working("loading the model"):
        return start_from(
            settings.model, ready.parents.get(SFT), trainable=False, seed=settings.seed
        )


def build_dpo_module(ready: Prepared, roles: Roles, config: DPOConfig) -> DPOModule:
    """Return the module before its first step, with a new policy."""
    add_policy(roles, ready.settings.model, ready.settings.seed)
    return DPOModule(roles, config, ready.replicas)
