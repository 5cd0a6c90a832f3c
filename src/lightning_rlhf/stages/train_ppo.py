"""The training run of stage=ppo, and the demonstrations of ppo.ptx_coef."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich import get_console

from lightning_rlhf.callbacks.diagnosis import Diagnosis
from lightning_rlhf.callbacks.evaluation import COUNT, Evaluation, Samples, load_judge
from lightning_rlhf.callbacks.loggers import read_rows
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.callbacks.recorder import Recorder
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.metrics import KL
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.batches import StageData, collate_prompts
from lightning_rlhf.data.lengths import tokenise
from lightning_rlhf.data.readers import Rows, load
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.build_roles import (
    add_policy,
    check_positions,
    check_room,
    check_vocabulary,
    start_from,
)
from lightning_rlhf.models.checkpoint import Verdict
from lightning_rlhf.models.config import POLICY, SFT, VALUE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.ptx import PTX
from lightning_rlhf.report.tables import before_after_table, collapsed
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.build_sampler import OURS, load_sampler
from lightning_rlhf.stages.console import print_lengths
from lightning_rlhf.stages.diminishing import print_diminishing
from lightning_rlhf.stages.evaluate_reward import check_formats
from lightning_rlhf.stages.folder.changes import Export, read_ending
from lightning_rlhf.stages.folder.folders import METRICS, find_parents, run_name
from lightning_rlhf.stages.launch import fit, print_compute
from lightning_rlhf.stages.model_card import hand_over
from lightning_rlhf.stages.prepare import Prepared, Training, make_ready, tokenised
from lightning_rlhf.stages.reward.build_rewards import (
    build_critic,
    build_reward,
    hub_rewards,
    light_sources,
)
from lightning_rlhf.stages.reward.unfit import print_verdicts, verdicts_on
from lightning_rlhf.stages.select import load_weights
from lightning_rlhf.stages.stage import Settings


def read_ptx(ready: Prepared, config: PPOConfig) -> PTX | None:
    """Return the demonstrations that stage=sft trains on, for each update; None if ptx_coef is 0.

    Raises ConfigError or DataError where they cannot be read.
    """
    if config.ptx_coef == 0:
        return None
    data, seed = ready.settings.data, ready.settings.seed
    with Working("reading the demonstrations"):
        rows = load("demonstrations", data, seed).train
        found = tokenise(rows, ready.chat, data)
    print_lengths("demonstration", rows, found)
    return PTX(found.examples, config, pad_id=ready.chat.pad_token_id, seed=seed)


@dataclass(frozen=True, kw_only=True)
class PPOTraining(Training):
    """PPO before its first iteration."""

    module: PPOModule
    rows: Rows[Any]
    """Prompts that are trained on."""
    prompts_cut: float
    """Share of the training prompts that were cut, or left out, for their length."""
    verdicts: Mapping[str, Verdict]
    """Component of the reward -> verdict of its fitness report, where it has one."""

    def save(self, metrics: Mapping[str, float]) -> Path:
        critic = self.module.critic
        head = VALUE if critic is not None and critic.shares_trunk else None
        return hand_over(self.ready, self.roles, POLICY, metrics, head=head, verdicts=self.verdicts)


def run_ppo(
    settings: Settings, config: PPOConfig, module_class: type[PPOModule] = PPOModule
) -> Path:
    """Train a policy on a reward and hand it over; return the path of `final/`.

    module_class: PPOModule, or a subclass with another loss or loop.
    """
    judge = load_judge(settings.data.judge) if settings.data.judge else None
    training = prepare_ppo(settings, config, module_class)
    ready, folder = training.ready, training.ready.folder
    evaluation = Evaluation(judge, folder)
    recorder = Recorder(folder, training.rows, every=settings.record)
    samples = Samples(
        every_n_iterations=config.samples_every,
        count=COUNT,
        characters=160 if settings.samples else None,
        run_dir=folder,
    )
    diagnosis = Diagnosis(config, folder, prompts_cut=training.prompts_cut, stage=settings.stage)
    callbacks = [PPOMetrics(), diagnosis, evaluation, samples, recorder]
    found = fit(ready, training.module, training.data, callbacks)
    assert evaluation.first is not None
    assert evaluation.last is not None
    ending = read_ending(folder)
    assert ending is not None  # the run has finished
    is_last = ending.step == ending.last_step
    first, last = evaluation.first, evaluation.last if is_last else found
    get_console().print(before_after_table(first, last, training.verdicts))
    print_collapse(folder, settings.stage)
    print_diminishing(folder, run_name(settings))
    computed = print_compute(folder)
    start = {f"start/{name}": value for name, value in first.items()}
    return training.save(start | last | computed)


def prepare_ppo(
    settings: Settings, config: PPOConfig, module_class: type[PPOModule] = PPOModule
) -> PPOTraining:
    """Read the prompts, load the SFT model and build reward, critic and policy.

    Raises an RLHFError where a reward, the data or a model does not fit, before a model loads
    wherever that is possible.
    """
    parents = find_parents(settings)
    if config.rollout not in OURS:
        load_sampler(config.rollout, f"{settings.stage}.rollout")
    with Working("reading the data"):
        rows = load("prompts", settings.data, settings.seed)
    columns = {name for row in (*rows.train.rows, *rows.val.rows) for name in row.columns}
    ready = make_ready(settings, parents)
    light = light_sources(ready, columns)
    found = verdicts_on(settings, parents | hub_rewards(ready))
    print_verdicts(found, " PPO is run on it all the same.")
    verdicts = {name: verdict for name, verdict in found.items() if verdict is not None}
    held_out, train, val = tokenised(ready, rows)
    ptx = read_ptx(ready, config)

    with Working("loading the model"):
        roles = start_from(settings.model, parents.get(SFT), trainable=False, seed=settings.seed)
    check_vocabulary(roles, ready.tokenizer)
    longest = max(len(example.prompt) for example in (*train.examples, *val.examples))
    key = f"{settings.stage}.max_response_tokens"
    check_positions(
        roles, longest + config.max_response_tokens,
        f"the longest prompt ({longest} tokens) with {key} ({config.max_response_tokens})",
        lower=f"lower {key} or data.max_prompt_tokens, to {{limit}} together",
    )  # fmt: skip
    check_room(
        roles, config.rollout_batch_size, longest, config.max_response_tokens,
        key, ready.device,
    )  # fmt: skip
    if ptx is not None:
        check_positions(roles, ptx.longest, "the longest demonstration")
    microbatch = MicrobatchSize(f"{settings.stage}.microbatch_size", config.microbatch_size)
    reward = build_reward(ready, roles, light, microbatch)
    roles.to(ready.device)
    check_formats(ready, reward)
    texts = {"train": _texts(rows.train), "val": _texts(held_out)}
    data = StageData(
        train=train.examples,
        val=val.examples * config.val_samples_per_prompt,
        columns=[*texts["train"], *texts["val"]],
        collate=partial(collate_prompts, pad_id=ready.chat.pad_token_id),
        batch_size=config.prompts_per_iteration,
        val_batch_size=config.rollout_batch_size,
        batches=config.iterations,
        seed=settings.seed,
        pool_batches=1,
    )
    module = build_module(ready, roles, reward, config, texts, microbatch, module_class, ptx)
    return PPOTraining(
        ready=ready, roles=roles, module=module, data=data, rows=rows.train,
        prompts_cut=train.too_long, verdicts=verdicts,
    )  # fmt: skip


def build_module(
    ready: Prepared,
    roles: Roles,
    reward: Reward,
    config: PPOConfig,
    prompts: Mapping[str, Sequence[dict[str, Any]]],
    microbatch: MicrobatchSize | None,
    module_class: type[PPOModule] = PPOModule,
    ptx: PTX | None = None,
) -> PPOModule:
    """Return the module before its first iteration, with a new policy and, for GAE, a critic.

    microbatch: size at which the models of the reward read responses; None where none does.
    ptx: demonstrations of ppo.ptx_coef; None where none are learned from.
    """
    settings = ready.settings
    add_policy(roles, settings.model, settings.seed)
    return module_class(
        roles,
        reward,
        config,
        critic=build_critic(ready, roles, config) if config.has_critic else None,
        chat=ready.chat,
        prompts=prompts,
        seed=settings.seed,
        microbatch=microbatch,
        replicas=ready.replicas,
        stage=settings.stage,
        ptx=ptx,
    )


def export_ppo(settings: Settings, config: PPOConfig, export: Export) -> Path:
    """Write the policy of a checkpoint as a folder like `final/`; no data or reward is read."""
    parents = find_parents(settings)
    ready = replace(make_ready(settings, parents), export=export)
    with Working("loading the model"):
        roles = start_from(settings.model, parents.get(SFT), trainable=False, seed=settings.seed)
    roles.to(ready.device)
    terms = tuple(component.term(name) for name, component in settings.reward.items())
    build = settings.definition.build or build_module
    module = build(ready, roles, Reward(terms, ()), config, {}, None)
    load_weights(module, export.checkpoint, export.origin)
    found = verdicts_on(settings, parents | hub_rewards(ready))
    verdicts = {name: verdict for name, verdict in found.items() if verdict is not None}
    head = VALUE if module.critic is not None and module.critic.shares_trunk else None
    return hand_over(ready, roles, POLICY, export.metrics, head=head, verdicts=verdicts)


def print_collapse(folder: Path, stage: str) -> None:
    """Print a warning where the metrics of the last iteration are those of a collapsed policy."""
    rows = read_rows(folder / METRICS)
    trained = [row for row in rows.values() if KL in row]
    last = {name: float(cell) for name, cell in trained[-1].items()} if trained else None
    if last is not None and (why := collapsed(last, stage)) is not None:
        print_line(f"warning: {why}", "yellow")


def _texts(rows: Rows[Any]) -> list[dict[str, Any]]:
    return [row.columns for row in rows.rows]
