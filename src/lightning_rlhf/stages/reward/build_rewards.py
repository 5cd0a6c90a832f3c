"""Builds the reward that PPO maximises from the section `reward`, and the critic."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch

from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.io.user_code import load_function
from lightning_rlhf.models.build_roles import attach_reward, random_reward, warn_of_one_head
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.models.critic_loading import add_critic
from lightning_rlhf.models.manifest import tokenizer_hash
from lightning_rlhf.models.roles import SFT, Roles
from lightning_rlhf.rewards.config import (
    ComponentConfig,
    FunctionConfig,
    HeadConfig,
    HTTPConfig,
    ModelConfig,
)
from lightning_rlhf.rewards.function import FunctionReward
from lightning_rlhf.rewards.http import HTTPReward
from lightning_rlhf.rewards.learned import LearnedReward
from lightning_rlhf.rewards.weighted import Reward, Source
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.folders import reward_role
from lightning_rlhf.stages.launch import Prepared
from lightning_rlhf.stages.reward.text_rewards import check_text_reward, found, text_reward
from lightning_rlhf.stages.stage import Settings, reward_key


def hub_rewards(ready: Prepared) -> dict[str, Final]:
    """Return the reward models from the hub, by role; `light_sources` has downloaded them."""
    settings = ready.settings
    return {
        role: found(config, reward_key(settings, name))
        for name, config in settings.reward.items()
        if isinstance(config, ModelConfig)
        and (role := reward_role(settings, name)) not in ready.parents
    }


Loader = Callable[[Roles, MicrobatchSize], Source]
"""Function that loads a checked component beside the models, with the number of responses that a
head on the policy's base reads at once."""


def light_sources(ready: Prepared, columns: Collection[str]) -> dict[str, Loader]:
    """Check every component of the reward before a model loads; return what loads each.

    columns: columns of the prompts' rows.
    Raises ConfigError, CheckpointError or RewardError where one cannot be built as configured.
    """
    settings = ready.settings
    if isinstance(settings.config, PPOConfig) and settings.config.critic_init == "reward":
        critic_start(settings)
    return {name: _checked(ready, name, columns) for name in settings.reward}


def _checked(ready: Prepared, name: str, columns: Collection[str]) -> Loader:
    settings, config = ready.settings, ready.settings.reward[name]
    key, role = reward_key(settings, name), reward_role(settings, name)
    source: Source
    match config:
        case HeadConfig():
            check_template(ready, ready.parents[role])
            reward_scale(ready.parents[role], config)
            return lambda roles, size: head_source(ready, roles, name, config, size)
        case ModelConfig():
            final = ready.parents.get(role)
            check_text_reward(config, key, final)
            return lambda roles, size: text_reward(config, key, final, ready.device)
        case FunctionConfig():
            function = load_function(config.path, f"{key}.path")
            source = FunctionReward(function, config.arguments, key).for_columns(columns)
        case HTTPConfig():
            source = HTTPReward(
                config.url, batch_size=config.batch_size, timeout_s=config.timeout_s,
                retries=config.retries, backoff_s=config.backoff_s, cache_size=config.cache_size,
                token_env=config.token_env, name=key, warn=partial(print_line, style="yellow"),
            )  # fmt: skip
            source.greet()
        case _:
            return lambda roles, size: random_source(ready, roles, role, size)
    return lambda roles, size: source


def build_reward(
    ready: Prepared, roles: Roles, light: Mapping[str, Loader], batch_size: MicrobatchSize
) -> Reward:
    """Return the reward that PPO maximises: every component, in the order of the configuration.

    light: components from `light_sources`.
    batch_size: number of responses that a head on the policy's base reads at once.
    """
    components = ready.settings.reward
    with Working("loading the reward"):
        return Reward(
            tuple(component.term(name) for name, component in components.items()),
            tuple(light[name](roles, batch_size) for name in components),
        )


def random_source(ready: Prepared, roles: Roles, role: str, batch_size: MicrobatchSize) -> Source:
    """Return a reward head with random weights."""
    own = zlib.crc32(f"{ready.settings.seed} {role}".encode())
    random_reward(roles, role, torch.Generator().manual_seed(own))
    return LearnedReward(
        partial(roles.rewards, role=role), 0.0, 1.0, 0.0, batch_size,
        roles, role,
    )  # fmt: skip


def head_source(
    ready: Prepared, roles: Roles, name: str, config: HeadConfig, batch_size: MicrobatchSize
) -> LearnedReward:
    """Return a reward model of stage=rm, on the policy's base or with its own."""
    role = reward_role(ready.settings, name)
    final = ready.parents[role]
    mean, std = reward_scale(final, config)
    owner = attach_reward(roles, role, final, ready.settings.model, tokenizer_hash(ready.tokenizer))
    key = reward_key(ready.settings, name)
    warn_of_one_head(owner, role, config.uncertainty_coef, key)
    if owner is not roles:
        owner.to(ready.device)
    return LearnedReward(
        partial(owner.rewards, role=role), mean, std, config.uncertainty_coef, batch_size,
        owner, role,
    )  # fmt: skip


def check_template(ready: Prepared, final: Final) -> None:
    """Raise CheckpointError unless a reward model was trained with the policy's chat template."""
    if final.require_manifest("rm").chat_template != str(ready.tokenizer.chat_template):
        raise CheckpointError(
            f"{final.path} was trained with another chat template than the policy's: it would "
            "read other text than it was trained on. Train it again from this SFT model, or let "
            f"it read text: reward=model reward.name_or_path={final.path}"
        )


def reward_scale(final: Final, config: ComponentConfig) -> tuple[float, float]:
    """Return the mean and standard deviation by which a component is standardised.

    They are those that stage=rm measured where normalization is stored, else 0 and 1.
    """
    return final.reward_moments() if config.normalization == "stored" else (0.0, 1.0)


def critic_start(settings: Settings) -> tuple[str, HeadConfig]:
    """Return the name and the settings of the component from which the critic is initialised.

    Raises ConfigError where there is none, or its normalization or weight does not allow it.
    """
    heads = [(name, part) for name, part in settings.reward.items() if isinstance(part, HeadConfig)]
    why = ""
    if len(heads) != 1:
        why = f"component of kind head, but there are {len(heads)}; allowed: one such component"
    elif heads[0][1].normalization == "running":
        why = "scale at the start, but it has normalization=running; allowed: none, stored"
    elif heads[0][1].weight == 0:
        why = "component of kind head, but that has weight=0; allowed: another weight"
    if why:
        words = f"ppo.critic_init is 'reward', which starts from the reward's {why}"
        raise ConfigError(f"{words}, or ppo.critic_init=zero")
    return heads[0]


def build_critic(ready: Prepared, roles: Roles, config: PPOConfig) -> Critic:
    """Load and return the critic that ppo.critic and ppo.critic_init describe."""
    reward, scale = None, (0.0, 1.0)
    if config.critic_init == "reward":
        name, component = critic_start(ready.settings)
        reward = ready.parents[reward_role(ready.settings, name)]
        mean, std = reward_scale(reward, component)
        scale = mean, std / component.weight
    with Working("loading the critic"):
        owner, role = add_critic(
            roles,
            ready.settings.model,
            config.critic,
            sft=ready.parents.get(SFT),
            reward=reward,
            scale=scale,
            seed=ready.settings.seed,
        )
    return Critic(owner, role)
