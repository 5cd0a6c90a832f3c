"""Our side of a benchmark: PPOModule in Lightning's Trainer, with a function as the reward."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from common import ROOT, Clock, OnIteration, Setting
from lightning_rlhf.core.ppo_config import CriticKind, PPOConfig
from lightning_rlhf.core.records import DecodedResponses, Experience, Prompts
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.models.config import CRITIC, POLICY, VALUE, LoRASettings
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.score import Critic

CPU = torch.device("cpu")


def train(
    model: PreTrainedModel,
    setting: Setting,
    prompts: Sequence[Prompts],
    on_iteration: OnIteration,
    *,
    critic: CriticKind = "head",
    device: torch.device = CPU,
) -> nn.Module:
    """Train an adapter on `model`, whose own weights are frozen; returns the policy."""
    torch.manual_seed(setting.seed)
    module = build(model, setting, critic)
    trainer = L.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1,
        max_epochs=1,
        precision="32-true" if model.dtype == torch.float32 else "bf16-mixed",  # as trainer=gpu
        logger=False,
        callbacks=[Facts(setting, on_iteration)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(module, DataLoader(list(prompts)[: setting.iterations], batch_size=None))
    return module.roles.model


def build(model: PreTrainedModel, setting: Setting, critic: CriticKind) -> PPOModule:
    """Return a PPOModule with the policy's adapter and the critic on one copy of the weights.

    Raises ValueError for a critic other than "head" and "adapter".
    """

    def reward(decoded: DecodedResponses) -> Tensor:
        return setting.score(decoded.rollout.tokens, decoded.rollout.response_mask)

    roles = Roles(model.eval().requires_grad_(False))
    lora = LoRASettings(
        r=setting.lora_rank, alpha=2 * setting.lora_rank, target_modules="all-linear"
    )
    roles.add_adapter(POLICY, lora)
    match critic:
        case "head":
            role = POLICY
        case "adapter":
            role = CRITIC
            roles.add_adapter(CRITIC, lora)
        case _:
            raise ValueError(f"critic {critic}; allowed: head, adapter")
    roles.heads[VALUE] = ScalarHeads(roles.hidden_size, 1)
    return PPOModule(
        roles,
        Reward.of(reward),
        config_of(setting, critic),
        critic=Critic(roles, role),
        chat=SimpleNamespace(  # type: ignore[arg-type]
            end_token_ids=(setting.end_token,),
            tokenizer=None,
            decode_response=lambda tokens: "",  # without a tokenizer
        ),
        prompts={"train": [{}] * setting.iterations * setting.episodes, "val": []},
        seed=setting.seed,
    )


def config_of(setting: Setting, critic: CriticKind) -> PPOConfig:
    """Return the default configuration of stage=ppo, with the values of the setting."""
    keys: dict[str, Any] = {}
    for node in (
        OmegaConf.load(ROOT / "conf/advantage/gae.yaml"),
        OmegaConf.load(ROOT / "conf/stages/ppo.yaml"),
    ):
        keys |= OmegaConf.to_container(node)  # type: ignore[arg-type]
    minibatch_size = setting.episodes // setting.minibatches
    keys |= {
        "stop_strings": (),
        "iterations": setting.iterations,
        "rollout_batch_size": setting.episodes,
        "minibatch_size": minibatch_size,
        "microbatch_size": minibatch_size,
        "ppo_epochs": setting.epochs,
        "max_response_tokens": setting.response_tokens,
        "temperature": setting.temperature,
        "score_normalization": "none",
        "missing_eos": "none",
        "kl_coef": setting.kl_coef,
        "gamma": setting.gamma,
        "gae_lambda": setting.gae_lambda,
        "clip_range": setting.clip_range,
        "clip_range_vf": setting.clip_range_vf,
        "vf_coef": setting.vf_coef,
        "critic": critic,
        "lr": setting.lr,
        "value_lr_factor": setting.value_lr_factor,
        "adam_beta2": setting.adam_beta2,
        "adam_eps": setting.adam_eps,
        "lr_schedule": "linear",
        "final": "last",
    }
    return PPOConfig(**keys)


class Facts(Callback):
    """A callback that reports the measurements of each iteration."""

    def __init__(self, setting: Setting, on_iteration: OnIteration) -> None:
        self.setting = setting
        self.on_iteration = on_iteration

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock = Clock(self.setting, self.on_iteration)
        trainer.optimizers[0].register_step_post_hook(self.clock.count)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        experience: Experience = outputs[RESULT].experience
        self.clock.finish(experience.response_mask.sum(dim=1).float().mean().item())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock.stop()
