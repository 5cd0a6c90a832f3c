"""The training run of stage=sft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from lightning_rlhf.callbacks.metrics import SFTMetrics
from lightning_rlhf.callbacks.samples import HELD_OUT, SAMPLES
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.text_metrics import unigram_perplexity
from lightning_rlhf.data.collate import collate_prompts
from lightning_rlhf.data.lengths import PromptTokens
from lightning_rlhf.data.readers import load
from lightning_rlhf.io.storage import make_folder, written_whole
from lightning_rlhf.io.visible import json_line, visible_line
from lightning_rlhf.models.build_roles import check_positions, check_vocabulary, start_from
from lightning_rlhf.models.roles import SFT, Roles
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.report.tables import spread
from lightning_rlhf.rollout.calibrate import sample_reference
from lightning_rlhf.rollout.dealt import deal
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.stages.chosen import load_weights
from lightning_rlhf.stages.console import print_evaluation, print_line
from lightning_rlhf.stages.folder.ending import Export
from lightning_rlhf.stages.launch import (
    Prepared,
    hand_over,
    make_ready,
    print_compute,
    tokenised,
)
from lightning_rlhf.stages.stage import Settings
from lightning_rlhf.stages.supervised import SupervisedTraining, fit_supervised, supervised_data

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
    module = build_module(ready, roles, config)
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
    build = settings.definition.build or build_module
    load_weights(build(ready, roles, config), export.checkpoint, export.origin)
    return hand_over(ready, roles, SFT, export.metrics, head=None)


def build_module(ready: Prepared, roles: Roles, config: SFTConfig) -> SFTModule:
    """Return the module before its first step."""
    settings = ready.settings
    if config.finetune == "lora":
        roles.add_adapter(SFT, settings.model.lora, settings.seed)
    else:
        roles.assign(SFT)
    return SFTModule(roles, config, ready.replicas)
