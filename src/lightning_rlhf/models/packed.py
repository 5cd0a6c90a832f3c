"""Decoder layers that compute only what the wanted hidden states depend on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
)
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2Model,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3Model,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5TextModel,
)

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.models.attention import WIDE_SDPA, turned, wide_sdpa
from lightning_rlhf.models.compiled import Attention, SwiGLU, decoder_layer, feed_forward
from lightning_rlhf.models.packing import Packing, taken


class _Packed(nn.Module):
    """A decoder layer: positions look at each other in padded rows; all else is of real ones alone.

    The last layer computes the wanted ones only, but for keys and values. `recomputes`: nothing is
    kept for the gradient but what goes in, and the layer is computed once more. `compiles`: where
    gradients are enabled it is compiled, linear attention apart.
    """

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    is_last = False
    recomputes = False
    compiles = False

    def forward(
        self, hidden_states: Tensor, *, packing: Packing | None = None, **kwargs: Any
    ) -> Tensor:
        """[M, d] of the last layer, else [N, d], where a packing is given."""
        if packing is None:
            return super().forward(hidden_states, **kwargs)  # type: ignore[misc, no-any-return]
        if not (self.recomputes and torch.is_grad_enabled()):
            return self._compute(hidden_states, packing, **kwargs)
        return checkpoint(
            self._compute,
            hidden_states,
            packing,
            use_reentrant=False,
            preserve_rng_state=False,  # there is no dropout
            context_fn=lambda: (nullcontext(), packing.again()),
            **kwargs,
        )

    def _compute(self, hidden_states: Tensor, packing: Packing, **kwargs: Any) -> Tensor:
        if hidden_states.ndim == 3:  # the embeddings
            hidden_states = packing.packed(hidden_states.flatten(0, 1))
        swiglu = attention = None
        if self.compiles and torch.is_grad_enabled():
            swiglu = SwiGLU.of(self.post_attention_layernorm, self.mlp, hidden_states)
            mixer = getattr(self, "self_attn", None)
            if kwargs["attention_mask"] is None and _is_plain(mixer):
                attention = Attention.of(self.input_layernorm, mixer, hidden_states)
        if swiglu and attention:
            turns = [
                packing.turns(*kwargs["position_embeddings"], last=last)
                for last in (False, self.is_last)
            ]
            return decoder_layer(
                hidden_states, attention, swiglu, packing, turns, is_last=self.is_last
            )
        mixed = self._mix(self.input_layernorm(hidden_states), packing, **kwargs)
        if self.is_last:
            hidden_states = taken(hidden_states, packing.wanted_real)
        hidden_states = hidden_states + mixed
        if swiglu:
            return feed_forward(hidden_states, swiglu)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def _mix(
        self,
        x: Float[Tensor, "N d"],
        packing: Packing,
        *,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Float[Tensor, "M d"]:
        if isinstance(mixer := getattr(self, "linear_attn", None), nn.Module):
            mixed = mixer(packing.padded(x), attention_mask=attention_mask)
        else:
            mixer = self.get_submodule("self_attn")
            if attention_mask is None and _is_plain(mixer):
                return _attend(mixer, x, packing, position_embeddings, is_last=self.is_last)
            mixed, _ = mixer(
                packing.padded(x),
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        return packing.packed(mixed.flatten(0, 1), last=self.is_last)


def _is_plain(layer: Any) -> bool:
    """Whether `_attend` computes what the layer does."""
    return (
        type(layer) in ATTENTION
        and layer.config._attn_implementation == WIDE_SDPA
        and not (layer.training and layer.attention_dropout)
    )


def _attend(
    layer: Any,
    x: Float[Tensor, "N d"],
    packing: Packing,
    position_embeddings: tuple[Float[Tensor, "#B S r"], Float[Tensor, "#B S r"]],
    *,
    is_last: bool,
) -> Float[Tensor, "M d"]:
    """Causal attention, of which padded rows take part in the very middle alone."""
    size, rows, columns = layer.head_dim, packing.rows, packing.columns
    asking = taken(x, packing.wanted_real) if is_last else x
    query, key, value = layer.q_proj(asking), layer.k_proj(x), layer.v_proj(x)
    gate = None
    if isinstance(layer, Qwen3_5Attention):  # each query stands beside its gate
        query, gate = query.unflatten(1, (-1, 2 * size)).chunk(2, dim=-1)
    query, key = (heads.flatten(1).unflatten(1, (-1, size)) for heads in (query, key))
    norms = getattr(layer, "q_norm", None), getattr(layer, "k_norm", None)
    query = turned(query, *packing.turns(*position_embeddings, last=is_last), norms[0])
    key = turned(key, *packing.turns(*position_embeddings), norms[1])
    query = packing.padded(query.flatten(1), last=is_last)
    key, value = packing.padded(key.flatten(1)), packing.padded(value)
    query, key, value = (
        heads.view(rows, columns, -1, size).transpose(1, 2) for heads in (query, key, value)
    )
    mixed, _ = wide_sdpa(layer, query, key, value, None, scaling=layer.scaling)
    mixed = packing.packed(mixed.reshape(rows * columns, -1), last=is_last)
    return layer.o_proj(mixed if gate is None else mixed * gate.flatten(1).sigmoid())


ATTENTION = (LlamaAttention, Qwen2Attention, Qwen3Attention, Qwen3_5Attention)
"""What is projections, norms of queries and keys, rotations, and a gate in the last."""
PACKED: dict[type[nn.Module], type[nn.Module]] = {
    layer: type(f"Packed{layer.__name__}", (_Packed, layer), {})
    for layer in (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer, Qwen3_5DecoderLayer)
}
"""The library's class -> ours, which is the same where no packing is given."""
TRUNKS = (LlamaModel, Qwen2Model, Qwen3Model, Qwen3_5TextModel)
"""What calls these layers one after another, does nothing else and hands a packing on to them."""


def pack(model: PreTrainedModel) -> bool:
    """Let the model's decoder layers take a `Packing`; whether all of them can.

    A class that is derived from one of these may compute something else.
    """
    trunk = model.base_model
    if type(trunk) not in TRUNKS:
        return False
    for layer in trunk.layers:
        layer.__class__ = PACKED.get(type(layer), type(layer))
        layer.is_last = layer is trunk.layers[-1]
    return all(isinstance(layer, _Packed) for layer in trunk.layers)


def rotates_by_length(model: PreTrainedModel) -> bool:
    """Whether how far positions are rotated depends on the longest row, padding included."""
    rope = model.base_model.rotary_emb.rope_type
    return "dynamic" in rope or rope == "longrope"


def recompute(model: PreTrainedModel) -> None:
    """Gradient checkpointing: the model's layers keep nothing for the gradient but what goes in.

    Raises ConfigError where the architecture has no layers that can.
    """
    for layer in _layers_for("model.gradient_checkpointing", model):
        layer.recomputes = True


def compile_layers(model: PreTrainedModel) -> None:
    """Let the model's layers be compiled, where gradients are enabled.

    Raises ConfigError where the architecture has no layers that can.
    """
    for layer in _layers_for("model.compile", model):
        layer.compiles = True


def _layers_for(key: str, model: PreTrainedModel) -> Any:
    if not pack(model):
        allowed = ", ".join(sorted(layer.__name__.removesuffix("DecoderLayer") for layer in PACKED))
        raise ConfigError(
            f"{key}=true, but {model.config.model_type} has layers of another kind; allowed: "
            f"false, or a model of {allowed}"
        )
    return model.base_model.layers
