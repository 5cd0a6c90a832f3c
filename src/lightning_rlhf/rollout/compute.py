"""Tokens and floating-point operations of one iteration of PPO."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_rlhf.core.logprobs import CHUNK_ELEMENTS
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.results import Compute
from lightning_rlhf.core.types import Experience
from lightning_rlhf.models.flops import Flops, Rows, role_flops
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
    tokens, wanted, policy = int(lengths.sum()), int(responses.sum()), models.policy
    is_native, head = isinstance(sampler, NativeSampler), policy.head(wanted)
    over_vocabulary = config.kl_estimator == "full"
    batches = math.ceil(len(lengths) / microbatch_size)
    read = Rows(lengths - 1, wanted, batches)  # nothing is predicted from the last token

    rollout = policy.sampling(
        lengths - responses, responses, config.samples_per_prompt if is_native else 1
    )
    if annotated:
        rollout += policy.forward(Rows(lengths - 1, wanted)) + head
    if models.critic is not None:
        rollout += models.critic.forward(read)

    scored = models.reference.forward(read) + head
    scored += sum(flops(lengths, batches) for flops in reward.reading)
    if over_vocabulary and config.kl_in == "reward":
        scored += policy.forward(read) + 2 * head

    minibatches = len(lengths) // config.minibatch_size
    passes = minibatches * math.ceil(config.minibatch_size / microbatch_size)
    epoch = Rows(lengths - 1, wanted, passes)
    logits = wanted / passes * policy.vocabulary
    update = policy.forward(epoch) + head
    if policy_learns:
        update += policy.backward(epoch) + head
        if config.ent_coef > 0 and logits > CHUNK_ELEMENTS:  # computed again for the gradient
            update += head
    if over_vocabulary and config.kl_in == "loss":
        update += models.reference.forward(epoch) + 2 * head
        if policy_learns:
            update += head * (3 if 2 * logits > CHUNK_ELEMENTS else 1)
    if models.critic is not None:
        update += models.critic.forward(epoch) + models.critic.backward(epoch)
    readings = (
        1 + len(reward.reading) + (models.critic is not None) + annotated
        + (over_vocabulary and config.kl_in == "reward")
    )  # fmt: skip
    return Compute(
        generated_tokens=wanted,
        scored_tokens=readings * tokens,
        trained_tokens=round(tokens * updates / minibatches),
        rollout_flops=rollout,
        score_flops=scored,
        update_flops=update * updates / minibatches,
    )
