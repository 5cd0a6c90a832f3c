"""One further token of every row, in as few operations as it takes.

A decoder's layers compute a single token in some forty small operations each, most of which cost
more to call than to carry out. Here projections of one input are one product, queries and keys are
normalised and rotated together, and residuals are added by the product that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

from lightning_rlhf.models.packing import PACKED
from lightning_rlhf.rollout.cache import RoomyLayer

ATTENTION = (LlamaAttention, Qwen2Attention, Qwen3Attention, Qwen3_5Attention)


class Step:
    """A trunk's forward pass of one token a row, behind those that its cache holds.

    Its weights are those that the model has while it is made.
    """

    def __init__(self, causal_lm: PreTrainedModel, cache: DynamicCache) -> None:
        trunk = causal_lm.base_model
        self.embed, self.rotary = trunk.embed_tokens, trunk.rotary_emb
        self.layers = [_Layer(*pair) for pair in zip(trunk.layers, cache.layers, strict=True)]
        self.norm = _Norm(trunk.norm)

    def __call__(
        self,
        tokens: Int[Tensor, "B 1"],
        mask: Bool[Tensor, "B S"],
        positions: Int[Tensor, "B 1"],
    ) -> Float[Tensor, "B d"]:
        """What the next token is predicted from. mask: of all S tokens, this one included."""
        hidden = self.embed(tokens.squeeze(1))
        cos, sin = self.rotary(hidden, positions)
        half = sin.shape[-1] // 2
        turn = cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        unseen = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)
        for layer in self.layers:
            hidden = layer(hidden, turn, unseen[:, None, None])
        return self.norm(hidden)


def can_step(causal_lm: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether `Step` computes what the model does: a known decoder of plain fp32 layers."""
    trunk = causal_lm.base_model
    return (
        all(type(layer) in PACKED.values() for layer in getattr(trunk, "layers", [None]))
        and causal_lm.config.hidden_act == "silu"
        and all(p.dtype == torch.float32 for p in trunk.parameters())
        and not torch.is_autocast_enabled(causal_lm.device.type)
        and all(
            type(layer) is RoomyLayer or type(layer) is LinearAttentionLayer
            for layer in cache.layers
        )
        and all(
            type(module) is nn.Linear
            for module in trunk.modules()
            if hasattr(module, "in_features")
        )
    )


class _Layer:
    """A mixer of positions and a SwiGLU, each behind a norm and added to what was there."""

    def __init__(self, layer: Any, cache: Any) -> None:
        self.before, self.after = (
            _Norm(layer.input_layernorm),
            _Norm(layer.post_attention_layernorm),
        )
        linear = isinstance(cache, LinearAttentionLayer)
        self.mix = (
            _DeltaRule(layer.linear_attn, cache) if linear else _Attention(layer.self_attn, cache)
        )
        self.gate_up = _Joint([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.down = layer.mlp.down_proj

    def __call__(
        self, hidden: Float[Tensor, "B d"], turn: tuple[Tensor, Tensor], unseen: Tensor
    ) -> Float[Tensor, "B d"]:
        hidden = self.mix(self.before(hidden), turn, unseen, onto=hidden)
        gate, up = self.gate_up(self.after(hidden)).chunk(2, dim=-1)
        return _added(hidden, F.silu(gate).mul_(up), self.down)


class _Attention:
    """Attention of one query a head, gated where the model gates it."""

    def __init__(self, layer: Any, cache: RoomyLayer) -> None:
        self.cache, self.size, self.scale = cache, layer.head_dim, layer.scaling
        self.gated = isinstance(layer, Qwen3_5Attention)
        self.joint = _Joint([layer.q_proj, layer.k_proj, layer.v_proj])
        self.kv = layer.k_proj.out_features // self.size
        self.q = layer.num_key_value_groups * self.kv
        self.out = layer.o_proj
        self.norms = None
        if hasattr(layer, "q_norm"):
            norms = [_Norm(layer.q_norm)] * self.q + [_Norm(layer.k_norm)] * self.kv
            self.norms = torch.stack([norm.weight for norm in norms])
            self.eps = norms[0].eps

    def __call__(
        self,
        x: Float[Tensor, "B d"],
        turn: tuple[Float[Tensor, "B 1 r"], Float[Tensor, "B 1 r"]],
        unseen: Float[Tensor, "B 1 1 S"],
        onto: Float[Tensor, "B d"],
    ) -> Float[Tensor, "B d"]:
        rows, q, kv = len(x), self.q, self.kv
        heads = self.joint(x).view(rows, -1, self.size)
        gate = None
        if self.gated:  # each query stands beside its gate
            both = heads[:, : 2 * q].view(rows, q, 2, self.size)
            gate = both[:, :, 1].reshape(rows, -1)
            heads = torch.cat([both[:, :, 0], heads[:, 2 * q :]], dim=1)
        turned = heads[:, : q + kv]
        if self.norms is not None:
            turned = F.rms_norm(turned, (self.size,), eps=self.eps).mul_(self.norms)
        turned = _turned(turned, *turn)
        keys, values = self.cache.update(turned[:, q:, None], heads[:, q + kv :, None])
        queries = turned[:, :q].view(rows, kv, -1, self.size)
        seen = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=unseen, scale=self.scale
        ).reshape(rows, -1)
        return _added(onto, seen if gate is None else seen * gate.sigmoid_(), self.out)


class _DeltaRule:
    """The gated delta rule: a state S of each head, of which a key's value is corrected.

        S <- e^g S + k (beta (v - k e^g S)),   o = q S

    Source: Yang et al. 2024, eq. 10, https://arxiv.org/abs/2412.06464
    """

    def __init__(self, layer: Qwen3_5GatedDeltaNet, cache: LinearAttentionLayer) -> None:
        self.cache, self.size = cache, layer.head_k_dim
        self.joint = _Joint([layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a])
        self.kernel = layer.conv1d.weight.squeeze(1).T.contiguous()[:, None]
        self.bias = layer.conv1d.bias
        self.k, self.v = layer.num_k_heads, layer.num_v_heads
        self.widths = [len(self.kernel[0, 0]), layer.value_dim, self.v, self.v]
        self.rate, self.shift = -layer.A_log.float().exp(), layer.dt_bias
        self.norm, self.eps = layer.norm.weight, layer.norm.variance_epsilon
        self.out = layer.out_proj
        scale = self.rate.new_tensor([1 / self.size] * self.k + [self.size**-0.5] * self.k)
        self.unit = scale[:, None]
        """Of rms(x) = 1: keys of length 1, queries of length 1 / sqrt(size)."""

    def __call__(
        self, x: Float[Tensor, "B d"], turn: Any, unseen: Any, onto: Float[Tensor, "B d"]
    ) -> Float[Tensor, "B d"]:
        rows = len(x)
        mixed, z, b, a = self.joint(x).split(self.widths, dim=-1)
        mixed = self._convolved(mixed)
        qk, value = mixed.split(
            [2 * self.k * self.size, mixed.shape[1] - 2 * self.k * self.size], 1
        )
        qk = qk.view(rows, 2 * self.k, self.size)
        qk = F.rms_norm(qk, (self.size,), eps=1e-6 / self.size).mul_(self.unit)
        query, key = (
            part.repeat_interleave(self.v // self.k, dim=1) for part in qk.chunk(2, dim=1)
        )
        decay = (self.rate * F.softplus(a + self.shift)).exp_()
        state = self.cache.recurrent_states[0].mul_(decay[..., None, None])
        value = value.view(rows, self.v, -1)
        known = torch.matmul(key[:, :, None], state).squeeze(2)
        new = (value - known).mul_(b.sigmoid()[..., None])
        state.addcmul_(key[..., None], new[:, :, None])
        said = torch.matmul(query[:, :, None], state).squeeze(2)
        said = F.rms_norm(said, said.shape[-1:], self.norm, self.eps)
        return _added(onto, said.view(rows, -1).mul_(F.silu(z)), self.out)

    def _convolved(self, x: Float[Tensor, "B c"]) -> Float[Tensor, "B c"]:
        """With the tokens before, which the cache keeps, oldest first: one row of memory each."""
        window = self.cache.conv_states[0].permute(2, 0, 1)
        window = torch.cat([window[1:], x[None]])
        self.cache.conv_states[0] = window.permute(1, 2, 0)
        y = (window * self.kernel).sum(0)
        return F.silu(y if self.bias is None else y + self.bias, inplace=True)


class _Joint:
    """Several linear layers of one input as one."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weight = torch.cat(tuple(layer.weight for layer in layers))
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else torch.cat(tuple(biases))

    def __call__(self, x: Float[Tensor, "B i"]) -> Float[Tensor, "B o"]:
        return F.linear(x, self.weight, self.bias)


class _Norm:
    """w x / rms(x)."""

    def __init__(self, norm: Any) -> None:
        centred = isinstance(norm, Qwen3_5RMSNorm)
        self.weight = 1 + norm.weight if centred else norm.weight
        self.eps = norm.eps if centred else norm.variance_epsilon

    def __call__(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def _added(
    hidden: Float[Tensor, "B d"], x: Float[Tensor, "B i"], layer: nn.Linear
) -> Float[Tensor, "B d"]:
    """hidden + layer(x)."""
    hidden = torch.addmm(hidden, x, layer.weight.T)
    return hidden if layer.bias is None else hidden + layer.bias


def _turned(
    x: Float[Tensor, "B H s"], cos: Float[Tensor, "B 1 r"], sin: Float[Tensor, "B 1 r"]
) -> Float[Tensor, "B H s"]:
    """Rotary position embedding of the first r dimensions; the first half of `sin` is negated."""
    r = cos.shape[-1]
    part = x[..., :r]
    turned = (part * cos).addcmul_(part.roll(r // 2, -1), sin)
    return turned if r == x.shape[-1] else torch.cat([turned, x[..., r:]], dim=-1)
