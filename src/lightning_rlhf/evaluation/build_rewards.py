"""Builds the reward that PPO maximises from the section `reward`, and the critic.

It is read with the verdicts that fitness reports gave on it.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from omegaconf import OmegaConf
from torch import Tensor

from lightning_rlhf.core.config import PPOConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.validation import build
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
from lightning_rlhf.models.checkpoint import (
    FROM_CONFIG,
    PAGE,
    Final,
    Verdict,
    find,
    json_object,
    local_folder,
    tokenizer_hash,
)
from lightning_rlhf.models.classifier import load_classifier, positions
from lightning_rlhf.models.config import REWARD, SFT
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards.config import (
    ComponentConfig,
    FunctionConfig,
    HeadConfig,
    HTTPConfig,
    LearnedConfig,
    RandomConfig,
    TextModelConfig,
)
from lightning_rlhf.rewards.functions import FunctionReward
from lightning_rlhf.rewards.http import HTTPReward
from lightning_rlhf.rewards.weighted import (
    Features,
    LearnedReward,
    Reward,
    Source,
    TextModel,
    TextReward,
)
from lightning_rlhf.rollout.score import Critic
from lightning_rlhf.runs.console import CONF
from lightning_rlhf.runs.folders import CONFIG, FINAL, differing_keys, folder_of, read_config
from lightning_rlhf.runs.parents import reward_role, trained_as
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.settings import read_reward
from lightning_rlhf.runs.stage import Settings, reward_key

if TYPE_CHECKING:
    from lightning_rlhf.rewards.server import Columns, Messages, Score


NOT_SERVED = ("kind", "name_or_path", "weight", "clip", "format_check", "format_tolerance", "unfit")
"""Keys of conf/reward/model.yaml that belong to the run that asks a server."""
RANDOM = Verdict(True, "Not fit: a random head means nothing, it only shows that all runs.", ())
FUNCTIONS = "functions.json"
"""File of stage=eval_reward with a hash of the code of each function that it judged."""


def light_sources(run: Run) -> dict[str, Source]:
    """Return the components that need no model: functions, and servers that have been greeted.

    They are built before any data is read. Raises ConfigError or RewardError where one cannot be,
    or where ppo.critic_init does not fit the reward.
    """
    settings, found = run.settings, dict[str, Source]()
    if isinstance(settings.config, PPOConfig) and settings.config.critic_init == "reward":
        critic_start(settings)
    for name, config in settings.reward.items():
        key = reward_key(settings, name)
        if isinstance(config, FunctionConfig):
            function = load_function(config.path, f"{key}.path")
            found[name] = FunctionReward(function, config.arguments, key)
        elif isinstance(config, HTTPConfig):
            server = found[name] = HTTPReward(config, key, partial(print_line, style="yellow"))
            server.greet()
    return found


def for_columns(light: Mapping[str, Source], columns: Collection[str]) -> dict[str, Source]:
    """Return the `light_sources` for prompts with these columns; raise ConfigError if one lacks."""
    return {
        name: source.for_columns(columns) if isinstance(source, FunctionReward) else source
        for name, source in light.items()
    }


def build_reward(
    run: Run, roles: Roles, light: Mapping[str, Source], batch_size: MicrobatchSize
) -> Reward:
    """Return the reward that PPO maximises: every component, in the order of the configuration.

    light: components of `light_sources`.
    batch_size: number of responses that a head on the policy's base reads at once.

    Raises an RLHFError where a model of the reward does not fit its section or the policy.
    """
    settings, sources = run.settings, list[Source]()
    with Working("loading the reward"):
        for name, config in settings.reward.items():
            key, role = reward_key(settings, name), reward_role(settings, name)
            match config:
                case HeadConfig():
                    sources.append(head_source(run, roles, key, role, config, batch_size))
                case TextModelConfig():
                    sources.append(text_reward(config, key, run.parents.get(role), run.device))
                case RandomConfig():
                    own = torch.Generator().manual_seed(
                        zlib.crc32(f"{settings.seed} {role}".encode())
                    )
                    random_reward(roles, role, own)
                    rewards = partial(roles.rewards, role=role)
                    sources.append(LearnedReward(rewards, 0.0, 1.0, 0.0, batch_size, roles, role))
                case _:
                    sources.append(light[name])
    terms = (config.term(name) for name, config in settings.reward.items())
    return Reward(tuple(terms), tuple(sources))


def head_source(
    run: Run, roles: Roles, key: str, role: str, config: HeadConfig, batch_size: MicrobatchSize
) -> LearnedReward:
    """Return a reward model of stage=rm, on the policy's base or with its own."""
    final = run.parents[role]
    if final.require_manifest("rm").chat_template != str(run.tokenizer.chat_template):
        raise CheckpointError(
            f"{final.path} was trained with another chat template than the policy's: it would "
            "read other text than it was trained on. Train it again from this SFT model, or let "
            f"it read text: reward=model reward.name_or_path={final.path}"
        )
    moments = reward_scale(final, config)
    owner = attach_reward(roles, role, final, run.settings.model, tokenizer_hash(run.tokenizer))
    warn_of_one_head(owner, role, config.uncertainty_coef, key)
    if owner is not roles:
        owner.to(run.device)
    rewards = partial(owner.rewards, role=role)
    return LearnedReward(rewards, *moments, config.uncertainty_coef, batch_size, owner, role)


def reward_scale(final: Final, config: ComponentConfig) -> tuple[float, float]:
    """Return the mean and standard deviation by which a component is standardised.

    They are those that stage=rm measured where normalization is stored, else 0 and 1.
    """
    return final.reward_moments() if config.normalization == "stored" else (0.0, 1.0)


def text_reward(
    config: TextModelConfig, key: str, final: Final | None, device: torch.device
) -> TextReward:
    """Load and return the reward model of a checked `config`, the section `key`.

    final: local folder of the model; None for one from the hub.
    Raises an RLHFError where the section does not fit the model, before its weights load.
    """
    final, device = final or fetched(config, key), torch.device(config.device or device)
    model: TextModel
    moments = (0.0, 1.0)
    if final.manifest is not None:
        moments = reward_scale(final, config)
        own = OwnModel.load(final, config, key, device)
        model, module, role, there = own, own.roles, REWARD, positions(own.roles.causal_lm.config)
    else:
        name, coef = config.name_or_path, config.uncertainty_coef
        require(config.normalization != "stored", f"{key}.normalization", "stored",
                f"none, running: {name} was not trained by stage=rm, which measures "
                "mean and deviation")  # fmt: skip
        require(coef == 0, f"{key}.uncertainty_coef", coef,
                f"0, since {name} is no ensemble of stage=rm")  # fmt: skip
        other = load_classifier(config, key, device)
        model, module, role, there = other, other.model, "", positions(other.model.config)
    limit = min((n for n in (there, config.max_tokens) if n is not None), default=None)
    batch_size = MicrobatchSize(f"{key}.batch_size", config.batch_size)
    return TextReward(
        model, *moments, config.uncertainty_coef, batch_size, limit, key, module, role
    )


def fetched(config: TextModelConfig, key: str) -> Final:
    """Return the folder of a reward model, downloaded from the hub where it is not local."""
    key = f"{key}.name_or_path"
    return find(str(local_folder(config.name_or_path, key, config.revision)), key)


@dataclass(frozen=True)
class OwnModel(TextModel):
    """A reward model of stage=rm, on the base and with the format that it was trained with."""

    roles: Roles
    chat: ChatFormat
    device: torch.device

    @classmethod
    def load(
        cls, final: Final, config: TextModelConfig, key: str, device: torch.device
    ) -> OwnModel:
        """Return the model. Raises an RLHFError where an option does not fit it."""
        for name in ("revision", "tokenizer", "chat_template", "label"):
            require(getattr(config, name) is None, f"{key}.{name}", getattr(config, name),
                    f"null, since {final.path} was written by stage=rm and brings its own",
                    )  # fmt: skip
        is_random = final.require_manifest("rm").base == FROM_CONFIG
        trained, template_kwargs = trained_as(final)
        require(config.quantization == "none" or not is_random, f"{key}.quantization",
                config.quantization, f"none, since {final.path} stands on model.from_config, which "
                "has no weights to quantise")  # fmt: skip
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
        return cls(roles, ChatFormat(load_tokenizer(base, final.path), template_kwargs), device)

    def encode(self, row: Mapping[str, Any], response: str) -> Features:
        prompt = self.chat.prompt_tokens(tuple(map(Message.of, row["messages"])))
        return {"input_ids": [*prompt, *self.chat.response_tokens(response)]}

    def read(self, features: Sequence[Features]) -> Float[Tensor, "n H"]:
        tokens, mask = pad([one["input_ids"] for one in features], self.chat.pad_token_id, "right")
        with torch.autocast(self.device.type, enabled=False):
            return self.roles.rewards(tokens.to(self.device), mask.to(self.device))

    def show(self, tokens: Sequence[int]) -> str:
        return self.chat.show(tokens)


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
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with Working("loading the reward model"):
        reward = text_reward(config, "reward", final, device)
    if final.verdict is not None:
        advice = " It is served all the same." * final.verdict.is_unfit
        print_line(f"reward {final.path}: {final.verdict.words}{advice}", final.verdict.style)

    def score(prompts: list[Messages], responses: list[str], columns: Columns) -> list[float]:
        rows = [prompt_row(tuple(map(Message.of, prompt))) for prompt in prompts]
        return reward.score(rows, responses).tolist() if responses else []

    return score


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


def build_critic(run: Run, roles: Roles) -> Critic:
    """Load and return the critic that ppo.critic and ppo.critic_init describe."""
    settings, reward, scale = run.settings, None, (0.0, 1.0)
    if settings.config.critic_init == "reward":
        name, component = critic_start(settings)
        reward = run.parents[reward_role(settings, name)]
        mean, std = reward_scale(reward, component)
        scale = mean, std / component.weight
    with Working("loading the critic"):
        owner, role = add_critic(
            roles, settings.model, settings.config.critic, sft=run.parents.get(SFT), reward=reward,
            scale=scale, seed=settings.seed,
        )  # fmt: skip
    return Critic(owner, role)


def verdicts_on(run: Run, *, refuses: bool, shown: bool = True) -> dict[str, Verdict]:
    """Return the verdicts of fitness reports on the reward, by component, and print them.

    They are those of stage=rm on its models and, where there is none on the whole reward, that of
    stage=eval_reward of the run.
    A component of weight 0 is never refused: it is not paid.

    Raises ConfigError where a model is unfit and its key `unfit` is refuse; never unless `refuses`.
    """
    settings, verdicts = run.settings, dict[str, Verdict | None]()
    for name, config in settings.reward.items():
        key, final = reward_key(settings, name), run.parents.get(reward_role(settings, name))
        if isinstance(config, RandomConfig):
            verdicts[name] = RANDOM
        if isinstance(config, TextModelConfig) and final is None:
            final = fetched(config, key)
        # A manifest is missing where another program wrote a classifier.
        if not isinstance(config, LearnedConfig) or final is None or final.manifest is None:
            continue
        verdict = verdicts[name] = final.verdict
        is_paid = config.weight != 0 and config.unfit == "refuse"
        if refuses and verdict is not None and verdict.is_unfit and is_paid:
            raise ConfigError(
                f"reward {name} is unfit by its fitness report {final.path / PAGE}: "
                f"{verdict.words} Train a better reward model; or {key}.unfit=warn runs PPO on it "
                "all the same"
            )
    whole = ", ".join(settings.reward)
    if verdicts.get(whole) is None and (found := evaluated(settings)) is not None:
        verdicts[whole] = found
    for name, verdict in verdicts.items() if shown else ():
        if verdict is None:
            print_line(
                f"reward {name} has no fitness verdict (stage=rm needs held-out pairs for one): "
                "nothing says whether it is fit to be maximised",
                "yellow",
            )
        else:
            advice = " PPO is run on it all the same." * (refuses and verdict.is_unfit)
            print_line(f"reward {name}: {verdict.words}{advice}", verdict.style)
    return {name: verdict for name, verdict in verdicts.items() if verdict is not None}


def evaluated(settings: Settings) -> Verdict | None:
    """Return the verdict of stage=eval_reward of the run; None without one on this reward.

    It is on this reward if the section and the code of its functions are the same.
    """
    folder = folder_of(settings, "eval_reward")
    report, functions = folder / FINAL / "fitness.json", folder / FINAL / FUNCTIONS
    if not report.is_file() or not functions.is_file():
        return None
    then = read_config(folder / CONFIG, "delete it to go on")
    is_same = not differing_keys(
        {"reward": then.get("reward")}, {"reward": settings.tree["reward"]}, ()
    )
    if not is_same or json_object(functions) != code_of(settings):
        return None
    return build(Verdict, json_object(report).get("judgement"), f"{report}: judgement")


def code_of(settings: Settings) -> dict[str, str]:
    """Return the hash of the file of each function of the reward, by component."""
    found = {}
    for name, config in settings.reward.items():
        if isinstance(config, FunctionConfig):
            where = os.path.expanduser(config.path.rpartition(":")[0])
            file = Path(where) if where.endswith(".py") else file_of_module(where)
            code = file.read_bytes() if file is not None and file.is_file() else b""
            found[name] = hashlib.sha256(code).hexdigest()
    return found


def file_of_module(name: str) -> Path | None:
    """Return the file of a module, of which no package is imported; None where there is none."""
    parts, places, spec = name.split("."), None, None
    for k in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: k + 1]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return None if spec is None or spec.origin is None else Path(spec.origin)
