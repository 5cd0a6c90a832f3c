"""Several roles on one base model, computed by fast or plain layers.

Every role is the base model with a stack of active adapters:

    reference   SFT                      frozen; the base itself if SFT was merged into it
    policy      SFT + policy adapter     trained by PPO
    reward      SFT + reward adapter     frozen in PPO, with the reward head
    critic      SFT + critic adapter     trained by PPO, where ppo.critic=adapter

One copy of the base weights serves all roles, and the reference is the SFT model by construction,
whether the SFT adapter was merged or is a separate adapter. A policy of which all weights are
trained has a frozen base beside it, which holds the reference, reward and critic adapters.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear as LoRALinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.core.config import KernelChoice
from lightning_rlhf.core.errors import CheckpointError, ConfigError, first_line
from lightning_rlhf.core.masking import from_first_real, picker
from lightning_rlhf.kernels import decoder, layers, lora, patch
from lightning_rlhf.models.checkpoint import check_weights, naming
from lightning_rlhf.models.config import BASE, REFERENCE, REWARD, SFT, LoRASettings
from lightning_rlhf.models.loading import layers_of
from lightning_rlhf.parallel.sharding import ShardedModel

MASKED_BY_KIND = ("Qwen2", "Qwen3", "Qwen3_5")
"""Families whose trunks take a dictionary: kind of layer -> mask of its attention."""
UNWINDOWED = {"full_attention", "linear_attention"}
"""Kinds of layers that need no mask where no position is padding."""


def copied_bytes(causal_lm: PreTrainedModel) -> int:
    """Return the bytes of the copies of weights from which model.kernels=fast samples.

    They are all linear layers, in the dtype of the computation (`JointLinear`); the output layer,
    if it is packed or of another dtype; in fp32 the adapted layers once more, with adapters added.
    """
    dtype = layers.computing_dtype(causal_lm)
    weights = [layer.weight for _, layer, _, _ in linear_layers(causal_lm.base_model)]
    head = causal_lm.get_output_embeddings().weight
    copied = 0
    if all(weight.dtype in (dtype, torch.float32) for weight in weights):
        copied = sum(weight.numel() for weight in weights) * dtype.itemsize
        if head.dtype != dtype or lora.can_be_packed(head):
            copied += head.numel() * dtype.itemsize
    if dtype != torch.float32:
        return copied
    adapted = (layer for layer in causal_lm.modules() if isinstance(layer, LoRALinear))
    return copied + sum(layer.base_layer.weight.nbytes for layer in adapted)


def linear_layers(
    trunk: nn.Module, adapters: Collection[str] = ()
) -> Iterator[tuple[str, Any, int, int]]:
    """Yield name, layer, inputs and outputs of each linear layer, and of those of the adapters."""
    for name, layer in trunk.named_modules():
        if "lora_" in name and name.rpartition(".")[2] not in adapters:
            continue
        if isinstance(layer, Conv1D):  # GPT-2's
            yield name, layer, layer.nx, layer.nf
        elif isinstance(layer, nn.Linear):
            yield name, layer, layer.in_features, layer.out_features


def layer_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the layers of all language models in a module, adapters included;
    embeddings, output layers and scalar heads are outside of the layers."""
    layers = (part for part in module.modules() if isinstance(part, GradientCheckpointingLayer))
    return {p for layer in layers for p in layer.parameters() if p.ndim == 2}


def probe_tokens(causal_lm: PreTrainedModel) -> Int[Tensor, "1 S"]:
    """Return the fixed sequence of tokens that models are compared on, on the model's device."""
    vocab_size = int(causal_lm.get_output_embeddings().out_features)
    return (torch.arange(1, 17) * 7919 % vocab_size)[None].to(causal_lm.device)


@torch.no_grad()
def check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Raise CheckpointError unless the model's logits are those of its output layer.

    Models that cap or scale them are not supported. On torch's device `meta` there are none.
    """
    if causal_lm.device.type == "meta":
        return
    tokens = probe_tokens(causal_lm)
    hidden = causal_lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    ours = causal_lm.get_output_embeddings()(hidden).float()
    theirs = causal_lm(input_ids=tokens).logits.float()
    if not patch.same_logits(ours, theirs, patch.rounding(causal_lm)):
        raise CheckpointError(
            f"{causal_lm.config.model_type} changes its logits after the output layer "
            "(soft-capping or scaling), which is not supported"
        )


class Roles(nn.Module):
    """A causal language model with its adapters and scalar heads, on its device.

    One role is active at a time: inside `use_role` the one given there, else `set_role`'s last.
    """

    def __init__(self, causal_lm: PreTrainedModel, kernels: KernelChoice = "auto") -> None:
        """kernels: which layers compute; with auto the place of the weights decides."""
        super().__init__()
        self.model: PreTrainedModel | PeftModel = causal_lm
        head = causal_lm.get_output_embeddings()
        self.hidden_size = int(head.in_features)
        """Size of a hidden state."""
        self.vocab_size = int(head.out_features)
        """Number of logits of the output layer."""
        self.cache_argument = decoder.cache_argument(causal_lm.base_model)
        """Argument of the trunk that takes a cache of keys and values; None for Mamba and RWKV."""
        self._kernel_choice: KernelChoice = kernels
        self._set_kernels()
        self.heads = nn.ModuleDict()
        self._stacks: dict[str, tuple[str, ...]] = {BASE: (), REFERENCE: ()}
        self.role = BASE
        """Role that is active; `set_role` and `use_role` change it."""
        self.frozen: Roles | None = None
        """Frozen base with the reference, for a policy whose weights are all trained; else None."""
        self._merged = False
        self.sharded: ShardedModel | None = None
        """Base whose weights are sharded; None where each process has them all."""
        if getattr(causal_lm, "recomputes", False):
            self.recompute_layers()
        check_output_layer(causal_lm)

    @property
    def reference(self) -> "Roles":
        """Return the models of the role reference and of adapters on it: these, or `frozen`."""
        return self if self.frozen is None else self.frozen

    @property
    def causal_lm(self) -> PreTrainedModel:
        """Return the language model without the adapter wrapper."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    @property
    def row_multiple(self) -> int:
        """Return the number to a multiple of which rows of products are best rounded up; it is 1
        unless a library compiles for each number of rows."""
        weight = self.causal_lm.get_input_embeddings().weight
        return layers.ROWS if layers.compiles_by_shape(weight) else 1

    def _set_kernels(self) -> None:
        self.kernels = patch.use_kernels(self._kernel_choice, self.causal_lm)
        """Layers that compute: fast or plain."""
        self._kernel_device = self.device.type

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weights; torch has no public hook for a module inside another."""
        super()._apply(fn, recurse)
        if self.device.type != self._kernel_device:
            self._set_kernels()
        return self

    def hidden(self, tokens: Int[Tensor, "B S"], **options: Any) -> Float[Tensor, "B S d"]:
        """Return the last hidden states of the active role, for rows that start with a real token.

        Padding behind needs no mask in a causal model. `from_first_real` converts left-padded rows.
        options: further arguments of the trunk.
        """
        model = self.causal_lm
        kinds = set(getattr(model.config, "layer_types", None) or [])
        takes_masks = kinds and kinds <= UNWINDOWED and decoder.family(model) in MASKED_BY_KIND
        if takes_masks and self.device.type != "cpu":
            # Without them, transformers reads the positions from the device, to find out whether
            # several sequences share a row.
            options["attention_mask"] = dict.fromkeys(kinds)
        return model.base_model(input_ids=tokens, use_cache=False, **options).last_hidden_state

    def hidden_at(
        self, tokens: Int[Tensor, "B S"], wanted: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "M d"]:
        """Return `hidden(tokens)[wanted]`, without most of what only other positions need.

        Where `wanted` is on the CPU, the device of the tokens is not waited for.
        """
        if self.kernels.kind == "plain":
            return picker(wanted)(self.hidden(tokens))
        trunk = self.causal_lm.base_model
        few_shapes = self.row_multiple > 1
        # Some rotations depend on the length of the longest row, padding included.
        rope, added = trunk.rotary_emb.rope_type, -tokens.shape[1] % decoder.COLUMNS
        is_worth = few_shapes or added <= decoder.MOST_ADDED * tokens.shape[1]
        if is_worth and rope != "longrope" and "dynamic" not in rope:
            tokens, wanted = F.pad(tokens, (0, added)), F.pad(wanted, (0, added))
        packing = decoder.Packing.of(wanted, few_shapes=few_shapes).to(tokens.device)
        return self.hidden(tokens, packing=packing)[: packing.count]

    @property
    def head_is_trained(self) -> bool:
        """Return True if the output layer has trainable parameters."""
        return any(p.requires_grad for p in self.causal_lm.get_output_embeddings().parameters())

    def head(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n V"]:
        """Return the logits of hidden states."""
        return self.causal_lm.get_output_embeddings()(hidden)

    def recompute_layers(self) -> None:
        """Let the layers keep their inputs alone, and recompute the rest for the gradient.

        Each is recomputed in the role that it was computed in. transformers' own way is for models
        in training mode, which have dropout. Raises ConfigError where there are no such layers.
        """

        def recomputed(layer: GradientCheckpointingLayer, *args: Any, **kwargs: Any) -> Any:
            forward, role = partial(type(layer).forward, layer), self.role
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kwargs |= {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
            kwargs["context_fn"] = lambda: (nullcontext(), self.use_role(role))
            return checkpoint(forward, *args, **kwargs)

        for layer in layers_of(self.causal_lm):
            layer.forward = partial(recomputed, layer)

    @torch.no_grad()
    def shard(self, processes: DeviceMesh) -> None:
        """Shard the base over the processes, unless it is; adapters and heads stay whole.

        Raises ConfigError where the model has no layers to gather one by one.
        """
        if self.sharded is not None:
            return
        patch.unpatch(self.causal_lm)
        called = list[nn.Module]()
        hook = register_module_forward_pre_hook(lambda module, _: called.append(module))
        try:
            self.hidden(probe_tokens(self.causal_lm))
        finally:
            hook.remove()
        order = [m for m in called if isinstance(m, GradientCheckpointingLayer)]
        if not order:
            raise ConfigError(
                f"trainer.strategy is 'fsdp', but {self.causal_lm.config.model_type} has no layers "
                "that can be gathered one by one; allowed: ddp"
            )
        self.sharded = ShardedModel(self.causal_lm, order, processes)
        self._set_kernels()

    def whole(self) -> AbstractContextManager[None]:
        """Hold all weights of a sharded base inside the block, where no other role is activated."""
        return nullcontext() if self.sharded is None else self.sharded.whole()

    @contextmanager
    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Yield the state of the language model, with whole weights also where it is sharded."""
        state = self.causal_lm.state_dict()  # which would shard them again within the block
        with self.whole():
            own = dict(self.causal_lm.named_parameters(remove_duplicate=False))
            yield {name: own.get(name, x).detach() for name, x in state.items()}

    def add_adapter(self, role: str, settings: LoRASettings, seed: int = 0) -> None:
        """Add a trainable LoRA adapter on top of the reference; before training it has no effect.

        Its initial weights depend on (seed, role) alone. Raises CheckpointError where PEFT finds no
        module to adapt.
        """
        targets = settings.target_modules
        modules, alpha = targets if isinstance(targets, str) else list(targets), settings.alpha
        config = LoraConfig(  # without dropout
            target_modules=modules, r=settings.r, lora_alpha=alpha, task_type="CAUSAL_LM"
        )
        start = np.random.SeedSequence((seed, *role.encode())).generate_state(1)
        try:
            with torch.random.fork_rng(devices=[]):  # PEFT draws the weights on the CPU
                torch.manual_seed(int(start[0]))
                if isinstance(self.model, PeftModel):
                    self.model.add_adapter(role, config)
                else:
                    self.model = PeftModel(self.model, config, adapter_name=role)
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            message = f"model.lora.target_modules={targets}: {first_line(error)}"
            raise CheckpointError(message) from error
        self._stack(role, trainable=True)

    def load_adapter(self, role: str, folder: Path, *, trainable: bool) -> None:
        """Add the adapter of a `final/` folder on top of the reference. Raises CheckpointError."""
        check_weights(folder)
        with naming(str(folder), role), warnings.catch_warnings():
            warnings.filterwarnings("error", ".*missing adapter keys.*")
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(str(folder), adapter_name=role)
            else:
                self.model = PeftModel.from_pretrained(self.model, str(folder), adapter_name=role)
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
            patch.patch_layers(self.model)
        self._stacks[role] = (*self._stacks[REFERENCE], role)
        self._layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        of_adapters = {n: p for n, p in self.model.named_parameters() if "lora_" in n}
        for name, parameter in of_adapters.items():
            if f".{role}." in name:
                parameter.requires_grad_(trainable)
        self._trainable = [p for p in of_adapters.values() if p.requires_grad]
        self.model.eval()
        self.set_role(role)

    def adapters(self, role: str) -> tuple[str, ...]:
        """Return the names of the adapters that are active in `role`, the lowest first."""
        return self._stacks[role]

    @contextmanager
    def stacked(self, role: str) -> Iterator[str]:
        """Yield the name of an adapter that does what all adapters of `role` do.

        Of several, it is a temporary one that concatenates them; else the single one.
        """
        before, names = self.role, [*self.adapters(role)]
        if len(names) == 1:
            yield names[0]
            return
        model: Any = self.model
        weights = [1.0] * len(names)
        model.base_model.add_weighted_adapter(names, weights, "export", combination_type="cat")
        try:
            yield "export"
        finally:
            model.delete_adapter("export")
            self.set_role(before)

    def trained_by(self, role: str) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters of the role's adapter; without one, of the model."""
        marker = f".{role}." if role in self._stacks[role] else ""  # which is in every name
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and marker in name:
                yield parameter

    def set_role(self, role: str) -> None:
        """Activate the adapters of `role`; trainable parameters stay trainable.

        Raises RuntimeError inside `merged`, and for the reference where `frozen` has it.
        """
        if role == REFERENCE and self.frozen is not None:
            raise RuntimeError("these weights are trained: the reference is in roles.reference")
        if self._merged:
            raise RuntimeError(f"{role} cannot be activated while {self.role} is merged")
        self.role = role
        if not isinstance(self.model, PeftModel):
            return
        for layer in self._layers:
            if isinstance(layer, lora.FusedLoRALinear):
                layer._active_adapter = list(self._stacks[role])
            else:  # PEFT's own freezes all adapters with inference_mode
                layer.set_adapter(list(self._stacks[role]), inference_mode=True)
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

        No other role can be activated inside. With plain kernels the adapters stay where they are;
        sharded weights are whole inside.
        """
        before, self._merged = self._merged, True
        try:
            is_fast = self.kernels.kind == "fast"
            with decoder.merged_adapters(self.model) if is_fast else self.whole():
                yield
        finally:
            self._merged = before

    def rewards(
        self,
        tokens: Int[Tensor, "B S"],
        mask: Bool[Tensor, "B S"],
        role: str = REWARD,
        wanted: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "N H"]:
        """Return the output of each of the H heads of a reward role at some tokens, row by row.

        Where `mask` is on the CPU, the device of the tokens is not waited for.
        wanted: mask of the real tokens at which it is read; None is the last of each row.
        """
        with self.use_role(role):
            if wanted is None:
                wanted = mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
            moved, real = from_first_real(tokens, mask)
            return self.heads[role](self.hidden_at(moved, from_first_real(wanted, mask)[0] & real))

    def reward(self, tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, " B"]:
        """Return the raw reward of each sequence: the mean over the heads of the reward role."""
        return self.rewards(tokens, mask).mean(dim=1)

    @torch.no_grad()
    def probe(self, role: str) -> Float[Tensor, " V"]:
        """Return the fp32 logits of `role` after a fixed sequence of tokens: its fingerprint.

        A stage writes it beside its weights, and the next stage compares.
        """
        with self.use_role(role):
            last = self.hidden(probe_tokens(self.causal_lm))[:, -1]
            return self.head(last).float().cpu().squeeze(0)
