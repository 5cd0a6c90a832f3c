"""One further token of every row, in as few operations as it takes.

A decoder's layers compute a single token in some forty small operations each, most of which cost
more to call than to carry out. Here projections of one input are one product, queries and keys are
normalised and rotated together, and residuals are added by the product that makes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

from lightning_rlhf.models.attention import signed, turned
from lightning_rlhf.models.layers import LINEAR, weight_and_eps
from lightning_rlhf.models.lora import QuickLinear, is_plain_sum
from lightning_rlhf.models.packed import PACKED, TRUNKS
from lightning_rlhf.rollout.cache import RoomyLayer
from lightning_rlhf.rollout.product import Product


class Step:
    """A trunk's forward pass of one token a row, behind those that its cache holds.

    Its weights are those that the model has while it is made.
    """

    def __init__(self, causal_lm: PreTrainedModel, cache: DynamicCache) -> None:
        trunk = causal_lm.base_model
        self.embed, self.rotary = trunk.embed_tokens, trunk.rotary_emb
        self.layers = [_Layer(*pair) for pair in zip(trunk.layers, cache.layers, strict=True)]
        self.norm = _Norm.of(trunk.norm)
        head = causal_lm.get_output_embeddings()
        alike = _is_known(head) and head.weight.dtype == self.embed.weight.dtype
        self.head = Product(head) if alike else head
        """Logits of hidden states."""

    def __call__(
        self,
        tokens: Int[Tensor, "B 1"],
        mask: Bool[Tensor, "B S"],
        positions: Int[Tensor, "B 1"],
    ) -> Float[Tensor, "B d"]:
        """What the next token is predicted from. mask: of all S tokens, this one included."""
        with torch.autocast(tokens.device.type, enabled=False):
            hidden = self.embed(tokens.squeeze(1))
            cos, sin = self.rotary(hidden, positions)
            turn = cos, signed(sin)
            unseen = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
            for layer in self.layers:
                hidden = layer(hidden, turn, unseen[:, None, None])
            return self.norm(hidden)


def can_step(causal_lm: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether `Step` computes what the model does: a known decoder in one dtype."""
    trunk, device = causal_lm.base_model, causal_lm.device.type
    if type(trunk) not in TRUNKS or type(trunk.embed_tokens) is not nn.Embedding:
        return False
    dtype = causal_lm.get_input_embeddings().weight.dtype
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype:
        return False
    modules = dict(trunk.named_modules()).items()
    linear = [m for name, m in modules if hasattr(m, "in_features") and ".lora_" not in name]
    return (
        all(type(layer) in PACKED.values() for layer in trunk.layers)
        and not any(isinstance(module, AuxiliaryTrainingWrapper) for _, module in modules)
        and causal_lm.config.hidden_act == "silu"
        and all(type(layer) in (RoomyLayer, LinearAttentionLayer) for layer in cache.layers)
        and all(_is_known(layer) and layer.weight.dtype == dtype for layer in linear)
    )


def _is_known(layer: nn.Module) -> bool:
    """Whether the layer is linear, and nothing but the sum of its adapters is added to it."""
    if type(layer) is not QuickLinear:
        return type(layer) in LINEAR
    return type(layer.base_layer) in LINEAR and is_plain_sum(layer)


class _Layer:
    """A mixer of positions and a SwiGLU, each behind a norm and added to what was there."""

    def __init__(self, layer: Any, cache: Any) -> None:
        self.before = _Norm.of(layer.input_layernorm)
        self.after = _Norm.of(layer.post_attention_layernorm)
        linear = isinstance(cache, LinearAttentionLayer)
        self.mix = (
            _DeltaRule(layer.linear_attn, cache) if linear else _Attention(layer.self_attn, cache)
        )
        self.gate_up = Product(layer.mlp.gate_proj, layer.mlp.up_proj)
        self.down = Product(layer.mlp.down_proj)

    def __call__(
        self, hidden: Float[Tensor, "B d"], turn: tuple[Tensor, Tensor], unseen: Tensor
    ) -> Float[Tensor, "B d"]:
        hidden = self.mix(self.before(hidden), turn, unseen, onto=hidden)
        gate, up = self.gate_up(self.after(hidden)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), onto=hidden)


class _Attention:
    """Attention of one query a head, gated where the model gates it."""

    def __init__(self, layer: Any, cache: RoomyLayer) -> None:
        self.cache, self.size, self.scale = cache, layer.head_dim, layer.scaling
        self.gated = isinstance(layer, Qwen3_5Attention)
        self.joint = Product(layer.q_proj, layer.k_proj, layer.v_proj)
        self.kv = layer.k_proj.out_features // self.size
        self.q = layer.num_key_value_groups * self.kv
        self.out = Product(layer.o_proj)
        self.norm = None
        if hasattr(layer, "q_norm"):
            self.norm = _Norm.of(*[layer.q_norm] * self.q, *[layer.k_norm] * self.kv)

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
        qk = heads[:, : q + kv]
        qk = turned(qk if self.norm is None else self.norm(qk), *turn)
        keys, values = self.cache.update(qk[:, q:, None], heads[:, q + kv :, None])
        queries = qk[:, :q].view(rows, kv, -1, self.size)
        seen = _attended(queries, keys, values, unseen, self.scale).reshape(rows, -1)
        return self.out(seen if gate is None else seen * gate.sigmoid_(), onto=onto)


class _DeltaRule:
    """The gated delta rule: a state S of each head, of which a key's value is corrected.

        S <- e^g S + k (beta (v - k e^g S)),   o = q S

    Source: Yang et al. 2024, eq. 10, https://arxiv.org/abs/2412.06464
    """

    def __init__(self, layer: Qwen3_5GatedDeltaNet, cache: LinearAttentionLayer) -> None:
        self.cache, self.size = cache, layer.head_k_dim
        self.joint = Product(layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
        self.kernel = layer.conv1d.weight.squeeze(1).T.contiguous()[:, None]
        self.bias = layer.conv1d.bias
        self.k, self.v = layer.num_k_heads, layer.num_v_heads
        self.widths = [len(self.kernel[0, 0]), layer.value_dim, self.v, self.v]
        self.rate, self.shift = -layer.A_log.float().exp(), layer.dt_bias
        self.norm = _Norm(layer.norm.weight.float(), layer.norm.variance_epsilon)
        self.out = Product(layer.out_proj)
        scale = self.rate.new_tensor([1 / self.size] * self.k + [self.size**-0.5] * self.k)
        self.unit = _Norm(scale[:, None].expand(-1, self.size), 1e-6 / self.size)
        """Keys of length 1, queries of length 1 / sqrt(size)."""

    def __call__(
        self, x: Float[Tensor, "B d"], turn: Any, unseen: Any, onto: Float[Tensor, "B d"]
    ) -> Float[Tensor, "B d"]:
        """As attention; of positions and of what is seen its state says all."""
        rows = len(x)
        mixed, z, b, a = self.joint(x).split(self.widths, dim=-1)
        mixed = self._convolved(mixed)
        qk, value = mixed.split(
            [2 * self.k * self.size, mixed.shape[1] - 2 * self.k * self.size], 1
        )
        qk = self.unit(qk.view(rows, 2 * self.k, self.size))
        query, key = (
            part.repeat_interleave(self.v // self.k, dim=1) for part in qk.chunk(2, dim=1)
        )
        decay = (self.rate * F.softplus(a.float() + self.shift)).exp_()
        state = self.cache.recurrent_states[0].mul_(decay[..., None, None])
        value = value.view(rows, self.v, -1)
        known = torch.matmul(key[:, :, None], state).squeeze(2)
        new = (value - known).mul_(b.float().sigmoid()[..., None])
        state.addcmul_(key[..., None], new[:, :, None])
        said = torch.matmul(query[:, :, None], state).squeeze(2)
        said = self.norm(said)
        return self.out(said.view(rows, -1).mul_(F.silu(z.float())).to(x.dtype), onto=onto)

    def _convolved(self, x: Float[Tensor, "B c"]) -> Float[Tensor, "B c"]:
        """With the tokens before, of which the cache keeps the latest, oldest first; in fp32."""
        window = self.cache.conv_states[0].permute(2, 0, 1)
        window = torch.cat([window[1:], x[None]])
        self.cache.conv_states[0] = window.permute(1, 2, 0)
        y = (window * self.kernel).sum(0, dtype=torch.float32)
        return F.silu(y if self.bias is None else y + self.bias, inplace=True)


class _Norm:
    """w x / sqrt(mean of x^2 + eps)."""

    def __init__(self, weight: Float[Tensor, "*H d"], eps: float) -> None:
        size = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self.scaled = weight.float() * math.sqrt(size)
        self.least = self.scaled.new_tensor(math.sqrt(size * eps))

    @classmethod
    def of(cls, *norms: Any) -> _Norm:
        """The model's own, one or one for each head."""
        weights, eps = zip(*map(weight_and_eps, norms), strict=True)
        weight = weights[0] if len(norms) == 1 else torch.stack(weights)
        centred = isinstance(norms[0], Qwen3_5RMSNorm)
        return cls(weight if centred else weight.to(norms[0].weight.dtype), eps[0])

    def __call__(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        """On a CPU as sqrt(d) w x / hypot(|x|, sqrt(d eps)): four operations, not eight."""
        if x.device.type != "cpu":
            wide = x.to(self.weight.dtype)
            return F.rms_norm(wide, x.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide / length.hypot_(self.least)).mul_(self.scaled).to(x.dtype)


def _attended(
    query: Float[Tensor, "B K G s"],
    key: Float[Tensor, "B K S s"],
    value: Float[Tensor, "B K S s"],
    unseen: Float[Tensor, "B 1 1 S"],
    scale: float,
) -> Float[Tensor, "B K G s"]:
    """Attention; on a CPU by two products in fp32, twice as fast in 16 bits for one query."""
    if query.device.type != "cpu":
        unseen = unseen.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=unseen, scale=scale)
    weights = torch.matmul(query.float(), key.float().transpose(2, 3))
    weights = torch.add(unseen, weights, alpha=scale).softmax(-1)
    return torch.matmul(weights, value.float()).to(query.dtype)
