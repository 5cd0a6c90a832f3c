"""The training run of stage=dpo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning_rlhf.callbacks.metrics import DPOMetrics
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.data.readers import load
from lightning_rlhf.models.build_roles import (
    add_policy,
    check_positions,
    check_vocabulary,
    start_from,
)
from lightning_rlhf.models.roles import POLICY, SFT, Roles
from lightning_rlhf.modules.dpo import DPOModule
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
    module = build_module(ready, roles, config)
    return DPOTraining(
        ready=ready, roles=roles, module=module, data=data, rows=rows.train, train=train
    )


def export_dpo(settings: Settings, config: DPOConfig, export: Export) -> Path:
    """Write the policy of a checkpoint as a folder like `final/`; no data is read."""
    ready = replace(make_ready(settings), export=export)
    roles = load_sft(ready).to(ready.device)
    build = settings.definition.build or build_module
    load_weights(build(ready, roles, config), export.checkpoint, export.origin)
    return hand_over(ready, roles, POLICY, export.metrics, head=None)


def load_sft(ready: Prepared) -> Roles:
    """Load the SFT model that the run starts from."""
    settings = ready.settings
    with Working("loading the model"):
        return start_from(
            settings.model, ready.parents.get(SFT), trainable=False, seed=settings.seed
        )


def build_module(ready: Prepared, roles: Roles, config: DPOConfig) -> DPOModule:
    """Return the module before its first step, with a new policy."""
    add_policy(roles, ready.settings.model, ready.settings.seed)
    return DPOModule(roles, config, ready.replicas)
