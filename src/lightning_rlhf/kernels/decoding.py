"""One decoding step of a trunk in few operations.

Each layer of a decoder computes a single token in about forty small operations, most of which cost
more to launch than to compute. Here projections of one input are one product, queries and keys are
normalised and rotated together, and residuals are added by the product whose output they join.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from lightning_rlhf.core.errors import first_line
from lightning_rlhf.kernels.attention import signed_sin
from lightning_rlhf.kernels.decode_layers import DecodeLayer, Norm
from lightning_rlhf.kernels.decoder import PackedDecoderLayer, family
from lightning_rlhf.kernels.joint_linear import JointLinear
from lightning_rlhf.kernels.layers import LINEAR, own_class
from lightning_rlhf.kernels.lora import FusedLoRALinear, is_plain_lora
from lightning_rlhf.kernels.patch import rounding, same_logits
from lightning_rlhf.kernels.products import computing_dtype


class DecodeStep:
    """A trunk's forward pass of one token a row, after the tokens in its cache.

    It has the model's weights at the time of construction, in the dtype of the computation: under
    autocast those in fp32 are rounded once, where the model's own layers round them at every token.
    """

    def __init__(self, causal_lm: PreTrainedModel, cache: DynamicCache) -> None:
        trunk = causal_lm.base_model
        self.embed, self.rotary = trunk.embed_tokens, trunk.rotary_emb
        dtype = computing_dtype(self.embed.weight)
        self.layers = [
            DecodeLayer(layer, is_linear=isinstance(of_layer, LinearAttentionLayer), dtype=dtype)
            for layer, of_layer in zip(trunk.layers, cache.layers, strict=True)
        ]
        self.norm = Norm.of(trunk.norm)
        head = causal_lm.get_output_embeddings()
        alike = _is_known(head) and head.weight.dtype == self.embed.weight.dtype
        self.head = JointLinear(head, dtype=dtype) if alike else head
        """Function that returns the logits of hidden states."""
        self.attach(cache)

    def attach(self, cache: DynamicCache, *, in_place: bool = False) -> None:
        """Use another cache; in_place: keep the states of linear attention in the same memory."""
        for layer, of_layer in zip(self.layers, cache.layers, strict=True):
            layer.attach(of_layer, in_place=in_place)

    def __call__(
        self,
        tokens: Int[Tensor, "B 1"],
        mask: Bool[Tensor, "B S"],
        positions: Int[Tensor, "B 1"],
    ) -> Float[Tensor, "B d"]:
        """Return the last hidden states. mask: mask of all S tokens, this one included."""
        with torch.autocast(tokens.device.type, enabled=False):
            hidden = self.embed(tokens.squeeze(1))
            cos, sin = self.rotary(hidden, positions)
            tables = cos, signed_sin(sin)
            bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
            for layer in self.layers:
                hidden = layer(hidden, tables, bias[:, None, None])
            return self.norm(hidden)


def decode_step(causal_lm: PreTrainedModel, cache: DynamicCache) -> DecodeStep | None:
    """Return a step on the cache; None, with a warning, where it would compute something else."""
    if not can_decode(causal_lm, cache):
        return None
    agreed = causal_lm.base_model.__dict__.setdefault("steps_agree", {})
    dtype = computing_dtype(causal_lm)
    if dtype in agreed:  # checked once
        return DecodeStep(causal_lm, cache) if agreed[dtype] else None
    step = _checked(causal_lm, cache)
    agreed[dtype] = step is not None
    return step


def can_decode(causal_lm: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether a `DecodeStep` knows the model's layers: a patched decoder in one dtype."""
    trunk = causal_lm.base_model
    if family(causal_lm) is None or own_class(trunk.embed_tokens) is not nn.Embedding:
        return False
    dtype = causal_lm.get_input_embeddings().weight.dtype
    if dtype not in (torch.float32, computing_dtype(causal_lm)):
        return False
    modules = dict(trunk.named_modules()).items()
    linear = [m for name, m in modules if hasattr(m, "in_features") and ".lora_" not in name]
    return (
        all(isinstance(layer, PackedDecoderLayer) for layer in trunk.layers)
        and not any(isinstance(module, AuxiliaryTrainingWrapper) for _, module in modules)
        and causal_lm.config.hidden_act == "silu"
        and all(_is_known_cache(layer) for layer in cache.layers)
        and all(_is_known(layer) and layer.weight.dtype == dtype for layer in linear)
    )


@torch.no_grad()
def _checked(causal_lm: PreTrainedModel, cache: DynamicCache) -> DecodeStep | None:
    """Return a step on the cache if it agrees with the trunk, on a cache of its own; else warn."""
    trunk = causal_lm.base_model
    tokens = (
        torch.arange(1, 9, device=causal_lm.device)[None] * 7919 % trunk.embed_tokens.num_embeddings
    )
    own, mask = DynamicCache(config=causal_lm.config), torch.ones_like(tokens)
    trunk(input_ids=tokens[:, :-1], past_key_values=own, use_cache=True)
    expected = trunk(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    try:
        step = DecodeStep(causal_lm, own)
        found = step(tokens[:, -1:], mask.bool(), mask[:, :1] * 7)
    except torch.OutOfMemoryError:  # fewer responses at once may fit
        raise
    except Exception as error:  # code written for other layers may raise anything
        fault = f"fails: {first_line(error)}"
    else:
        if same_logits(found, expected, rounding(causal_lm)):
            step.attach(cache)
            return step
        fault = "gives other hidden states"
    warnings.warn(
        f"sampling is slower, by {causal_lm.config.model_type}'s own layers: the fast decoding "
        f"step {fault}",
        stacklevel=2,
    )
    return None


def _is_known_cache(layer: Any) -> bool:
    """Return whether a cache keeps all keys and values, or a state of linear attention."""
    whole = isinstance(layer, DynamicLayer) and not layer.is_sliding
    return whole or type(layer) is LinearAttentionLayer


def _is_known(layer: nn.Module) -> bool:
    """Return whether the layer is linear with nothing added to it but its adapters."""
    if own_class(layer) is not FusedLoRALinear:
        return own_class(layer) in LINEAR
    assert isinstance(layer, FusedLoRALinear)
    return own_class(layer.base_layer) in LINEAR and is_plain_lora(layer)
