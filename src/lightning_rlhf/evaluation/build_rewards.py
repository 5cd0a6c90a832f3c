"""Builds the reward that PPO maximises from the section `reward`, and the critic."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from omegaconf import OmegaConf
from torch import Tensor

from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.batches import pad
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message, prompt_row
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.io.user_code import load_function
from lightning_rlhf.models.build_roles import (
    add_critic,
    attach_reward,
    load_reward,
    random_reward,
    warn_of_one_head,
)
from lightning_rlhf.models.checkpoint import FROM_CONFIG, Final, find, local_folder, tokenizer_hash
from lightning_rlhf.models.classifier import check_classifier, load_classifier, positions
from lightning_rlhf.models.config import REWARD, SFT
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards.config import (
    ComponentConfig,
    FunctionConfig,
    HeadConfig,
    HTTPConfig,
    TextModelConfig,
)
from lightning_rlhf.rewards.functions import FunctionReward
from lightning_rlhf.rewards.http import HTTPReward
from lightning_rlhf.rewards.learned import Features, LearnedReward, TextModel, TextReward
from lightning_rlhf.rewards.weighted import Reward, Source
from lightning_rlhf.rollout.score import Critic
from lightning_rlhf.runs.console import CONF
from lightning_rlhf.runs.folders import reward_role
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.settings import read_reward
from lightning_rlhf.runs.stage import Settings, reward_key
from lightning_rlhf.runs.trained import trained_as

if TYPE_CHECKING:
    from lightning_rlhf.rewards.server import Columns, Messages, Score


NOT_SERVED = ("kind", "name_or_path", "weight", "clip", "format_check", "format_tolerance", "unfit")
"""Keys of conf/reward/model.yaml that belong to the run that asks a server."""


def text_reward(
    config: TextModelConfig, key: str, final: Final | None, device: torch.device
) -> TextReward:
    """Load and return the reward model of a checked `config`, the section `key`.

    final: local folder of the model; None for one from the hub.
    """
    final = final or found(config, key)
    on = torch.device(config.device) if config.device else device
    load = partial(own_model, final) if final.manifest is not None else classifier_model
    model, there = load(config, key, on)
    limit = min((n for n in (there, config.max_tokens) if n is not None), default=None)
    mean, std = final.reward_moments() if config.normalization == "stored" else (0.0, 1.0)
    batch_size = MicrobatchSize(f"{key}.batch_size", config.batch_size)
    return TextReward(model, mean, std, config.uncertainty_coef, batch_size, limit, key)


def found(config: TextModelConfig, key: str) -> Final:
    """Return the folder of a reward model, downloaded from the hub where it is not local."""
    key = f"{key}.name_or_path"
    return find(str(local_folder(config.name_or_path, key, config.revision)), key)


def check_text_reward(config: TextModelConfig, key: str, final: Final | None) -> None:
    """Raise an RLHFError for errors known before weights load; arguments as for `text_reward`."""
    final = final or found(config, key)
    if final.manifest is not None:
        check_own(final, config, key)
        return
    if config.normalization == "stored":
        raise ConfigError(
            f"{key}.normalization is 'stored', but {config.name_or_path} was not trained by "
            "stage=rm, which measures mean and deviation; allowed: none, running"
        )
    require(config.uncertainty_coef == 0, f"{key}.uncertainty_coef", config.uncertainty_coef,
            f"0, since {config.name_or_path} is no ensemble of stage=rm")  # fmt: skip
    check_classifier(final.path, config, key)


def check_own(final: Final, config: TextModelConfig, key: str) -> None:
    """Raise ConfigError where an option does not fit a reward model of stage=rm."""
    for name in ("revision", "tokenizer", "chat_template", "label"):
        value = getattr(config, name)
        if value is not None:
            raise ConfigError(
                f"{key}.{name} is {value!r}, but {final.path} was written by stage=rm and brings "
                "its own; allowed: null"
            )
    manifest = final.require_manifest("rm")
    trained_as(final)
    require(config.quantization == "none" or manifest.base != FROM_CONFIG, f"{key}.quantization",
            config.quantization, f"none, since {final.path} stands on model.from_config, which has "
            "no weights to quantise")  # fmt: skip
    if config.normalization == "stored":
        final.reward_moments()


def classifier_model(
    config: TextModelConfig, key: str, device: torch.device
) -> tuple[TextModel, int | None]:
    """Load a sequence classifier of any family; returns the same as `own_model`."""
    found = load_classifier(config, key, device)
    parts = (found.encode, found.read, found.show, found.problems, found.doubts, found.starts)
    return TextModel(*parts, found.model), positions(found.model.config)


def own_model(
    final: Final, config: TextModelConfig, key: str, device: torch.device
) -> tuple[TextModel, int | None]:
    """Load a reward model of stage=rm on the base and with the format that it was trained with.

    Returns: the model, and its number of positions in tokens; None where it states none.
    """
    trained, template_kwargs = trained_as(final)
    base = replace(
        trained,
        # Full fine-tuning keeps float32 weights whatever model.dtype says.
        dtype=config.dtype or (trained.dtype if final.is_adapter else "float32"),
        quantization=config.quantization,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    roles = load_reward(final, base).to(device)
    warn_of_one_head(roles, REWARD, config.uncertainty_coef, key)
    tokenizer = load_tokenizer(base, final.path)
    chat = ChatFormat(tokenizer, template_kwargs)

    def encode(row: Mapping[str, Any], response: str) -> Features:
        prompt = chat.prompt_tokens(turns(row["messages"]))
        return {"input_ids": [*prompt, *chat.response_tokens(response)]}

    def read(features: Sequence[Features]) -> Float[Tensor, "n H"]:
        tokens, mask = pad([one["input_ids"] for one in features], chat.pad_token_id, "right")
        with torch.autocast(device.type, enabled=False):
            return roles.rewards(tokens.to(device), mask.to(device))

    longest = positions(roles.causal_lm.config)
    return TextModel(encode, read, chat.show, module=roles, role=REWARD), longest


def text_scorer(source: str, overrides: Sequence[str]) -> Score:
    """Return the score function of a server: the reward at a folder or hub id, on a GPU if any.

    Scores are standardised for a `final/` of stage=rm, which has mean and deviation; else raw.
    Prints the verdict of the model's fitness report, where it has one.
    overrides: `reward.KEY=VALUE`, keys of conf/reward/model.yaml that set how the model reads text.
    """
    final = find(str(local_folder(source, "final", None)), "final")
    for word in overrides:
        require(re.match(r"reward\.\w+=", word) is not None, "an option", word, "reward.KEY=VALUE")
        key = word.partition("=")[0]
        if key.removeprefix("reward.") in NOT_SERVED:
            raise ConfigError(f"{key} is given, but a server does not read it; allowed: in the run "
                              "that asks, with reward=http or reward=model")  # fmt: skip
    tree = OmegaConf.merge(
        {"reward": OmegaConf.load(CONF / "reward" / "model.yaml")},
        {"reward": {"name_or_path": str(final.path)}},
        {"reward": {"normalization": "stored" if final.manifest else "none"}},
        OmegaConf.from_dotlist(list(overrides)),
    )
    (config,) = read_reward(OmegaConf.to_container(tree.reward)).values()
    assert isinstance(config, TextModelConfig)
    require(config.normalization != "running", "reward.normalization", "running",
            "none, stored: to a server every request is the first")  # fmt: skip
    check_text_reward(config, "reward", final)
    if final.verdict is not None:
        advice = " It is served all the same." * final.verdict.is_unfit
        print_line(f"reward {final.path}: {final.verdict.words}{advice}", final.verdict.style)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with Working("loading the reward model"):
        reward = text_reward(config, "reward", final, device)

    def score(prompts: list[Messages], responses: list[str], columns: Columns) -> list[float]:
        rows = [prompt_row(turns(prompt)) for prompt in prompts]
        return reward.score(rows, responses).tolist() if responses else []

    return score


def turns(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return the turns of a row as the chat template takes them."""
    return tuple(map(Message.of, messages))


def hub_rewards(ready: Run) -> dict[str, Final]:
    """Return the reward models from the hub, by role; `light_sources` has downloaded them."""
    settings = ready.settings
    return {
        role: found(config, reward_key(settings, name))
        for name, config in settings.reward.items()
        if isinstance(config, TextModelConfig)
        and (role := reward_role(settings, name)) not in ready.parents
    }


Loader = Callable[[Roles, MicrobatchSize], Source]
"""Function that loads a checked component beside the models, with the number of responses that a
head on the policy's base reads at once."""


def light_sources(ready: Run, columns: Collection[str]) -> dict[str, Loader]:
    """Check every component of the reward before a model loads; return what loads each.

    columns: columns of the prompts' rows.
    Raises ConfigError, CheckpointError or RewardError where one cannot be built as configured.
    """
    settings = ready.settings
    if isinstance(settings.config, PPOConfig) and settings.config.critic_init == "reward":
        critic_start(settings)
    return {name: _checked(ready, name, columns) for name in settings.reward}


def _checked(ready: Run, name: str, columns: Collection[str]) -> Loader:
    settings, config = ready.settings, ready.settings.reward[name]
    key, role = reward_key(settings, name), reward_role(settings, name)
    source: Source
    match config:
        case HeadConfig():
            check_template(ready, ready.parents[role])
            reward_scale(ready.parents[role], config)
            return lambda roles, size: head_source(ready, roles, name, config, size)
        case TextModelConfig():
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
    ready: Run, roles: Roles, light: Mapping[str, Loader], batch_size: MicrobatchSize
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


def random_source(ready: Run, roles: Roles, role: str, batch_size: MicrobatchSize) -> Source:
    """Return a reward head with random weights."""
    own = zlib.crc32(f"{ready.settings.seed} {role}".encode())
    random_reward(roles, role, torch.Generator().manual_seed(own))
    return LearnedReward(
        partial(roles.rewards, role=role), 0.0, 1.0, 0.0, batch_size,
        roles, role,
    )  # fmt: skip


def head_source(
    ready: Run, roles: Roles, name: str, config: HeadConfig, batch_size: MicrobatchSize
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


def check_template(ready: Run, final: Final) -> None:
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


def build_critic(ready: Run, roles: Roles) -> Critic:
    """Load and return the critic that ppo.critic and ppo.critic_init describe."""
    reward, scale = None, (0.0, 1.0)
    config: PPOConfig = ready.settings.config
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
