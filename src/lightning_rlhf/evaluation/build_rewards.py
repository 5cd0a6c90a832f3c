"""Builds the reward that PPO maximises from the section `reward`, and the critic.

It is read with the verdicts that fitness reports gave on it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from omegaconf import OmegaConf

from lightning_rlhf.core import memory
from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.validation import build
from lightning_rlhf.data.batches import pad
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message, prompt_row
from lightning_rlhf.io import console, user_code
from lightning_rlhf.models import build_roles, checkpoint, classifier, loading
from lightning_rlhf.models.config import REWARD, SFT, ModelConfig
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards import config as kinds
from lightning_rlhf.rewards import http, weighted
from lightning_rlhf.rewards.functions import FunctionReward
from lightning_rlhf.rollout.score import Critic
from lightning_rlhf.runs import folders, stage
from lightning_rlhf.runs.console import CONF
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.settings import read_reward

if TYPE_CHECKING:
    from lightning_rlhf.rewards.server import Columns, Messages, Score

NOT_SERVED = ("kind", "name_or_path", "weight", "clip", "format_check", "format_tolerance", "unfit")
"""Keys of conf/reward/model.yaml that belong to the run that asks a server."""
RANDOM = checkpoint.Verdict(
    True, "Not fit: a random head means nothing, it only shows that all runs.", ()
)
FUNCTIONS = "functions.json"
"""File of stage=eval_reward with a hash of the code of each function that it judged."""
BuildSource = Callable[[Roles, memory.MicrobatchSize], weighted.Source]
BuildReward = Callable[[Roles, memory.MicrobatchSize], weighted.Reward]
"""Function from the models, with the SFT model as reference, and the number of responses that a
head on their base reads at once, to the reward. It raises an RLHFError where weights do not fit."""


def prepare_reward(run: Run, columns: Collection[str]) -> BuildReward:
    """Return the function that loads and builds the reward; the section `reward` is checked now.

    columns: names of the columns of the prompts that will be scored.

    Raises an RLHFError where an option of a component does not fit, a function cannot be called, a
    server does not answer, or ppo.critic_init does not fit the reward.
    """
    settings = run.settings
    if isinstance(settings.config, PPOConfig) and settings.config.critic_init == "reward":
        critic_start(settings)
    parts = [prepare_source(run, *item, columns) for item in settings.reward.items()]

    def build(roles: Roles, batch_size: memory.MicrobatchSize) -> weighted.Reward:
        with console.Working("loading the reward"):
            sources = tuple(part(roles, batch_size) for part in parts)
        terms = tuple(config.term(name) for name, config in settings.reward.items())
        return weighted.Reward(terms, sources)

    return build


def prepare_source(
    run: Run, name: str, config: kinds.ComponentConfig, columns: Collection[str]
) -> BuildSource:
    """Return the function that loads one component of the reward, as `prepare_reward`."""
    key, role = stage.reward_key(run.settings, name), folders.reward_role(run.settings, name)
    match config:
        case kinds.FunctionConfig():
            function = user_code.load_function(config.path, f"{key}.path")
            scorer = FunctionReward.of(function, config.arguments, key).for_columns(columns)
            if str(getattr(function, "__module__", "")).startswith("lightning_rlhf."):
                scorer.call(scorer.function, [], [])  # which checks the arguments
            return lambda *_: scorer
        case kinds.HTTPConfig():
            server = http.HTTPReward(config, key, partial(console.print_line, style="yellow"))
            server.check_server()
            return lambda *_: server
        case kinds.TextModelConfig():
            return text_reward(config, key, reward_final(run, name), run.device)
        case _:
            return head_reward(run, key, role, config)


def head_reward(run: Run, key: str, role: str, config: kinds.ComponentConfig) -> BuildSource:
    """Return the function that loads a head on the reference, a random one, or that of stage=rm.

    The latter comes with its adapter on the base, or with whole weights of its own.
    """
    final, moments, coef, ends = run.parents.get(role), (0.0, 1.0), 0.0, None
    if final is not None and isinstance(config, kinds.HeadConfig):
        if final.require_manifest("rm").chat_template != str(run.tokenizer.chat_template):
            raise CheckpointError(
                f"{final.path} was trained with another chat template than the policy's: it would "
                "read other text than it was trained on. Train it again from this SFT model, or "
                f"let it read text: reward=model reward.name_or_path={final.path}"
            )
        coef, ends = config.uncertainty_coef, config.step_separator
        if config.normalization == "stored":
            moments = final.reward_moments()

    def load(roles: Roles, batch_size: memory.MicrobatchSize) -> weighted.LearnedReward:
        owner = roles
        if final is None:
            seed = zlib.crc32(f"{run.settings.seed} {role}".encode())
            build_roles.random_reward(roles, role, torch.Generator().manual_seed(seed))
        else:
            vocabulary = checkpoint.tokenizer_hash(run.tokenizer)
            attach = build_roles.attach_reward
            owner = run.placed(lambda: attach(roles, role, final, run.settings.model, vocabulary))
            build_roles.warn_of_one_head(owner, role, coef, key)
        if owner is not roles:
            owner.to(run.device)
        rewards = partial(owner.rewards, role=role)
        return weighted.LearnedReward(rewards, *moments, coef, batch_size, owner, role, ends)

    return load


def reward_final(run: Run, name: str) -> checkpoint.Final:
    """Return the folder of a reward model, downloaded from the hub where it is not local."""
    final = run.parents.get(folders.reward_role(run.settings, name))
    config = run.settings.reward[name]
    if final is None and isinstance(config, kinds.TextModelConfig):
        key = f"{stage.reward_key(run.settings, name)}.name_or_path"
        folder = checkpoint.local_folder(config.name_or_path, key, config.revision)
        final = checkpoint.find(str(folder), key)
    assert final is not None
    return final


def text_reward(
    config: kinds.TextModelConfig, key: str, final: checkpoint.Final, device: torch.device
) -> Callable[..., weighted.TextReward]:
    """Return the function that loads a reward model; `config`, the section `key`, is checked now.

    final: folder of the model.
    Raises an RLHFError where the section does not fit the model.
    """
    device, coef = torch.device(config.device or device), config.uncertainty_coef
    moments, base = (0.0, 1.0), None
    template_kwargs: Mapping[str, Any] = {}
    if final.manifest is not None:
        why = f"since {final.path} was written by stage=rm and brings its own"
        for option in ("revision", "tokenizer", "chat_template", "label"):
            value = getattr(config, option)
            require(value is None, f"{key}.{option}", value, f"null, {why}")
        if config.normalization == "stored":
            moments = final.reward_moments()
        trained, template_kwargs = folders.trained_as(final)
        # Full fine-tuning keeps float32 weights whatever model.dtype says.
        dtype = config.dtype or (trained.dtype if final.is_adapter else "float32")
        given = ("quantization", "attn_implementation", "trust_remote_code")
        changed = {option: getattr(config, option) for option in given} | {"dtype": dtype}
        base = build(ModelConfig, vars(trained) | changed, key)
    else:
        why = f"since {config.name_or_path} was not trained by stage=rm, which"
        allowed = f"none, running, {why} measures mean and deviation"
        require(config.normalization != "stored", f"{key}.normalization", "stored", allowed)
        require(coef == 0, f"{key}.uncertainty_coef", coef, f"0, {why} has ensembles")
        classifier.check_classifier(final.path, config, key)

    def load(*_: Any) -> weighted.TextReward:
        model: Any
        if base is None:
            model = classifier.load_classifier(config, key, device)
            module, role, trunk = model.model, "", model.model
        else:
            module, role = build_roles.load_reward(final, base).to(device), REWARD
            build_roles.warn_of_one_head(module, role, coef, key)
            chat = ChatFormat(loading.load_tokenizer(base, final.path), template_kwargs)
            model, trunk = OwnModel(module, chat, device), module.causal_lm
        limits = (classifier.positions(trunk.config), config.max_tokens)
        limit = min((n for n in limits if n is not None), default=None)
        batch_size = memory.MicrobatchSize(f"{key}.batch_size", config.batch_size)
        return weighted.TextReward(model, *moments, coef, batch_size, limit, key, module, role)

    return load


@dataclass(frozen=True)
class OwnModel(weighted.TextModel):
    """A reward model of stage=rm, on the base and with the format that it was trained with."""

    roles: Roles
    chat: ChatFormat
    device: torch.device

    def encode(self, row: Mapping[str, Any], response: str) -> weighted.Features:
        prompt = self.chat.prompt_tokens(tuple(map(Message.of, row["messages"])))
        return {"input_ids": [*prompt, *self.chat.response_tokens(response)]}

    def read(self, features: Sequence[weighted.Features]) -> Float[torch.Tensor, "n H"]:
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
    final = checkpoint.find(source, "final")
    others = f"the others, as {', '.join(NOT_SERVED[2:])}, belong to the run that asks"
    allowed = f"reward.KEY=VALUE, of the keys that a server reads; {others}"
    for word in overrides:
        key = re.match(r"reward\.(\w+)=", word)
        require(key is not None and key[1] not in NOT_SERVED, "an option", word, allowed)
    normalization = "stored" if final.manifest else "none"
    tree = OmegaConf.merge(
        {"reward": OmegaConf.load(CONF / "reward" / "model.yaml")},
        {"reward": {"name_or_path": str(final.path), "normalization": normalization}},
        OmegaConf.from_dotlist(list(overrides)),
    )
    (config,) = read_reward(OmegaConf.to_container(tree.reward)).values()
    assert isinstance(config, kinds.TextModelConfig)
    allowed = "none, stored: to a server every request is the first"
    require(config.normalization != "running", "reward.normalization", "running", allowed)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with console.Working("loading the reward model"):
        reward = text_reward(config, "reward", final, device)()
    if final.verdict is not None:
        advice = " It is served all the same." * final.verdict.is_unfit
        console.print_line(
            f"reward {final.path}: {final.verdict.words}{advice}", final.verdict.style
        )

    def score(prompts: list[Messages], responses: list[str], columns: Columns) -> list[float]:
        rows = [prompt_row(tuple(map(Message.of, prompt))) for prompt in prompts]
        return reward.score(rows, responses).tolist() if responses else []

    return score


def critic_start(settings: stage.Settings) -> tuple[str, kinds.HeadConfig]:
    """Return the name and the settings of the component from which the critic is initialised.

    Raises ConfigError where there is none, or its normalization or weight does not allow it.
    """
    heads = [(n, part) for n, part in settings.reward.items() if isinstance(part, kinds.HeadConfig)]
    fits = [head.normalization != "running" and head.weight != 0 for _, head in heads]
    words = "one component of kind head, with normalization none or stored and a weight not 0"
    allowed = f"zero, or a reward with {words}; there are {len(heads)} of that kind"
    require(fits == [True], "ppo.critic_init", "reward", allowed)
    return heads[0]


def build_critic(run: Run, roles: Roles) -> Critic:
    """Load and return the critic that ppo.critic and ppo.critic_init describe."""
    settings, reward, scale = run.settings, None, (0.0, 1.0)
    if settings.config.critic_init == "reward":
        name, component = critic_start(settings)
        reward = run.parents[folders.reward_role(settings, name)]
        is_raw = component.normalization == "none"
        mean, std = (0.0, 1.0) if is_raw else reward.reward_moments()
        scale = mean, std / component.weight
    add = partial(build_roles.add_critic, roles, settings.model, settings.config.critic)
    with console.Working("loading the critic"):
        sft = run.parents.get(SFT)
        return Critic(*add(sft=sft, reward=reward, scale=scale, seed=settings.seed))


def verdicts_on(run: Run, *, refuses: bool, shown: bool = True) -> dict[str, checkpoint.Verdict]:
    """Return the verdicts of fitness reports on the reward, by component, and print them.

    They are those of stage=rm on its models and, where there is none on the whole reward, that of
    stage=eval_reward of the run. A component of weight 0 is never refused: it changes no reward.

    Raises ConfigError where a model is unfit and its key `unfit` is refuse; never unless `refuses`.
    """
    settings, verdicts = run.settings, dict[str, checkpoint.Verdict | None]()
    for name, config in settings.reward.items():
        if isinstance(config, kinds.RandomConfig):
            verdicts[name] = RANDOM
        if not isinstance(config, kinds.LearnedConfig):
            continue
        final = reward_final(run, name)
        if final.manifest is None:  # a classifier of another program
            continue
        verdict = verdicts[name] = final.verdict
        is_paid = config.weight != 0 and config.unfit == "refuse"
        if refuses and verdict is not None and verdict.is_unfit and is_paid:
            raise ConfigError(
                f"reward {name} is unfit by its fitness report {final.path / checkpoint.PAGE}: "
                f"{verdict.words} Train a better reward model; or "
                f"{stage.reward_key(settings, name)}.unfit=warn runs PPO on it all the same"
            )
    whole = ", ".join(settings.reward)
    verdicts |= {} if verdicts.get(whole) else evaluated(settings, whole)
    for name, verdict in verdicts.items() if shown else ():
        words, style = "it has no fitness verdict (stage=eval_reward gives one)", "yellow"
        if verdict is not None:
            words, style = verdict.words, verdict.style
            words += " PPO is run on it all the same." * (refuses and verdict.is_unfit)
        if style:  # of a reward without a fault there is nothing to say
            console.print_line(f"reward {name}: {words}", style)
    return {name: verdict for name, verdict in verdicts.items() if verdict is not None}


def evaluated(settings: stage.Settings, name: str) -> dict[str, checkpoint.Verdict]:
    """Return the verdict of stage=eval_reward of the run on this reward, under a name; {} without.

    It is on this reward if the section and the code of its functions are the same.
    """
    final = folders.folder_of(settings, "eval_reward") / folders.FINAL
    files = final / "fitness.json", final / FUNCTIONS
    if not all(file.is_file() for file in files):
        return {}
    report, functions = map(checkpoint.json_object, files)
    tree = folders.read_config(final.parent / folders.CONFIG, "delete it to go on")
    then, now = ({"reward": one.get("reward")} for one in (tree, settings.tree))
    is_this = not folders.differing_keys(then, now, ()) and functions == code_of(settings)
    judgement = report.get("judgement") if is_this else None
    if judgement is None:
        return {}
    return {name: build(checkpoint.Verdict, judgement, f"{files[0]}: judgement")}


def code_of(settings: stage.Settings) -> dict[str, str]:
    """Return the hash of the file of each function of the reward, by component."""
    own = {n: x.path for n, x in settings.reward.items() if isinstance(x, kinds.FunctionConfig)}
    return {name: user_code.code_digest(path) for name, path in own.items()}
