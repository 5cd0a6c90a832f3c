"""Runs the recorded updates of a run again and compares them with the record bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rlhf.callbacks.digest import parameters_digest
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.errors import CheckpointError, DataError, TrainingError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.core.wording import counted
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rollouts import (
    PER_TOKEN,
    Recorded,
    file_of,
    machine,
    read_recorded,
    stats,
)
from lightning_rlhf.models.build_roles import start_from
from lightning_rlhf.models.roles import SFT, Roles
from lightning_rlhf.modules.optim import check_parameters
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.replay.plan import Plan, updates_before
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.stages.advice import advise
from lightning_rlhf.stages.folder.folders import find_rewards, find_sft
from lightning_rlhf.stages.launch import Prepared, make_ready
from lightning_rlhf.stages.ptx import read_ptx
from lightning_rlhf.stages.stage import Settings
from lightning_rlhf.stages.train_ppo import build_module


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Result of running an iteration again."""

    recorded: Recorded
    differences: tuple[str, ...]
    """Differences between the record and this iteration, or one run before it."""
    not_finite: tuple[str, ...]
    """Columns of the record with numbers that are not finite, of which no update can be made."""
    ended: str | None
    """Message of the error that ended the iteration; None where it finished."""
    made: int | None
    """Number of updates that the run made before its end, where the weights after them are shown;
    None where the iteration was run again."""
    machine: Mapping[str, str]
    """Facts of the machine and the libraries of the replay, by name."""
    logprobs: Tensor
    """Log-probabilities of the policy after the updates, nats, [B, T]."""
    values: Tensor | None
    """Values of the critic after the updates, [B, T]; None without a critic."""
    chat: ChatFormat


class Recordings:
    """Iterable over the recorded files as batches for Trainer.fit.

    The length counts from the start of the run, since Lightning resumes its count at the
    checkpoint.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.iteration

    def __iter__(self) -> Iterator[Recorded]:
        return (read_recorded(file_of(self.plan.folder, i)) for i in self.plan.iterations)


class Comparison(Callback):
    """Collects the differences between an iteration and its record."""

    def __init__(self) -> None:
        self.differences: list[str] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPOModule)
        if pl_module.kl_coef != batch.kl_coef:
            self.differences.append(
                f"kl_coef of iteration {batch.iteration} is {pl_module.kl_coef!r}, "
                f"was {batch.kl_coef!r}"
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        if batch.updates is not None:
            found = differences(
                batch, stats(outputs[RESULT].updates), parameters_digest(pl_module.state_dict())
            )
            self.differences += found


def differences(
    recorded: Recorded, updates: list[dict[str, float]], parameters: str
) -> Iterator[str]:
    """Yield each difference, bit for bit, between an iteration and its record."""
    where = f"of iteration {recorded.iteration}"
    assert recorded.updates is not None
    if parameters != recorded.parameters:
        yield f"the parameters at the end {where}"
    if len(updates) != len(recorded.updates):
        yield f"{counted(len(updates), 'update')} {where}, were {len(recorded.updates)}"
    for number, (now, then) in enumerate(zip(updates, recorded.updates, strict=False), start=1):
        if now.keys() != then.keys():
            yield f"the facts of update {number} {where}: {sorted(now.keys() ^ then.keys())}"
        for name in now:
            if name in then and not same(now[name], then[name]):
                yield f"{name} of update {number} {where} is {now[name]!r}, was {then[name]!r}"


def not_finite(recorded: Recorded) -> Iterator[str]:
    """Yield the columns with numbers that are not finite, as "3 of 40 advantages"."""
    experience = recorded.experience
    tokens = experience.response_mask
    numbers = {column: getattr(experience, field)[tokens] for column, field in PER_TOKEN.items()}
    for column, x in {"score": experience.score, **numbers}.items():
        count = int((~x.isfinite()).sum())
        if count:
            yield f"{count} of {x.numel()} {column}"


def same(a: float, b: float) -> bool:
    """Return whether two numbers are equal, or both NaN."""
    return a == b or (a != a and b != b)


def run_once_more(plan: Plan) -> Replayed:
    """Run the plan's updates on the models that the run started from, or load its weights."""
    settings = plan.settings
    module, ready = rebuilt(settings)
    shown = plan.iterations if plan.weights is None else [plan.iteration]
    for path in (file_of(plan.folder, number) for number in shown):
        check_tokens(path, read_recorded(path).experience.tokens, module.roles)
    comparison = Comparison()
    ended = made = None
    if plan.weights is None:
        trainer = quiet_trainer(
            settings, [comparison, Progress(settings.stage, settings.definition.headlines)]
        )
        try:
            trainer.fit(module, Recordings(plan), ckpt_path=plan.checkpoint, weights_only=True)
        except TrainingError as error:
            ended = str(advise(error, settings.stage))
    else:
        made = updates_before(plan.weights)
        weights = load_file(plan.weights)
        try:
            check_parameters(module, {"state_dict": weights})
        except CheckpointError as error:
            raise CheckpointError(f"{plan.weights}: {error}") from error
        module.load_state_dict(weights, strict=False)
    recorded = read_recorded(file_of(plan.folder, plan.iteration))
    found = comparison.differences
    came_as_far = module.iteration >= plan.iteration - 1
    if ended is not None and (recorded.updates is not None or not came_as_far):
        found.append(f"iteration {module.iteration + 1} ended with an error: {ended}")
    data: Any = [recorded]
    afterwards = quiet_trainer(settings, []).predict(module, DataLoader(data, batch_size=None))
    assert afterwards is not None
    now: Any = afterwards[0]  # PPOPredictions
    return Replayed(
        recorded=recorded,
        differences=tuple(found),
        not_finite=tuple(not_finite(recorded)),
        ended=ended,
        made=made,
        machine=machine(ready.device),
        logprobs=now.logprobs.cpu(),
        values=None if now.values is None else now.values.cpu(),
        chat=ready.chat,
    )


def check_tokens(path: Path, tokens: Tensor, roles: Roles) -> None:
    """Raise DataError where a token id in a file is outside the model's vocabulary."""
    largest = int(tokens.max())
    if largest >= roles.vocab_size:
        raise DataError(
            f"{path} is not of this run: a token id is {largest}, the model's largest is "
            f"{roles.vocab_size - 1}"
        )


def rebuilt(settings: Settings) -> tuple[PPOModule, Prepared]:
    """Return the module as it was before the first iteration, without its reward."""
    config = settings.config
    assert isinstance(config, PPOConfig)
    sft = find_sft(settings)
    parents = {} if sft is None else {SFT: sft}
    if config.critic_init == "reward":
        parents |= find_rewards(settings)
    ready = make_ready(settings, parents)
    ptx = read_ptx(ready, config)
    with Working("loading the model"):
        roles = start_from(settings.model, sft, trainable=False, seed=settings.seed)
    roles.to(ready.device)
    terms = tuple(component.term(name) for name, component in settings.reward.items())
    return build_module(ready, roles, Reward(terms, ()), config, {}, None, ptx=ptx), ready


def quiet_trainer(settings: Settings, callbacks: list[Callback]) -> L.Trainer:
    """Return a Trainer that computes as the run's did, and writes no files."""
    return L.Trainer(
        accelerator=settings.trainer.accelerator,
        devices=1,
        precision=settings.trainer.precision,  # type: ignore[arg-type]
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bool(callbacks),
        inference_mode=False,  # predict_step of SFT, reward modelling and DPO takes gradients
    )
