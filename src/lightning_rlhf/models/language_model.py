"""A language model on its device: its layers, the copies of weights they use, and its logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from inspect import signature
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.core.config import KernelChoice
from lightning_rlhf.core.masking import picker
from lightning_rlhf.kernels.decoder import family, rotates_by_length
from lightning_rlhf.kernels.lora import can_be_packed
from lightning_rlhf.kernels.packing import Packing, columns_to_add
from lightning_rlhf.kernels.patch import use_kernels
from lightning_rlhf.kernels.products import ROWS, compiles_by_shape, computing_dtype


def copied_bytes(causal_lm: PreTrainedModel) -> int:
    """Return the bytes of the copies of weights from which model.kernels=fast samples.

    They are all linear layers as a step of decoding reads them (`JointLinear`), in the dtype of the
    computation; the output layer, if it is packed or of another dtype; and in fp32 the layers that
    have adapters once more, with the adapters added.
    """
    dtype = computing_dtype(causal_lm)
    layers = [layer.weight for _, layer, _, _ in linear_layers(causal_lm.base_model)]
    head = causal_lm.get_output_embeddings().weight
    copied = 0
    if all(weight.dtype in (dtype, torch.float32) for weight in layers):
        copied = sum(weight.numel() for weight in layers) * dtype.itemsize
        if head.dtype != dtype or can_be_packed(head):
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


MASKED_BY_KIND = ("Qwen2", "Qwen3", "Qwen3_5")
"""Families whose trunks take a dictionary: kind of layer -> mask of its attention."""
UNWINDOWED = {"full_attention", "linear_attention"}
"""Kinds of layers that need no mask where no position is padding."""


class LanguageModel(nn.Module):
    """A causal language model, with adapters or without, computed by fast or plain layers."""

    def __init__(self, causal_lm: PreTrainedModel, kernels: KernelChoice = "auto") -> None:
        """kernels: which layers compute; with auto the place of the weights decides."""
        super().__init__()
        self.model: PreTrainedModel | PeftModel = causal_lm
        self._kernel_choice: KernelChoice = kernels
        self._set_kernels()

    @property
    def causal_lm(self) -> PreTrainedModel:
        """Return the language model without the adapter wrapper."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def hidden_size(self) -> int:
        """Return the size of a hidden state."""
        return int(self.causal_lm.get_output_embeddings().in_features)

    @property
    def vocab_size(self) -> int:
        """Return the number of logits of the output layer."""
        return int(self.causal_lm.get_output_embeddings().out_features)

    @property
    def caches(self) -> bool:
        """Return True if the trunk accepts transformers' key-value cache for incremental decoding.

        Mamba and RWKV have a state of another form, and ignore such a cache.
        """
        return "past_key_values" in signature(self.causal_lm.base_model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    @property
    def row_multiple(self) -> int:
        """Return the number to a multiple of which rows of products are best rounded up.

        It is 1 but where a library compiles for each number of rows and keeps what it compiled.
        """
        return ROWS if compiles_by_shape(self.causal_lm.get_input_embeddings().weight) else 1

    def _set_kernels(self) -> None:
        self.kernels = use_kernels(self._kernel_choice, self.causal_lm)
        """Layers that compute: fast or plain."""
        self._kernel_device = self.device.type

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weights; torch has no public hook for a module inside another."""
        super()._apply(fn, recurse)
        if self.device.type != self._kernel_device:
            self._set_kernels()
        return self

    @property
    def copies_weights(self) -> bool:
        """Return True if the fast layers sample from copies of the trunk's weights."""
        return self.kernels.kind == "fast"

    def hidden(self, tokens: Int[Tensor, "B S"]) -> Float[Tensor, "B S d"]:
        """Return the last hidden states of the active role, for rows that start with a real token.

        The model is causal, so padding after the last token needs no mask, and attention without
        a mask is faster. `from_first_real` converts left-padded rows to this form.
        """
        return self.causal_lm.base_model(
            input_ids=tokens, attention_mask=self._no_masks(), use_cache=False
        ).last_hidden_state

    def hidden_at(
        self, tokens: Int[Tensor, "B S"], wanted: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "M d"]:
        """Return the hidden states at the positions where `wanted` is True, in row-major order.

        Equivalent to `hidden(tokens)[wanted]`, without most of the computation that only the other
        positions need. Where `wanted` is on the CPU, the device of the tokens is not waited for.
        """
        if self.kernels.kind == "plain":
            return picker(wanted)(self.hidden(tokens))
        trunk = self.causal_lm.base_model
        few_shapes = self.row_multiple > 1
        if not rotates_by_length(self.causal_lm):
            more = columns_to_add(tokens.shape[1], few_shapes=few_shapes)
            tokens, wanted = (F.pad(x, (0, more)) for x in (tokens, wanted))
        packing = Packing.of(wanted, few_shapes=few_shapes).to(tokens.device)
        hidden = trunk(
            input_ids=tokens, attention_mask=self._no_masks(), use_cache=False, packing=packing
        ).last_hidden_state
        return hidden[: packing.count]

    def _no_masks(self) -> dict[str, None] | None:
        """Return the masks of causal attention without padding, as the trunk takes them.

        On a device other than the CPU, None has transformers read the positions from it, to find
        out whether several sequences share a row. Some trunks take a mask for each kind of layer.
        """
        config = self.causal_lm.config
        kinds = set(getattr(config, "layer_types", None) or [])
        takes_masks = family(self.causal_lm) in MASKED_BY_KIND and kinds <= UNWINDOWED
        if self.device.type == "cpu" or not (takes_masks and kinds):
            return None
        return dict.fromkeys(kinds)

    @property
    def head_is_trained(self) -> bool:
        """Return True if the output layer has trainable parameters."""
        return any(p.requires_grad for p in self.causal_lm.get_output_embeddings().parameters())

    def head(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n V"]:
        """Return the logits of hidden states."""
        return self.causal_lm.get_output_embeddings()(hidden)
