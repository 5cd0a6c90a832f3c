"""Our side of an iteration of TRL: its settings in our configuration, its tensors in our code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from omegaconf import OmegaConf
from torch import Tensor

from lightning_rlhf.core.experience import make_experience
from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.core.masking import masked_sum
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.shaping import ScoreMoments
from lightning_rlhf.core.types import Experience
from lightning_rlhf.modules import ppo
from lightning_rlhf.modules.ppo import PPOModule

from .trl_iteration import BATCH, MICROBATCH, PENALTY, RESPONSE_LENGTH, VOCABULARY, Iteration

CONF = Path(__file__).parents[2] / "conf"


def default_config(**changes: Any) -> PPOConfig:
    """What stage=ppo comes with."""
    stage = OmegaConf.to_container(OmegaConf.load(CONF / "stages/ppo.yaml"))
    advantage = OmegaConf.to_container(OmegaConf.load(CONF / "advantage/gae.yaml"))
    return PPOConfig(**advantage | stage | {"stop_strings": ()} | changes)


def config_like(trl: Iteration, **changes: Any) -> PPOConfig:
    """The configuration that TRL's iteration ran with, in our words."""
    args = trl.batch["args"]
    same = {
        "rollout_batch_size": BATCH,
        "minibatch_size": BATCH,
        "microbatch_size": MICROBATCH,
        "max_response_tokens": RESPONSE_LENGTH,
        "score_normalization": "none",
        "missing_eos": "subtract",
        "missing_eos_penalty": PENALTY,
        "whiten_rewards": args.whiten_rewards,
        "temperature": args.temperature,
        "kl_estimator": args.kl_estimator,
        "kl_coef": args.kl_coef,
        "gamma": args.gamma,
        "gae_lambda": args.lam,
        "clip_range": args.cliprange,
        "clip_range_vf": args.cliprange_value,
        "vf_coef": args.vf_coef,
    }
    return default_config(**same | changes)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the True elements of `mask`, whatever stands elsewhere."""
    return masked_sum(x, mask) / mask.sum()


def experience_of(trl: Iteration, **changes: Any) -> Experience:
    """What our code makes of TRL's responses, log-probabilities, values and scores."""
    scores, config = trl.scores(), config_like(trl, **changes)
    moments = ScoreMoments.none(1).including(scores)
    return make_experience(trl.rollout(), scores, config, kl_coef=config.kl_coef, moments=moments)


def update_facts(trl: Iteration, experience: Experience, epoch: int) -> dict[str, Tensor]:
    """The facts that PPOModule reports of a minibatch, with TRL's policy and critic of `epoch`."""
    logprobs, values, logits = (
        trl.epoch(epoch, name) for name in ("new_logprobs", "vpred", "logits")
    )

    def response_hidden(_: Any, part: Experience) -> Tensor:
        return values[part.index][part.response_mask]

    def response_logprobs(
        _: Any, __: Tensor, part: Experience, ___: float, **____: Any
    ) -> tuple[Tensor, ...]:
        mask = part.response_mask
        return logprobs[part.index][mask], entropies(logits[part.index][mask])

    module = OnTRL(config_like(trl))
    facts: list[dict[str, Tensor]] = []
    with (
        patch.object(ppo, "response_hidden", response_hidden),
        patch.object(ppo, "response_logprobs", response_logprobs),
    ):
        loss = sum(module.losses(experience, facts, module.config.microbatch_size))
    totals = {name: torch.stack([part[name] for part in facts]).sum() for name in facts[0]}
    return totals | {"loss": loss}


def entropies(logits: Tensor) -> Tensor:
    """Our entropy of each row of logits."""
    targets = torch.zeros(len(logits), dtype=torch.long)
    return token_logprobs(logits, targets, lambda x: x, temperature=1.0, vocab_size=VOCABULARY)[1]


class OnTRL(PPOModule):
    """PPOModule without models: its critic returns what it is given."""

    def __init__(self, config: PPOConfig) -> None:
        L.LightningModule.__init__(self)
        self.config = config
        self.kl_coef = config.kl_coef
        self.iteration = 0
        self.roles = None
        self.critic = SimpleNamespace(shares_trunk=True, head=lambda hidden: hidden)
