"""Tiny models with random weights, in the roles of each stage, and a silent Trainer."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lightning_rlhf.core.config import DPOConfig, RMConfig, SFTConfig
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Prompts, Record
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.kernels import patch
from lightning_rlhf.models.config import CRITIC, POLICY, REWARD, SFT, VALUE, LoRASettings
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.parallel.world import world
from lightning_rlhf.rewards.weighted import LearnedReward, Reward, Source
from lightning_rlhf.rollout.score import Critic
from lightning_rlhf.runs.accelerator import ReplicaStrategy

from ..composing import stage_config
from ..matrix import matrix
from ..models.conftest import build_model

VOCABULARY, END = 64, tuple(range(1, 9))  # an eighth of all tokens, so that lengths differ
ARCHITECTURES = ("qwen3", "qwen3_5")
"""Attention alone; linear attention, which carries a state, and attention in turn."""
by_architecture = pytest.mark.parametrize("architecture", matrix(ARCHITECTURES, "qwen3"))
"""Of what reads log-probabilities and heads alone: the second one with engines-check."""
LORA = LoRASettings(r=4, alpha=8, target_modules="all-linear")

OWN: dict[str, Any] = {
    "lr": 1e-3, "adam_beta2": 0.99, "adam_eps": 1e-8, "max_grad_norm": 1e9, "max_nonfinite": 3,
    "lr_schedule": "constant", "warmup_fraction": 0.0, "microbatch_size": 2,
}  # fmt: skip
"""Values of all stages in which these tests differ from conf/."""
PPO = OWN | {
    "iterations": 3, "rollout_batch_size": 8, "max_response_tokens": 6, "kl_coef": 0.1,
    "ent_coef": 0.01, "ptx_batch_size": 4, "minibatch_size": 4, "ppo_epochs": 2, "kl_warning": None,
}  # fmt: skip


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def sft_config(**changes: Any) -> SFTConfig:
    return stage_config("sft", SFTConfig, **OWN | {"batch_size": 6} | changes)


CENTER_COEF = 0.3


def rm_config(**changes: Any) -> RMConfig:
    own = OWN | {"batch_size": 6, "center_coef": CENTER_COEF, "calibration_samples": 8}
    return stage_config("rm", RMConfig, **own | changes)


def dpo_config(**changes: Any) -> DPOConfig:
    return stage_config("dpo", DPOConfig, **OWN | {"batch_size": 6, "beta": 0.5} | changes)


def ppo_config(**changes: Any) -> PPOConfig:
    return stage_config("ppo", PPOConfig, **PPO | changes)


def language_model(architecture: str, seed: int = 0, spread: float = 0.2) -> PreTrainedModel:
    """Two layers of width 32, frozen. Weights wide enough that tokens differ in probability.

    spread: the standard deviation of the weights. Linear attention magnifies rounding with it.
    """
    family, shape = architecture, dict[str, Any]()
    if architecture == "qwen3_5":
        family = "qwen3_5_text"
        shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    with torch.random.fork_rng():
        return build_model(
            family, seed=seed, vocab_size=VOCABULARY, num_attention_heads=2, head_dim=16,
            num_key_value_heads=1, initializer_range=spread, tie_word_embeddings=True,
            eos_token_id=None, pad_token_id=None, **shape,
        )  # fmt: skip


def shake(module: nn.Module, marker: str, seed: int, size: float = 0.05) -> None:
    """Add noise to the parameters whose name holds `marker`, as if they had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if marker in name:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def with_adapter(roles: Roles, role: str, seed: int) -> None:
    """An adapter that already does something; it starts as nothing, with half its gradients 0."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        roles.add_adapter(role, LORA)
    shake(roles, f".{role}.", seed)


def sft_roles(architecture: str, spread: float = 0.2) -> Roles:
    roles = Roles(language_model(architecture, spread=spread))
    with_adapter(roles, SFT, seed=1)
    return roles


def with_policy(base: Roles, model: PreTrainedModel, finetune: str) -> Roles:
    """A new policy: an adapter on the base, or the model, beside the frozen base."""
    if finetune == "lora":
        base.add_adapter(POLICY, LORA, 3)
        return base
    roles = Roles(model.requires_grad_(True))
    roles.frozen = base
    roles.assign(POLICY)
    return roles


@cache
def ready(
    architecture: str, spread: float, reward: Path, finetune: str, use_kernels: object
) -> tuple[Roles, Roles]:
    """The base with a frozen reward, and the roles of a new policy, to be copied. `use_kernels`
    chooses their layers."""
    base = Roles(language_model(architecture, spread=spread))
    base.heads[REWARD] = ScalarHeads.random(
        base.hidden_size, 1, torch.Generator().manual_seed(2)
    ).requires_grad_(False)
    base.load_adapter(REWARD, reward, trainable=False)
    return base, with_policy(base, language_model(architecture, spread=spread), finetune)


def rm_roles(architecture: str) -> Roles:
    roles = Roles(language_model(architecture))
    roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, torch.Generator().manual_seed(2))
    with_adapter(roles, REWARD, seed=2)
    return roles


@pytest.fixture(scope="session")
def reward_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> folder of a reward adapter for its model."""
    folders = {}
    for name in (*ARCHITECTURES, "llama"):  # for tests/standin
        folder = tmp_path_factory.mktemp(name)
        rm_roles(name).model.save_pretrained(str(folder), selected_adapters=[REWARD])
        folders[name] = folder / REWARD
    return folders


def add_critic(roles: Roles, architecture: str, kind: str) -> Critic:
    """A value head at zero on the policy, on an adapter of its own, on a model of its own."""
    owner, role = roles, CRITIC
    if kind == "head":
        role = POLICY
    elif kind == "adapter":
        owner = roles.reference
        owner.add_adapter(CRITIC, LORA, 5)
    else:
        owner = Roles(language_model(architecture).requires_grad_(True))
        owner.assign(CRITIC)
    owner.heads[VALUE] = ScalarHeads(owner.hidden_size, 1)
    return Critic(owner, role)


CHAT = SimpleNamespace(end_token_ids=END, tokenizer=None, decode_response=str, show=str)
"""All that PPO asks of a chat format where no text ends a response."""


@pytest.fixture
def make_ppo(reward_adapters: dict[str, Path]) -> Callable[..., PPOModule]:
    """A PPO module: frozen reward adapter and head, policy and value head as if trained a while."""

    def make(
        architecture: str = "qwen3", *, seed: int = 0, spread: float = 0.2,
        reward: Source | None = None, fresh: bool = False, **changes: Any,
    ) -> PPOModule:  # fmt: skip
        config = ppo_config(**changes)
        place = reward_adapters[architecture], config.finetune, patch.use_kernels
        base, roles = copy.deepcopy(ready(architecture, spread, *place))
        critic = add_critic(roles, architecture, config.critic) if config.has_critic else None
        batch_size = MicrobatchSize("ppo.microbatch_size", config.microbatch_size)
        learned = LearnedReward(base.rewards, 0.1, 0.5, 0.0, batch_size)
        if not fresh:
            shake(roles.causal_lm, f".{POLICY}." if roles is base else "model.", seed=3)
            if critic is not None:
                shake(critic.roles, f"heads.{VALUE}.", seed=4)
                shake(critic.roles, f".{CRITIC}.", seed=5)
        module = PPOModule(
            roles,
            Reward.of(reward or learned),
            config,
            critic=critic,
            chat=CHAT,  # type: ignore[arg-type]
            prompts={split: [{"prompt": "", "messages": []}] * 64 for split in ("train", "val")},
            seed=seed,
            microbatch=batch_size,
        )
        module.further = further
        return module

    return make


def prompts(rows: int = 8, width: int = 5, seed: int = 0) -> Prompts:
    """Left-padded prompts of 1 to `width` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.arange(rows) % width + 1
    return Prompts(
        tokens=torch.randint(2, VOCABULARY, (rows, width), generator=generator),
        mask=torch.arange(width) >= width - lengths[:, None],
        index=torch.arange(rows),
    )


def further(number: int, count: int) -> Prompts:
    """Wider prompts than those of a batch, for ppo.resample_groups."""
    return prompts(8, width=7, seed=100 + number).select(slice(0, count))


def fit(
    module: L.LightningModule, batches: Sequence[Record], callbacks: Sequence[Callback] = (),
    held_out: Sequence[Record] = (), every: int = 1, **device: Any,
) -> L.Trainer:  # fmt: skip
    """A real `Trainer.fit` over the batches, once, on the CPU.

    held_out: batches that are validated on at the start and every so many steps.
    device: arguments of the Trainer for another device.
    """
    is_evaluated = len(held_out) > 0
    place: dict[str, Any] = {"accelerator": "cpu", "devices": world().size}
    if world().size > 1:
        place["strategy"] = ReplicaStrategy()
    trainer = L.Trainer(
        **({"devices": 1} | device if device else place), use_distributed_sampler=False,
        max_epochs=1, logger=False, callbacks=list(callbacks), enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
        num_sanity_val_steps=-1 if is_evaluated else 0, limit_val_batches=len(held_out),
        val_check_interval=every if is_evaluated else None,
    )  # fmt: skip
    loaders = [DataLoader(list(found), batch_size=None) for found in (batches, held_out)]
    trainer.fit(module, *loaders[: 1 + is_evaluated])
    return trainer


class Outputs(Callback):
    """What training_step returned, and the gradients that its last optimizer step saw."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.grads: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.steps.append(outputs[RESULT])
        self.grads.append(grads(pl_module))


def within_fit(module: L.LightningModule, work: Callable[[], Any], **device: Any) -> Any:
    """`work()` in place of a training step, so that optimizer and backward are Lightning's."""
    found: list[Any] = []
    module.training_step = lambda batch, batch_idx: found.append(work())
    fit(module, [prompts(1)], **device)
    return found[0]


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole where processes share them."""
    found = ((name, p.detach()) for name, p in module.named_parameters())
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in found}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Names of the parameters of which a single bit differs."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def same_direction(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-5
) -> None:
    """Each gradient equals the other to `rtol` of the largest element of all.

    A single element may be a small difference of large sums, in fp32 with no digit of its own.
    """
    assert found.keys() == expected.keys()
    scale = max(g.abs().max().item() for g in expected.values())
    assert scale > 0
    for name, grad in found.items():
        torch.testing.assert_close(
            grad, expected[name], rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def close(found: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
