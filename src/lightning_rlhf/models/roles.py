"""Addition of LoRA adapters to a model: new ones, and those of a checkpoint.

The output layer, through which all roles predict, and the probe input of fingerprints.

Several roles on one base model.

Every role is the base model with a stack of active adapters:

    reference   SFT                      frozen; the base itself if SFT was merged into it
    policy      SFT + policy adapter     trained by PPO
    reward      SFT + reward adapter     frozen in PPO, with the reward head
    critic      SFT + critic adapter     trained by PPO, where ppo.critic=adapter

One copy of the base weights serves all roles, and the reference is the SFT model by construction,
whether the SFT adapter was merged or is a separate adapter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.core.config import KernelChoice
from lightning_rlhf.core.errors import CheckpointError, first_line, require
from lightning_rlhf.core.masking import from_first_real
from lightning_rlhf.kernels.decoder import merged_adapters
from lightning_rlhf.kernels.lora import FusedLoRALinear
from lightning_rlhf.kernels.patch import patch_layers, rounding, same_logits
from lightning_rlhf.models.adapter import check_adapter, check_weights
from lightning_rlhf.models.config import BASE, REFERENCE, REWARD, SFT, LoRASettings
from lightning_rlhf.models.language_model import LanguageModel, linear_layers
from lightning_rlhf.models.loading import checkpoint_layers, naming


def with_new_adapter(
    model: PreTrainedModel | PeftModel, name: str, settings: LoRASettings, seed: int
) -> PeftModel:
    """Return the model with a new adapter, whose initial weights depend on (seed, name) alone.

    Raises: ConfigError where `settings` do not fit the model, CheckpointError where PEFT finds no
        module to adapt.
    """
    check_settings(settings, model.get_base_model() if isinstance(model, PeftModel) else model)
    targets = settings.target_modules
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    start = np.random.SeedSequence((seed, *name.encode())).generate_state(1)
    try:
        with torch.random.fork_rng(devices=[]):  # PEFT draws the weights on the CPU
            torch.manual_seed(int(start[0]))
            if isinstance(model, PeftModel):
                model.add_adapter(name, config)
                return model
            return PeftModel(model, config, adapter_name=name)
    except ValueError as error:
        raise CheckpointError(
            f"model.lora.target_modules={targets}: {first_line(error)}"
        ) from error


def check_settings(settings: LoRASettings, model: PreTrainedModel) -> None:
    """Raise ConfigError where the rank of a new adapter is above the model's largest layer."""
    sizes = (max(inputs, outputs) for *_, inputs, outputs in linear_layers(model.base_model))
    largest = max(sizes, default=int(model.config.get_text_config().hidden_size))
    require(settings.r <= largest, "model.lora.r", settings.r,
            f"at most {largest}, the model's largest layer")  # fmt: skip


def with_loaded_adapter(model: PreTrainedModel | PeftModel, name: str, folder: Path) -> PeftModel:
    """Return the model with the adapter of a `final/` folder. Raises CheckpointError."""
    check_weights(folder)
    check_adapter(folder)
    with naming(str(folder), name), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*missing adapter keys.*")
        if isinstance(model, PeftModel):
            model.load_adapter(str(folder), adapter_name=name)
            return model
        return PeftModel.from_pretrained(model, str(folder), adapter_name=name)


def probe_tokens(causal_lm: PreTrainedModel) -> Int[Tensor, "1 S"]:
    """Return the fixed sequence of tokens that models are compared on, on the model's device."""
    vocab_size = int(causal_lm.get_output_embeddings().out_features)
    return (torch.arange(1, 17) * 7919 % vocab_size)[None].to(causal_lm.device)


@torch.no_grad()
def check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Raise CheckpointError unless the model's logits are those of its output layer.

    Models that cap or scale their logits are not supported. A model without weights, on torch's
    device `meta`, has no logits and is not checked.
    """
    if causal_lm.device.type == "meta":
        return
    tokens = probe_tokens(causal_lm)
    hidden = causal_lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    ours = causal_lm.get_output_embeddings()(hidden).float()
    theirs = causal_lm(input_ids=tokens).logits.float()
    if not same_logits(ours, theirs, rounding(causal_lm)):
        raise CheckpointError(
            f"{causal_lm.config.model_type} changes its logits after the output layer "
            "(soft-capping or scaling), which is not supported"
        )


class Roles(LanguageModel):
    """A causal language model with its adapters and scalar heads.

    One role is active at a time: the one last given to `set_role`, or inside `use_role` the one
    given there.
    """

    def __init__(self, causal_lm: PreTrainedModel, kernels: KernelChoice = "auto") -> None:
        """kernels: which layers compute; with auto the place of the weights decides."""
        super().__init__(causal_lm, kernels)
        self.heads = nn.ModuleDict()
        self._stacks: dict[str, tuple[str, ...]] = {BASE: (), REFERENCE: ()}
        self.role = BASE
        """Role that is active; `set_role` and `use_role` change it."""
        self._merged = False
        if getattr(causal_lm, "recomputes", False):
            self.recompute_layers()
        check_output_layer(causal_lm)

    def recompute_layers(self) -> None:
        """Recompute the layers for the gradient, in the role that they were computed in."""
        checkpoint_layers(self.causal_lm, lambda: partial(self.use_role, self.role))

    def add_adapter(self, role: str, settings: LoRASettings, seed: int = 0) -> None:
        """Add a trainable LoRA adapter on top of the reference; before training it has no effect.

        Its initial weights depend on (seed, role) alone.

        Raises ConfigError where `settings` do not fit the model, CheckpointError where PEFT finds
        no module to adapt.
        """
        self.model = with_new_adapter(self.model, role, settings, seed)
        self._stack(role, trainable=True)

    def load_adapter(self, role: str, folder: Path, *, trainable: bool) -> None:
        """Add the adapter of a `final/` folder on top of the reference. Raises CheckpointError."""
        self.model = with_loaded_adapter(self.model, role, folder)
        self._stack(role, trainable=trainable)
        if role == SFT:
            self._stacks[REFERENCE] = self._stacks[SFT]

    def assign(self, role: str) -> None:
        """Define `role` as the reference itself, without an adapter of its own, and activate it."""
        self._stacks[role] = self._stacks[REFERENCE]
        self.set_role(role)

    def _stack(self, role: str, *, trainable: bool) -> None:
        if isinstance(self.causal_lm.get_output_embeddings(), BaseTunerLayer):
            raise CheckpointError(
                "the output layer has an adapter (model.lora.target_modules names it), but all "
                "roles predict through one output layer; leave it out"
            )
        if self.kernels.kind == "fast":
            patch_layers(self.model)
        self._stacks[role] = (*self._stacks[REFERENCE], role)
        self._layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        marker = f".{role}."
        for name, parameter in self.model.named_parameters():
            if marker in name and "lora_" in name:
                parameter.requires_grad_(trainable)
        self._trainable = [
            p for n, p in self.model.named_parameters() if "lora_" in n and p.requires_grad
        ]
        self.model.eval()
        self.set_role(role)

    def adapters(self, role: str) -> tuple[str, ...]:
        """Return the names of the adapters that are active in `role`, the lowest first."""
        return self._stacks[role]

    def trained_by(self, role: str) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters of the role's adapter; without one, of the model."""
        marker = f".{role}."
        has_adapter = role in self._stacks[role]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and (marker in name or not has_adapter):
                yield parameter

    def set_role(self, role: str) -> None:
        """Activate the adapters of `role`; trainable parameters stay trainable.

        Raises RuntimeError inside `merged`.
        """
        if self._merged:
            raise RuntimeError(f"{role} cannot be activated while {self.role} is merged")
        self.role = role
        if not isinstance(self.model, PeftModel):
            return
        others = [layer for layer in self._layers if not isinstance(layer, FusedLoRALinear)]
        for layer in self._layers:
            if isinstance(layer, FusedLoRALinear):
                layer.activate(self._stacks[role])
        for layer in others:
            layer.set_adapter(list(self._stacks[role]), inference_mode=True)
        if others:
            for parameter in self._trainable:
                parameter.requires_grad_(True)

    @contextmanager
    def use_role(self, role: str) -> Iterator[None]:
        """Activate `role` inside the block, and the previous role again afterwards."""
        before = self.role
        if role == before:
            yield
            return
        self.set_role(role)
        try:
            yield
        finally:
            self.set_role(before)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Merge the active role's adapters into plain weights inside the block, for inference.

        The forward pass is faster, and the adapters cannot be trained. No other role can be
        activated inside the block: `set_role` raises RuntimeError. With plain kernels the adapters
        stay beside the weights.
        """
        before, self._merged = self._merged, True
        try:
            with merged_adapters(self.model) if self.copies_weights else nullcontext():
                yield
        finally:
            self._merged = before

    def rewards(
        self,
        tokens: Int[Tensor, "B S"],
        mask: Bool[Tensor, "B S"],
        role: str = REWARD,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B H"]:
        """Return the output of each of the H heads of a reward role for each sequence.

        It is computed at the last real token.
        lengths: number of real tokens of each row; where it is on the CPU, the device of the tokens
            is not waited for. None counts them.
        """
        with self.use_role(role):
            lengths = mask.sum(dim=1) if lengths is None else lengths
            tokens, _ = from_first_real(tokens, mask, longest := int(lengths.max()))
            last = torch.arange(longest, device=lengths.device) == lengths[:, None] - 1
            return self.heads[role](self.hidden_at(tokens, last))

    def reward(self, tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, " B"]:
        """Return the raw reward of each sequence: the mean over the heads of the reward role."""
        return self.rewards(tokens, mask).mean(dim=1)

    @torch.no_grad()
    def probe(self, role: str) -> Float[Tensor, " V"]:
        """Return the fp32 logits of `role` after a fixed sequence of tokens: its fingerprint.

        Models with the same fingerprint are taken to be the same model. A stage writes the
        fingerprint beside its weights, and the next stage compares.
        """
        with self.use_role(role):
            return (
                self.head(self.hidden(probe_tokens(self.causal_lm))[:, -1]).float().cpu().squeeze(0)
            )


def trainable_names(module: nn.Module) -> list[str]:
    """Return the names of the trainable parameters."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]
