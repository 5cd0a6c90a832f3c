"""Tokens and floating-point operations of one iteration of PPO."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_rlhf.core.logprobs import CHUNK_ELEMENTS
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.results import Compute
from lightning_rlhf.core.types import Experience
from lightning_rlhf.models.flops import Flops, role_flops
from lightning_rlhf.models.layer_flops import Rows
from lightning_rlhf.models.roles import POLICY, REFERENCE, Roles
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import Sampler


@dataclass(frozen=True)
class RoleFlops:
    """Sizes of the models of PPO, from which their operations follow."""

    policy: Flops
    reference: Flops
    critic: Flops | None
    """Critic that reads the tokens by itself; None without one."""

    @classmethod
    def of(cls, roles: Roles, critic: Critic | None) -> RoleFlops:
        """Return the sizes of a module's models, once they are on the training device."""
        is_apart = critic is not None and not critic.shares_trunk
        return cls(
            role_flops(roles, POLICY),
            role_flops(roles, REFERENCE),
            role_flops(critic.roles, critic.role) if critic is not None and is_apart else None,
        )


def iteration_compute(
    models: RoleFlops,
    reward: Reward,
    sampler: Sampler,
    config: PPOConfig,
    experience: Experience,
    *,
    updates: int,
    microbatch_size: int,
    policy_learns: bool,
    annotated: bool,
) -> Compute:
    """Return the tokens and operations of an iteration, by the formulas of `models/flops.py`.

        rollout    sampling [+ forward of the policy][+ forward of the critic apart]
        score      forward of the reference and of each reward model
        update     (forward + backward of the policy) [+ the same of the critic apart], each epoch

    The output layer reads response tokens alone. A critic on the policy's trunk costs nothing.
    kl_estimator=full adds a forward pass of the policy to the score, or of the reference to the
    update. A reward model with a tokenizer of its own is taken to read as many tokens as the
    policy, and a reward on another machine costs nothing. Every sampler is taken to compute with a
    cache, and all but the native one to read a prompt once for each response to it.

    Args:
        updates: number of minibatches that were read.
        microbatch_size: number of rows in a forward pass.
        policy_learns: False during ppo.critic_warmup.
        annotated: True where the policy read the sampled responses for log-probabilities or values.
    """
    lengths, responses = (
        mask.sum(dim=1).cpu() for mask in (experience.mask, experience.response_mask)
    )
    wanted = int(responses.sum())
    # Nothing is predicted from the last token.
    read = Rows(lengths - 1, wanted, math.ceil(len(lengths) / microbatch_size))
    copies = config.samples_per_prompt if isinstance(sampler, NativeSampler) else 1
    rollout = models.policy.sampling(lengths - responses, responses, copies)
    if annotated:
        rollout += models.policy.forward(Rows(lengths - 1, wanted)) + models.policy.head(wanted)
    if models.critic is not None:
        rollout += models.critic.forward(read)

    minibatches = len(lengths) // config.minibatch_size
    passes = minibatches * math.ceil(config.minibatch_size / microbatch_size)
    epoch = Rows(lengths - 1, wanted, passes)
    update = epoch_flops(models, config, epoch, policy_learns=policy_learns)
    readings = (
        1 + len(reward.reading) + (models.critic is not None) + annotated
        + (config.kl_estimator == "full" and config.kl_in == "reward")
    )  # fmt: skip
    tokens = int(lengths.sum())
    return Compute(
        generated_tokens=wanted,
        scored_tokens=readings * tokens,
        trained_tokens=round(tokens * updates / minibatches),
        rollout_flops=rollout,
        score_flops=score_flops(models, reward, config, read),
        update_flops=update * updates / minibatches,
    )


def score_flops(models: RoleFlops, reward: Reward, config: PPOConfig, read: Rows) -> float:
    """Return the operations of reference and reward models; read: rows without their last token."""
    head = models.policy.head(read.wanted)
    scored = models.reference.forward(read) + head
    scored += sum(flops(read.lengths + 1, read.passes) for flops in reward.reading)
    if config.kl_estimator == "full" and config.kl_in == "reward":
        scored += models.policy.forward(read) + 2 * head
    return scored


def epoch_flops(models: RoleFlops, config: PPOConfig, epoch: Rows, *, policy_learns: bool) -> float:
    """Return the operations of one pass of updates over all responses; epoch: its rows."""
    policy, wanted = models.policy, epoch.wanted
    head, logits = policy.head(wanted), wanted / epoch.passes * policy.vocabulary
    update = policy.forward(epoch) + head
    if policy_learns:
        update += policy.backward(epoch) + head
        if config.ent_coef > 0 and logits > CHUNK_ELEMENTS:  # computed again for the gradient
            update += head
    if config.kl_estimator == "full" and config.kl_in == "loss":
        update += models.reference.forward(epoch) + 2 * head
        if policy_learns:
            update += head * (3 if 2 * logits > CHUNK_ELEMENTS else 1)
    if models.critic is not None:
        update += models.critic.forward(epoch) + models.critic.backward(epoch)
    return update
