"""The parameters of each role, and which of them are trained."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import lightning as L
from torch import nn

from lightning_rlhf.models.config import BASE, CRITIC, POLICY, REWARD, VALUE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.rewards.learned import LearnedReward, TextReward
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.stages.preflight.check import Check

OF_ADAPTER = re.compile(r"\.lora_\w+\.([^.]+)(\.|$)")
"""Pattern of a parameter's name in PEFT, with the name of its adapter."""
OF_HEAD = re.compile(r"^heads\.([^.]+)\.")
"""Pattern of the name of a parameter of a scalar head, with its role."""
Parameters = Mapping[str, list[nn.Parameter]]
"""Role -> its own parameters: the base's without any adapter, an adapter's, a head's."""


def by_role(module: L.LightningModule) -> Parameters:
    """Return the parameters of all roles of a stage; a value head belongs to the critic."""
    roles = roles_of(module)
    found = groups(roles)
    if isinstance(module, PPOModule):
        critic = module.critic
        if critic is not None and critic.roles is not roles:
            found[CRITIC] = list(critic.roles.parameters())
        for name, model in own_models(module.reward):
            if model is not roles:
                found[name] = list(model.parameters())
    return found


def roles_of(module: L.LightningModule) -> Roles:
    """Return the models of a stage's module."""
    assert isinstance(module.roles, Roles)
    return module.roles


def groups(roles: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of a model with adapters and heads by role, BASE first."""
    found: dict[str, list[nn.Parameter]] = defaultdict(list)
    found[BASE] = []
    for name, parameter in roles.named_parameters():
        match = OF_HEAD.search(name) or OF_ADAPTER.search(name)
        role = match[1] if match else BASE
        found[CRITIC if role == VALUE else role].append(parameter)
    return dict(found)


def own_models(reward: Reward) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and model of each component that is computed by a model in this process."""
    for term, source in zip(reward.terms, reward.sources, strict=True):
        match source:
            case LearnedReward(module=nn.Module() as model):
                yield f"{REWARD} {term.name}", model
            case TextReward(model=text) if text.module is not None:
                yield f"{REWARD} {term.name}", text.module


def trainable(module: L.LightningModule) -> Iterator[Check]:
    """Yield a check of the trainable parameters of each role."""
    found = by_role(module)
    trained = {role: [p for p in group if p.requires_grad] for role, group in found.items()}
    for role, group in found.items():
        all_of_it, some = sum(p.numel() for p in group), sum(p.numel() for p in trained[role])
        wanted: tuple[int, ...] = (0, all_of_it)
        if isinstance(module, PPOModule | DPOModule):
            wanted = (all_of_it,) if role in (POLICY, CRITIC) else (0,)
        elif isinstance(module, RewardModule) and role == REWARD:
            wanted = (all_of_it,)
        allowed = " or ".join("none" if n == 0 else "all" for n in wanted)
        yield Check(
            f"trainable: {role}", f"{some:,} of {all_of_it:,}", allowed,
            "passed" if some in wanted else "failed",
        )  # fmt: skip
    if not any(trained.values()):
        yield Check("trainable: any role", "none", "some", "failed")
