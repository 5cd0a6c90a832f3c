"""One stage, from checked settings to its `final/` folder."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich import get_console
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lightning_rlhf.callbacks.checkpoints import ResumeCheckpoint
from lightning_rlhf.callbacks.evaluation import Evaluation, load_judge
from lightning_rlhf.callbacks.loggers import RunIdentity, build_loggers, close_loggers
from lightning_rlhf.callbacks.metrics import PPOMetrics, RewardMetrics, SFTMetrics
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.callbacks.samples import Samples
from lightning_rlhf.cli.folders import FINAL, LAST, find_reward, find_sft, prepare
from lightning_rlhf.cli.settings import Settings
from lightning_rlhf.core.config import PPOConfig, RMConfig, SFTConfig
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.data.chat import ChatFormat
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
from lightning_rlhf.models.checkpoint import (
    Final,
    Manifest,
    tokenizer_hash,
    versions,
    write_final,
)
from lightning_rlhf.models.handover import (
    add_policy,
    attach_reward,
    random_reward,
    start_from,
)
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import POLICY, REFERENCE, REWARD, SFT, VALUE, Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.report.figures import draw_curves
from lightning_rlhf.rewards.learned import LearnedReward
from lightning_rlhf.rollout.generate import generate

NOISY_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)
NOISY_WARNINGS = (
    ".*does not have many workers.*",  # the data is in memory
    ".*in eval mode at the start of training.*",  # on purpose: no dropout
    ".*check_val_every_n_epoch.*",  # one epoch is the whole run
    ".*dataloader is not resumable.*",  # the schedule starts where the checkpoint ends
    ".*smaller than the logging interval.*",
    ".*LeafSpec.*",
    ".*is_gradient_checkpointing.*",
)


@dataclass(frozen=True)
class Prepared:
    """What the stages have in common once their inputs are checked."""

    settings: Settings
    folder: Path
    resume_from: Path | None
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    parents: Mapping[str, Final]
    """Role -> the checkpoint that plays it."""
    started: float


def run_stage(settings: Settings) -> Path:
    """Run the stage and return the path of its `final/` folder."""
    _quiet_libraries()
    L.seed_everything(settings.seed, verbose=False)
    match settings.config:
        case SFTConfig():
            return run_sft(settings, settings.config)
        case RMConfig():
            return run_rm(settings, settings.config)
        case PPOConfig():
            return run_ppo(settings, settings.config)


def run_sft(settings: Settings, config: SFTConfig) -> Path:
    """Supervised fine-tuning."""
    if settings.policy.checkpoint not in (None, "base"):
        raise ConfigError(
            f"policy.checkpoint is {settings.policy.checkpoint!r}, but stage=sft starts from "
            "model.name_or_path; set that instead"
        )
    rows = load_demonstrations(settings.data, settings.seed)
    ready = make_ready(settings, {})
    train = tokenise_demonstrations(rows.train, ready.chat, settings.data)
    val = tokenise_demonstrations(rows.val, ready.chat, settings.data)
    say_lengths("demonstrations", rows.train, train)

    roles = start_from(
        settings.model, None, trainable=config.finetune == "full", seed=settings.seed
    )
    if config.finetune == "lora":
        roles.add_adapter(SFT, settings.model.lora)
    else:
        roles.assign(SFT)
    data = StageData(
        train=train.examples,
        val=val.examples,
        collate=partial(collate_demonstrations, pad_id=ready.chat.pad_token_id),
        batch_size=config.batch_size,
        val_batch_size=config.microbatch_size,
        batches=math.ceil(config.epochs * len(train.examples) / config.batch_size),
        seed=settings.seed,
        pool_batches=settings.data.pool_batches,
    )
    metrics = fit(ready, SFTModule(roles, config), data, [SFTMetrics()])
    return hand_over(ready, roles, SFT, metrics, head=None)


def run_rm(settings: Settings, config: RMConfig) -> Path:
    """Reward modelling."""
    rows = load_preferences(settings.data, settings.seed)
    ready = make_ready(settings, _present(sft=find_sft(settings)))
    train = tokenise_preferences(rows.train, ready.chat, settings.data)
    val = tokenise_preferences(rows.val, ready.chat, settings.data)
    say_lengths("preference pairs", rows.train, train)

    roles = start_from(
        settings.model, ready.parents.get(SFT), trainable=config.finetune == "full",
        seed=settings.seed,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(settings.seed)
    roles.heads[REWARD] = ScalarHead.random(roles.hidden_size, generator)
    if config.finetune == "lora":
        roles.add_adapter(REWARD, settings.model.lora)
    else:
        roles.assign(REWARD)
    data = StageData(
        train=train.examples,
        val=val.examples,
        collate=partial(collate_preferences, pad_id=ready.chat.pad_token_id),
        batch_size=config.batch_size,
        val_batch_size=config.microbatch_size,
        batches=math.ceil(config.epochs * len(train.examples) / config.batch_size),
        seed=settings.seed,
        pool_batches=settings.data.pool_batches,
    )
    metrics = fit(ready, RewardModule(roles, config), data, [RewardMetrics()])
    prompts = [PromptTokens(e.prompt, i) for i, e in enumerate(train.examples)]
    mean, std = calibrate(ready, roles, prompts, config)
    return hand_over(ready, roles, REWARD, metrics, head=REWARD, reward=(mean, std))


def run_ppo(settings: Settings, config: PPOConfig) -> Path:
    """Proximal policy optimization."""
    rows = load_prompts(settings.data, settings.seed)
    judge = load_judge(settings.data.judge) if settings.data.judge else None
    learned = settings.reward.kind == "learned"
    parents = _present(sft=find_sft(settings), reward=find_reward(settings) if learned else None)
    ready = make_ready(settings, parents)
    train = tokenise_prompts(rows.train, ready.chat, settings.data)
    val = tokenise_prompts(rows.val, ready.chat, settings.data)
    say_lengths("prompts", rows.train, train)

    roles = start_from(settings.model, parents.get(SFT), trainable=False, seed=settings.seed)
    reward = build_reward(ready, roles)
    add_policy(roles, settings.model)
    data = StageData(
        train=train.examples,
        val=val.examples * config.val_samples_per_prompt,
        collate=partial(collate_prompts, pad_id=ready.chat.pad_token_id),
        batch_size=config.rollout_batch_size,
        val_batch_size=config.rollout_batch_size,
        batches=config.iterations,
        seed=settings.seed,
        pool_batches=1,
    )
    module = PPOModule(
        roles,
        reward,
        config,
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
    metrics = {f"start/{name}": value for name, value in evaluation.first.items()}
    return hand_over(ready, roles, POLICY, metrics | evaluation.last, head=VALUE)


def make_ready(settings: Settings, parents: Mapping[str, Final]) -> Prepared:
    """The run's folder, the tokenizer and the chat format, once the inputs are known to be good."""
    sft = parents.get(SFT)
    tokenizer = load_tokenizer(settings.model, sft.path if sft else None)
    chat = ChatFormat(tokenizer, settings.data.chat_template_kwargs)
    folder, resume_from = prepare(settings)
    return Prepared(settings, folder, resume_from, tokenizer, chat, parents, time.perf_counter())


def build_reward(ready: Prepared, roles: Roles) -> LearnedReward:
    """What PPO maximises, standardised with what the reward model's stage measured."""
    final = ready.parents.get(REWARD)
    if final is None:
        generator = torch.Generator().manual_seed(ready.settings.seed)
        random_reward(roles, generator)
        say("[bold red]reward=random: the reward means nothing; this only shows that the loop runs")
        return LearnedReward(roles.reward, mean=0.0, std=1.0)
    owner = attach_reward(roles, final, ready.settings.model, tokenizer_hash(ready.tokenizer))
    manifest = final.require_manifest("rm")
    assert manifest.reward_mean is not None
    assert manifest.reward_std is not None
    if owner is not roles:
        owner.to(_device(ready.settings))
    return LearnedReward(owner.reward, mean=manifest.reward_mean, std=manifest.reward_std)


def fit(
    ready: Prepared, module: L.LightningModule, data: StageData[Any], callbacks: list[Callback]
) -> dict[str, float]:
    """Train over the whole schedule, validate at the end, draw the curves; the last metrics."""
    settings, config = ready.settings, ready.settings.config
    is_ppo = isinstance(config, PPOConfig)
    identity = RunIdentity(
        name=f"{settings.run}/{settings.model.name}/{settings.stage}",
        stage=settings.stage,
        model=settings.model.name,
        sweep=settings.run if settings.job else None,
        config=settings.tree,
    )
    loggers = build_loggers(settings.logger, ready.folder, identity)
    trainer = L.Trainer(
        accelerator=settings.trainer.accelerator,
        devices=settings.trainer.devices,
        precision=settings.trainer.precision,  # type: ignore[arg-type]
        log_every_n_steps=settings.trainer.log_every_n_steps,
        max_epochs=1,
        val_check_interval=config.val_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1 if is_ppo else 0,
        logger=loggers,
        callbacks=[
            *callbacks,
            Progress(settings.stage),
            ResumeCheckpoint(ready.folder / LAST, config.checkpoint_every),
        ],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=ready.folder,
    )
    exit_code = 1
    try:
        trainer.fit(module, datamodule=data, ckpt_path=ready.resume_from, weights_only=True)
        if len(data.schedule) % config.val_every:
            trainer.validate(module, datamodule=data, verbose=False)
        exit_code = 0
    finally:
        close_loggers(loggers, exit_code)
    say(f"curves: {draw_curves(ready.folder, settings.stage)}")
    return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("eval/")}


def calibrate(
    ready: Prepared, roles: Roles, prompts: Sequence[PromptTokens], config: RMConfig
) -> tuple[float, float]:
    """Mean and standard deviation of the raw reward on samples of the SFT model."""
    device = _device(ready.settings)
    roles.to(device)
    order = torch.randperm(
        len(prompts), generator=torch.Generator().manual_seed(ready.settings.seed)
    ).tolist()
    chosen = [prompts[order[i % len(order)]] for i in range(config.calibration_samples)]
    generator = torch.Generator().manual_seed(ready.settings.seed)
    rewards = []
    for start in range(0, len(chosen), config.batch_size):
        batch = collate_prompts(chosen[start : start + config.batch_size], ready.chat.pad_token_id)
        with roles.acting(REFERENCE):
            rollout = generate(
                roles,
                batch.to(device),
                value=lambda hidden: hidden.new_zeros(len(hidden), dtype=torch.float32),
                max_response_tokens=ready.settings.data.max_response_tokens,
                temperature=config.temperature,
                end_token_ids=ready.chat.end_token_ids,
                generator=generator,
            )
        with torch.no_grad():
            rewards.append(roles.reward(rollout.tokens, rollout.mask).cpu())
    std, mean = torch.std_mean(torch.cat(rewards))
    say(f"reward on {len(chosen)} SFT samples: mean {mean:.3f}, standard deviation {std:.3f}")
    return float(mean), float(std)


def hand_over(
    ready: Prepared,
    roles: Roles,
    role: str,
    metrics: Mapping[str, float],
    *,
    head: str | None,
    reward: tuple[float, float] | None = None,
) -> Path:
    """Write `final/`."""
    settings = ready.settings
    sft = ready.parents.get(SFT)
    inherited = sft.manifest if sft is not None and sft.is_adapter else None
    base = settings.model.name_or_path
    manifest = Manifest(
        stage=settings.stage,
        base=str(Path(base).resolve()) if base and Path(base).is_dir() else base or "from_config",
        base_seed=inherited.base_seed if inherited else settings.seed,
        parents={name: str(final.path.resolve()) for name, final in ready.parents.items()},
        tokenizer_hash=tokenizer_hash(ready.tokenizer),
        chat_template=str(ready.tokenizer.chat_template),
        reward_mean=reward[0] if reward else None,
        reward_std=reward[1] if reward else None,
        metrics=dict(metrics) | {"time/stage_s": time.perf_counter() - ready.started},
        config=settings.tree,
        versions=versions(),
    )
    folder = ready.folder / FINAL
    write_final(folder, roles, role, ready.tokenizer, manifest, head)
    say(f"{settings.stage} finished: {folder}")
    return folder


def say(message: str) -> None:
    """One line for the user."""
    get_console().print(message, highlight=False, soft_wrap=True)


def say_lengths(what: str, rows: Rows[Any], tokenised: Tokenised[Any]) -> None:
    """How many rows there are to train on, and what became of the others."""
    lost = rows.left_out + tokenised.dropped
    notes = [f"{n} left out ({reason})" for reason, n in sorted(lost.items())]
    notes += [f"{n} with {reason}" for reason, n in sorted(tokenised.cut.items())]
    say(", ".join([f"{len(tokenised.examples)} {what}", *notes]))


def _texts(rows: Rows[Any]) -> list[dict[str, Any]]:
    return [row.columns for row in rows.rows]


def _present(**finals: Final | None) -> dict[str, Final]:
    return {name: final for name, final in finals.items() if final is not None}


def _device(settings: Settings) -> torch.device:
    return torch.device("cuda" if settings.trainer.accelerator == "gpu" else "cpu")


def _quiet_libraries() -> None:
    """Silence what is said at every start and asks nothing of the user."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in NOISY_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
