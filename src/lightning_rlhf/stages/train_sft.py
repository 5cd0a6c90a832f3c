"""The training run of stage=sft."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.callbacks.metrics import SFTMetrics
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.data.splits import load_demonstrations
from lightning_rlhf.models.handover import check_positions, check_vocabulary, start_from
from lightning_rlhf.models.roles import SFT, Roles
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.stages.console import say_evaluation
from lightning_rlhf.stages.launch import Prepared, hand_over, make_ready, tokenised
from lightning_rlhf.stages.stage import Settings
from lightning_rlhf.stages.supervised import fit_supervised, supervised_data


def run_sft(settings: Settings, config: SFTConfig) -> Path:
    """Run supervised fine-tuning and return the path of its `final/` folder."""
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
    metrics = fit_supervised(ready, "sft", module, data, rows.train, train, SFTMetrics())
    say_evaluation(metrics)
    return hand_over(ready, roles, SFT, metrics, head=None)


def build_module(ready: Prepared, roles: Roles, config: SFTConfig) -> SFTModule:
    """Return the module before its first step."""
    settings = ready.settings
    if config.finetune == "lora":
        roles.add_adapter(SFT, settings.model.lora, settings.seed)
    else:
        roles.assign(SFT)
    return SFTModule(roles, config)
