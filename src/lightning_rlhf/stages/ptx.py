"""The demonstrations of ppo.ptx_coef."""

from __future__ import annotations

from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.lengths import tokenise
from lightning_rlhf.data.readers import load
from lightning_rlhf.modules.ptx import PTX
from lightning_rlhf.stages.console import print_lengths
from lightning_rlhf.stages.prepare import Prepared


def read_ptx(ready: Prepared, config: PPOConfig) -> PTX | None:
    """Return the demonstrations that stage=sft trains on, for each update; None if ptx_coef is 0.

    Raises ConfigError or DataError where they cannot be read.
    """
    if config.ptx_coef == 0:
        return None
    data, seed = ready.settings.data, ready.settings.seed
    with Working("reading the demonstrations"):
        rows = load("demonstrations", data, seed).train
        found = tokenise(rows, ready.chat, data)
    print_lengths("demonstration", rows, found)
    return PTX(found.examples, config, pad_id=ready.chat.pad_token_id, seed=seed)
