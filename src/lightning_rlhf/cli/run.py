"""One stage, from checked settings to its `final/` folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich import get_console

from lightning_rlhf.callbacks.evaluation import Evaluation, load_judge
from lightning_rlhf.callbacks.metrics import PPOMetrics, RewardMetrics, SFTMetrics
from lightning_rlhf.callbacks.samples import Samples
from lightning_rlhf.cli.console import quiet_libraries, say, say_evaluation, say_lengths
from lightning_rlhf.cli.folders import BASE, find_parents, resume_point
from lightning_rlhf.cli.launch import Prepared, check_accelerator, fit, hand_over, make_ready
from lightning_rlhf.cli.memory import denormals_flushed, keep_large_blocks
from lightning_rlhf.cli.settings import Settings
from lightning_rlhf.core.config import RMConfig, SFTConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.types import Prompts, Record
from lightning_rlhf.data.collate import (
    collate_demonstrations,
    collate_preferences,
    collate_prompts,
)
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.data.lengths import (
    PromptTokens,
    Tokenised,
    tokenise_demonstrations,
    tokenise_preferences,
    tokenise_prompts,
)
from lightning_rlhf.data.readers import Rows
from lightning_rlhf.data.splits import load_demonstrations, load_preferences, load_prompts
from lightning_rlhf.models.checkpoint import Final, tokenizer_hash
from lightning_rlhf.models.handover import (
    add_critic,
    add_policy,
    attach_reward,
    check_positions,
    check_vocabulary,
    random_reward,
    start_from,
)
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.roles import POLICY, REFERENCE, REWARD, SFT, VALUE, Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.report.tables import before_after_table
from lightning_rlhf.rewards.learned import LearnedReward
from lightning_rlhf.rollout.calibrate import reward_moments, sample_reference
from lightning_rlhf.rollout.critic import Critic

THREADS = torch.get_num_threads()
"""Torch's own choice, before any run of this process changed it."""


def run_stage(settings: Settings) -> Path:
    """Run the stage and return the path of its `final/` folder."""
    quiet_libraries()
    check_accelerator(settings)
    resume_point(settings)  # refuse before anything is read
    torch.set_num_threads(settings.trainer.threads or THREADS)
    if settings.trainer.accelerator == "cpu":
        keep_large_blocks()
    L.seed_everything(settings.seed, verbose=False)
    with denormals_flushed():
        match settings.config:
            case SFTConfig():
                return run_sft(settings, settings.config)
            case RMConfig():
                return run_rm(settings, settings.config)
            case PPOConfig():
                return run_ppo(settings, settings.config)


def run_sft(settings: Settings, config: SFTConfig) -> Path:
    """Supervised fine-tuning."""
    if settings.policy.checkpoint not in (None, BASE):
        raise ConfigError(
            f"policy.checkpoint is {settings.policy.checkpoint!r}, but stage=sft starts from "
            "model.name_or_path; set that instead"
        )
    rows = load_demonstrations(settings.data, settings.seed)
    ready = make_ready(settings, {})
    train = tokenise_demonstrations(rows.train, ready.chat, settings.data)
    val = tokenise_demonstrations(rows.val, ready.chat, settings.data)
    say_lengths("demonstrations", rows.train, train)
    say_lengths("demonstrations to validate on", rows.val, val)

    roles = start_from(
        settings.model, None, trainable=config.finetune == "full", seed=settings.seed
    )
    check_vocabulary(roles, ready.tokenizer)
    longest = max(len(e.prompt) + len(e.response) for e in train.examples)
    check_positions(roles, longest, "the longest demonstration")
    if config.finetune == "lora":
        roles.add_adapter(SFT, settings.model.lora)
    else:
        roles.assign(SFT)
    data = supervised_data(ready, config, train, val, collate_demonstrations)
    metrics = fit(ready, SFTModule(roles, config), data, [SFTMetrics()])
    say_evaluation(metrics)
    return hand_over(ready, roles, SFT, metrics, head=None)


def run_rm(settings: Settings, config: RMConfig) -> Path:
    """Reward modelling."""
    parents = find_parents(settings)
    rows = load_preferences(settings.data, settings.seed)
    ready = make_ready(settings, parents)
    train = tokenise_preferences(rows.train, ready.chat, settings.data)
    val = tokenise_preferences(rows.val, ready.chat, settings.data)
    say_lengths("preference pairs", rows.train, train)
    say_lengths("preference pairs to validate on", rows.val, val)

    roles = start_from(
        settings.model, ready.parents.get(SFT), trainable=config.finetune == "full",
        seed=settings.seed,
    )  # fmt: skip
    check_vocabulary(roles, ready.tokenizer)
    longest = max(len(e.prompt) + max(len(e.chosen), len(e.rejected)) for e in train.examples)
    check_positions(roles, longest, "the longest reply to a preference's prompt, with it,")
    sampled = max(len(e.prompt) for e in train.examples) + settings.data.max_response_tokens
    check_positions(roles, sampled, "the longest prompt with data.max_response_tokens")
    roles.to(ready.device)
    below = roles.probe(REFERENCE)
    samples = sample_reference(
        roles,
        calibration_prompts(ready, [e.prompt for e in train.examples], config),
        max_response_tokens=settings.data.max_response_tokens,
        temperature=config.temperature,
        end_token_ids=ready.chat.end_token_ids,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    generator = torch.Generator().manual_seed(settings.seed)
    roles.heads[REWARD] = ScalarHead.random(roles.hidden_size, generator)
    if config.finetune == "lora":
        roles.add_adapter(REWARD, settings.model.lora)
    else:
        roles.assign(REWARD)
    data = supervised_data(ready, config, train, val, collate_preferences)
    metrics = fit(ready, RewardModule(roles, config), data, [RewardMetrics()])
    say_evaluation(metrics)
    mean, std = reward_moments(roles.to(ready.device), samples)
    say(f"reward on {config.calibration_samples} SFT samples: mean {mean:.3f}, std {std:.3f}")
    return hand_over(ready, roles, REWARD, metrics, head=REWARD, reward=(mean, std), below=below)


def run_ppo(settings: Settings, config: PPOConfig) -> Path:
    """Proximal policy optimization."""
    parents = find_parents(settings)
    judge = load_judge(settings.data.judge) if settings.data.judge else None
    rows = load_prompts(settings.data, settings.seed)
    ready = make_ready(settings, parents)
    train = tokenise_prompts(rows.train, ready.chat, settings.data)
    val = tokenise_prompts(rows.val, ready.chat, settings.data)
    say_lengths("prompts", rows.train, train)
    say_lengths("prompts to validate on", rows.val, val)

    roles = start_from(settings.model, parents.get(SFT), trainable=False, seed=settings.seed)
    check_vocabulary(roles, ready.tokenizer)
    longest = max(len(example.prompt) for example in (*train.examples, *val.examples))
    check_positions(
        roles, longest + config.max_response_tokens,
        "the longest prompt with ppo.max_response_tokens",
    )  # fmt: skip
    reward = build_reward(ready, roles, config)
    add_policy(roles, settings.model)
    critic = build_critic(ready, roles, config) if config.has_critic else None
    data = StageData(
        train=train.examples,
        val=val.examples * config.val_samples_per_prompt,
        collate=partial(collate_prompts, pad_id=ready.chat.pad_token_id),
        batch_size=config.prompts_per_iteration,
        val_batch_size=config.rollout_batch_size,
        batches=config.iterations,
        seed=settings.seed,
        pool_batches=1,
    )
    module = PPOModule(
        roles,
        reward,
        config,
        critic=critic,
        chat=ready.chat,
        prompts={"train": _texts(rows.train), "val": _texts(rows.val)},
        seed=settings.seed,
    )
    evaluation = Evaluation(judge, ready.folder)
    samples = Samples(
        every_n_iterations=config.samples_every, count=4, characters=160, run_dir=ready.folder
    )
    fit(ready, module, data, [PPOMetrics(), evaluation, samples])
    assert evaluation.first is not None
    assert evaluation.last is not None
    get_console().print(before_after_table(evaluation.first, evaluation.last))
    metrics = {f"start/{name}": value for name, value in evaluation.first.items()}
    head = VALUE if critic is not None and critic.shares_trunk else None
    return hand_over(ready, roles, POLICY, metrics | evaluation.last, head=head)


def supervised_data(
    ready: Prepared,
    config: SFTConfig | RMConfig,
    train: Tokenised[Any],
    val: Tokenised[Any],
    collate: Callable[..., Record],
) -> StageData[Any]:
    """Batches of alike lengths over `config.epochs` passes."""
    return StageData(
        train=train.examples,
        val=val.examples,
        collate=partial(collate, pad_id=ready.chat.pad_token_id),
        batch_size=config.batch_size,
        val_batch_size=config.microbatch_size,
        batches=math.ceil(round(config.epochs * len(train.examples), 6) / config.batch_size),
        seed=ready.settings.seed,
        pool_batches=ready.settings.data.pool_batches,
    )


def build_critic(ready: Prepared, roles: Roles, config: PPOConfig) -> Critic:
    """Who says what a state is worth."""
    reward = ready.parents.get(REWARD) if config.critic_init == "reward" else None
    if config.critic_init == "reward" and reward is None:
        raise ConfigError(
            "ppo.critic_init is 'reward', but reward=random has no trained reward model to start "
            "from; allowed: zero"
        )
    owner, role = add_critic(
        roles,
        ready.settings.model,
        config.critic,
        sft=ready.parents.get(SFT),
        reward=reward,
        scale=reward_scale(reward, config),
        seed=ready.settings.seed,
    )
    return Critic(owner, role)


def build_reward(ready: Prepared, roles: Roles, config: PPOConfig) -> LearnedReward:
    """What PPO maximises, standardised with what its stage measured where the config says so."""
    final = ready.parents.get(REWARD)
    if final is None:
        generator = torch.Generator().manual_seed(ready.settings.seed)
        random_reward(roles, generator)
        say(
            "reward=random: the reward means nothing; this only shows that the loop runs",
            "bold red",
        )
        return LearnedReward(roles.reward, mean=0.0, std=1.0)
    if final.require_manifest("rm").chat_template != str(ready.tokenizer.chat_template):
        raise CheckpointError(
            f"{final.path} was trained with another chat template than the policy's: it would "
            "read other text than it was trained on. Train it again from this SFT model"
        )
    mean, std = reward_scale(final, config)
    owner = attach_reward(roles, final, ready.settings.model, tokenizer_hash(ready.tokenizer))
    if owner is not roles:
        owner.to(ready.device)
    return LearnedReward(owner.reward, mean=mean, std=std)


def reward_scale(final: Final | None, config: PPOConfig) -> tuple[float, float]:
    """Mean and standard deviation that stage=rm measured, where the score is normalised by them."""
    if final is None or config.score_normalization != "stored":
        return 0.0, 1.0
    return final.reward_moments()


def calibration_prompts(
    ready: Prepared, prompts: Sequence[Sequence[int]], config: RMConfig
) -> Iterator[Prompts]:
    """Batches of prompts drawn from those of the preferences."""
    generator = torch.Generator().manual_seed(ready.settings.seed)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    chosen = [order[i % len(order)] for i in range(config.calibration_samples)]
    for start in range(0, len(chosen), config.batch_size):
        rows = [PromptTokens(prompts[i], i) for i in chosen[start : start + config.batch_size]]
        yield collate_prompts(rows, ready.chat.pad_token_id)


def _texts(rows: Rows[Any]) -> list[dict[str, Any]]:
    return [row.columns for row in rows.rows]
