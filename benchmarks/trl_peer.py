"""TRL's side of a benchmark: its unchanged PPOTrainer, with a function as the reward.

The four models are the policy, a reference copy, a separate value model on a copy of the same
trunk, and a reward "model" that calls the function; the trainer's `get_reward` is wrapped for this
one only. `per_device_train_batch_size` is the whole batch and `gradient_accumulation_steps` is 1:
with `num_mini_batches` the trainer then takes one optimizer step per minibatch, which it does not
do with gradient accumulation. The number of steps is checked in every iteration.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
import trl.experimental.ppo.ppo_trainer as trl_ppo
from datasets import Dataset
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, set_seed

from common import Clock, OnIteration, Score, Setting
from lightning_rlhf.core.records import Prompts

CPU = torch.device("cpu")
Trained = Literal["all", "lora"]
"""Trained parameters: all weights, or an adapter (for the value model, also its head)."""


class ScoreModel(nn.Module):
    """A reward model that computes a function of the tokens."""

    def __init__(self, score: Score, pad: int) -> None:
        super().__init__()
        self.score_of = score
        self.pad = pad
        self.response_tokens = 0.0

    def rewards(self, tokens: Tensor, context_length: int) -> Tensor:
        """Return the scores of truncated responses, and store their mean length."""
        mask = tokens[:, context_length:] != self.pad
        self.response_tokens = mask.sum(dim=1).float().mean().item()
        return self.score_of(tokens.where(tokens != self.pad, 0), mask)


class ValueModel(nn.Module):
    """A trunk and a linear head initialised to zero, with the attribute names that TRL expects."""

    base_model_prefix = "trunk"

    def __init__(self, trunk: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.score = nn.Linear(hidden_size, 1, bias=False, dtype=next(trunk.parameters()).dtype)
        nn.init.zeros_(self.score.weight)


class Facts(TrainerCallback):
    """A callback that reports the measurements of each iteration."""

    def __init__(self, reward: ScoreModel) -> None:
        self.reward = reward
        self.clock: Clock

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.finish(self.reward.response_tokens)


def train(
    model: PreTrainedModel,
    setting: Setting,
    prompts: Sequence[Prompts],
    on_iteration: OnIteration,
    *,
    policy: Trained = "all",
    value: Trained = "all",
    device: torch.device = CPU,
) -> nn.Module:
    """Train all weights of `model`, or an adapter on it; returns the policy.

    device: the CPU, or the only GPU that this process sees.
    """
    set_seed(setting.seed)
    pad = int(model.config.get_text_config().vocab_size)  # no token the policy could sample
    reward = ScoreModel(setting.score, pad)
    facts = Facts(reward)
    actor, reference, critic = build(model, setting, policy=policy, value=value)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_ppo.PPOTrainer(
            config_of(setting, folder, device),
            SimpleNamespace(pad_token_id=pad, eos_token_id=setting.end_token),
            actor,
            reference,
            reward,
            dataset_of(prompts, setting, pad),
            critic,
            data_collator=lambda rows: {"input_ids": torch.tensor([r["input_ids"] for r in rows])},
            callbacks=[facts],
            optimizers=(optimizer_of(actor, critic, setting), None),
        )
        trainer.remove_callback(PrinterCallback)
        facts.clock = Clock(setting, on_iteration)
        trainer.optimizer.optimizer.register_step_post_hook(facts.clock.count)
        get_reward = functools.partial(function_or_model, trl_ppo.get_reward)
        with patch.object(trl_ppo, "get_reward", get_reward):
            trainer.train()
        facts.clock.stop()
    return actor


def function_or_model(
    get_reward: Any, model: nn.Module, tokens: Tensor, pad: int, context_length: int
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the result of the trainer's `get_reward`, or of the function for a ScoreModel."""
    if isinstance(model, ScoreModel):
        return None, model.rewards(tokens, context_length), None
    found: tuple[Tensor, Tensor, Tensor] = get_reward(model, tokens, pad, context_length)
    return found


def build(
    model: PreTrainedModel, setting: Setting, *, policy: Trained, value: Trained
) -> tuple[nn.Module, nn.Module | None, ValueModel]:
    """Return policy, reference and value model, all with the weights of `model`.

    With an adapter the reference is None: the trainer uses the policy with the adapter disabled.
    """
    model.eval()
    lora = LoraConfig(
        r=setting.lora_rank,
        lora_alpha=2 * setting.lora_rank,
        target_modules="all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    trunk = copy.deepcopy(model.base_model)
    critic = ValueModel(trunk, model.get_output_embeddings().in_features)
    if value == "lora":
        inject_adapter_in_model(lora, trunk)
    else:
        trunk.requires_grad_(True)
    if policy == "lora":
        return get_peft_model(model, lora), None, critic
    reference = copy.deepcopy(model).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "lm_head.bias")
    return model, reference, critic


def config_of(setting: Setting, folder: str, device: torch.device) -> trl_ppo.PPOConfig:
    """Return the trainer's configuration of a setting, without saving, logging or extra samples."""
    return trl_ppo.PPOConfig(
        output_dir=folder,
        use_cpu=device.type == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        num_sample_generations=0,
        logging_steps=1,
        seed=setting.seed,
        per_device_train_batch_size=setting.episodes,
        gradient_accumulation_steps=1,
        num_mini_batches=setting.minibatches,
        num_ppo_epochs=setting.epochs,
        local_rollout_forward_batch_size=setting.episodes,
        total_episodes=setting.iterations * setting.episodes,
        response_length=setting.response_tokens,
        stop_token="eos",
        missing_eos_penalty=None,
        temperature=setting.temperature,
        kl_coef=setting.kl_coef,
        gamma=setting.gamma,
        lam=setting.gae_lambda,
        cliprange=setting.clip_range,
        cliprange_value=setting.clip_range_vf,
        vf_coef=setting.vf_coef,
        learning_rate=setting.lr,
        lr_scheduler_type=setting.lr_schedule.replace("constant", "constant_with_warmup"),
        warmup_steps=setting.warmup_fraction,
    )


def optimizer_of(policy: nn.Module, value: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """Return the trainer's default kind of optimizer, with a separate rate for the value model."""
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad], "lr": setting.lr * factor}
        for model, factor in ((policy, 1.0), (value, setting.value_lr_factor))
    ]
    return torch.optim.AdamW(
        groups,
        betas=(0.9, setting.adam_beta2),
        eps=setting.adam_eps,
        weight_decay=0.0,
        fused=True,
    )


def dataset_of(prompts: Sequence[Prompts], setting: Setting, pad: int) -> Dataset:
    """Return the prompts of all iterations as a dataset, which the trainer shuffles."""
    rows = [row for batch in prompts for row in batch.tokens.where(batch.mask, pad).tolist()]
    return Dataset.from_dict({"input_ids": rows[: setting.iterations * setting.episodes]})
