"""The training run of stage=sft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning_rlhf.callbacks.metrics import SFTMetrics
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.data.splits import load_demonstrations
from lightning_rlhf.models.build_roles import check_positions, check_vocabulary, start_from
from lightning_rlhf.models.roles import SFT, Roles
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.stages.chosen import load_weights
from lightning_rlhf.stages.console import print_evaluation
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


class SFTTraining(SupervisedTraining):
    """Supervised fine-tuning before its first step."""

    def save(self, metrics: Mapping[str, float]) -> Path:
        return hand_over(self.ready, self.roles, SFT, metrics, head=None)


def run_sft(settings: Settings, config: SFTConfig) -> Path:
    """Fine-tune a model on demonstrations and hand it over; return the path of `final/`."""
    training = prepare_sft(settings, config)
    metrics = fit_supervised(training, SFTMetrics())
    print_evaluation(metrics)
    return training.save(metrics | print_compute(training.ready.folder))


def prepare_sft(settings: Settings, config: SFTConfig) -> SFTTraining:
    """Read the data and load the model."""
    with Working("reading the data"):
        rows = load_demonstrations(settings.data, settings.seed)
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


def export_sft(settings: Settings, config: SFTConfig, export: Export) -> Path:
    """Write the model of a checkpoint as a folder like `final/`; no data is read."""
    ready = replace(make_ready(settings, {}), export=export)
    with Working("loading the model"):
        roles = start_from(
            settings.model, None, trainable=config.finetune == "full", seed=settings.seed
        )
    roles.to(ready.device)
    load_weights(build_module(ready, roles, config), export.checkpoint, export.origin)
    return hand_over(ready, roles, SFT, export.metrics, head=None)


def build_module(ready: Prepared, roles: Roles, config: SFTConfig) -> SFTModule:
    """Return the module before its first step."""
    settings = ready.settings
    if config.finetune == "lora":
        roles.add_adapter(SFT, settings.model.lora, settings.seed)
    else:
        roles.assign(SFT)
    return SFTModule(roles, config, ready.replicas)
