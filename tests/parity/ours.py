"""Our side of an iteration of TRL: its settings in our configuration, its tensors in our code."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lightning_rlhf.core.experience import make_experience, token_rewards
from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.core.losses import PolicyOutputs, policy_loss, ppo_terms, token_weights
from lightning_rlhf.core.masking import masked_sum
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Experience
from lightning_rlhf.core.shaping import ScoreMoments

from .trl_iteration import BATCH, MICROBATCH, PENALTY, RESPONSE_LENGTH, VOCABULARY, Iteration

CONF = Path(__file__).parents[2] / "conf"


def default_config(**changes: Any) -> PPOConfig:
    """What stage=ppo comes with."""
    stage = OmegaConf.to_container(OmegaConf.load(CONF / "stages/ppo.yaml"))
    advantage = OmegaConf.to_container(OmegaConf.load(CONF / "advantage/gae.yaml"))
    return PPOConfig(
        **advantage | stage | {"stop_strings": (), "final": "last", "lr": 1.0e-5} | changes
    )


def config_like(trl: Iteration, **changes: Any) -> PPOConfig:
    """The configuration that TRL's iteration ran with, in our words."""
    args = trl.batch["args"]
    same = {
        "rollout_batch_size": BATCH, "minibatch_size": BATCH, "microbatch_size": MICROBATCH,
        "max_response_tokens": RESPONSE_LENGTH, "score_normalization": "none",
        "missing_eos": "subtract", "missing_eos_penalty": PENALTY,
        "whiten_rewards": args.whiten_rewards, "temperature": args.temperature,
        "kl_estimator": args.kl_estimator, "kl_coef": args.kl_coef, "gamma": args.gamma,
        "gae_lambda": args.lam, "clip_range": args.cliprange, "clip_range_vf": args.cliprange_value,
        "vf_coef": args.vf_coef,
    }  # fmt: skip
    return default_config(**same | changes)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the True elements of `mask`, whatever stands elsewhere."""
    return masked_sum(x, mask) / mask.sum()


def experience_of(trl: Iteration, **changes: Any) -> Experience:
    """What our code makes of TRL's responses, log-probabilities, values and scores."""
    rollout, scores, config = trl.rollout(), trl.scores(), config_like(trl, **changes)
    moments = ScoreMoments.none(1).including(scores)
    rewards = token_rewards(rollout, scores, config, kl_coef=config.kl_coef, moments=moments)
    return make_experience(rollout, scores, config, rewards)


def update_facts(trl: Iteration, experience: Experience, epoch: int) -> dict[str, Tensor]:
    """Terms of a minibatch with TRL's policy and critic of `epoch`."""
    logprobs, values, logits = (
        trl.epoch(epoch, name) for name in ("new_logprobs", "vpred", "logits")
    )
    config = config_like(trl)
    mask, index, room = experience.response_mask, experience.index, config.max_response_tokens
    policy = PolicyOutputs(
        logprobs=logprobs[index][mask], entropy=entropies(logits[index][mask]), vocabulary_kl=None
    )
    losses = policy_loss(
        policy.logprobs, experience.old_logprobs[mask], experience.advantages[mask],
        clip_range=config.clip_range, clip_range_high=config.clip_range_high,
        dual_clip=config.dual_clip,
    )  # fmt: skip
    weights = token_weights(mask, config.loss_reduction, max_response_tokens=room)
    terms = ppo_terms(
        experience, weights, mask.sum(), config, kl_coef=config.kl_coef, ent_coef=config.ent_coef,
        policy=policy, policy_losses=losses, values=values[index][mask],
    )  # fmt: skip
    return vars(terms)


def entropies(logits: Tensor) -> Tensor:
    """Our entropy of each row of logits."""
    targets = torch.zeros(len(logits), dtype=torch.long)
    return token_logprobs(logits, targets, lambda x: x, temperature=1.0, vocab_size=VOCABULARY)[1]
