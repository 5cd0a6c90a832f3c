"""One decoding step of a trunk in few operations.

Each layer of a decoder computes a single token in about forty small operations, most of which cost
more to launch than to compute. Here projections of one input are one product, queries and keys are
normalised and rotated together, and residuals are added by the product whose output they join.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from lightning_rlhf.core.errors import first_line
from lightning_rlhf.kernels import decoder, layers, lora, patch


class DecodeLayer:
    """Attention or the delta rule, then a SwiGLU, each with its norm and residual."""

    def __init__(self, layer: Any, *, is_linear: bool, dtype: torch.dtype) -> None:
        """Make the layer; is_linear: with linear attention; dtype: of its matrix products."""
        self.before = Norm.of(layer.input_layernorm)
        self.after = Norm.of(layer.post_attention_layernorm)
        mixer = layer.linear_attn if is_linear else layer.self_attn
        self.mix = (_DeltaRule if is_linear else _Attention)(mixer, dtype)
        self.gate_up = lora.JointLinear(layer.mlp.gate_proj, layer.mlp.up_proj, dtype=dtype)
        self.down = lora.JointLinear(layer.mlp.down_proj, dtype=dtype)

    def __call__(
        self, hidden: Float[Tensor, "B d"], tables: tuple[Tensor, Tensor], bias: Tensor
    ) -> Float[Tensor, "B d"]:
        hidden = self.mix(self.before(hidden), tables, bias, onto=hidden)
        gate, up = self.gate_up(self.after(hidden)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), onto=hidden)


class _Attention:
    """Attention of one query a head, gated where the model gates it."""

    cache: DynamicLayer

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.size, self.scale = layer.head_dim, layer.scaling
        self.gated = layers.own_class(layer).__name__ == layers.GATED
        self.joint = lora.JointLinear(layer.q_proj, layer.k_proj, layer.v_proj, dtype=dtype)
        self.kv = layer.k_proj.out_features // self.size
        self.q = layer.num_key_value_groups * self.kv
        self.out = lora.JointLinear(layer.o_proj, dtype=dtype)
        self.norm = None
        if hasattr(layer, "q_norm"):
            self.norm = Norm.of(*[layer.q_norm] * self.q, *[layer.k_norm] * self.kv)

    def __call__(
        self,
        x: Float[Tensor, "B d"],
        tables: tuple[Float[Tensor, "B 1 r"], Float[Tensor, "B 1 r"]],
        bias: Float[Tensor, "B 1 1 S"],
        onto: Float[Tensor, "B d"],
    ) -> Float[Tensor, "B d"]:
        rows, q, kv = len(x), self.q, self.kv
        heads = self.joint(x).view(rows, -1, self.size)
        gate = None
        if self.gated:  # each query is followed by its gate
            both = heads[:, : 2 * q].view(rows, q, 2, self.size)
            gate = both[:, :, 1].reshape(rows, -1)
            heads = torch.cat([both[:, :, 0], heads[:, 2 * q :]], dim=1)
        qk = heads[:, : q + kv].to(tables[0].dtype)
        qk = qk if self.norm is None else self.norm(qk)
        qk = layers.apply_rotary(qk, *tables).to(heads.dtype)
        keys, values = self.cache.update(qk[:, q:, None], heads[:, q + kv :, None])
        queries = qk[:, :q].view(rows, kv, -1, self.size)
        if x.device.type == "cpu":  # in 16 bits twice as fast as by one operation
            weights = torch.matmul(queries.float(), keys.float().transpose(2, 3))
            weights = torch.add(bias, weights, alpha=self.scale).softmax(-1)
            mixed = torch.matmul(weights, values.float()).to(queries.dtype)
        else:
            mask, k, v = (part.to(queries.dtype) for part in (bias, keys, values))
            mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=self.scale)
        mixed = mixed.reshape(rows, -1)
        return self.out(mixed if gate is None else mixed * gate.sigmoid_(), onto=onto)


class _DeltaRule:
    """The gated delta rule: a state S of each head, of which a key's value is corrected.

        S <- e^g S + k (beta (v - k e^g S)),   o = q S

    Source: Yang et al. 2024, eq. 10, https://arxiv.org/abs/2412.06464
    """

    cache: LinearAttentionLayer

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.size = layer.head_k_dim
        inward = layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
        self.joint = lora.JointLinear(*inward, dtype=dtype)
        self.kernel = layer.conv1d.weight.squeeze(1).T.contiguous()[:, None]
        self.bias = layer.conv1d.bias
        self.k, self.v = layer.num_k_heads, layer.num_v_heads
        self.widths = [len(self.kernel[0, 0]), layer.value_dim, self.v, self.v]
        self.rate, self.shift = -layer.A_log.float().exp(), layer.dt_bias
        self.norm = Norm(layer.norm.weight.float(), layer.norm.variance_epsilon)
        self.out = lora.JointLinear(layer.out_proj, dtype=dtype)
        scale = torch.tensor([1 / self.size] * self.k + [self.size**-0.5] * self.k).to(self.rate)
        self.unit = Norm(scale[:, None].expand(-1, self.size), 1e-6 / self.size)
        """Keys of length 1, queries of length 1 / sqrt(size)."""

    def __call__(
        self, x: Float[Tensor, "B d"], tables: Any, bias: Any, onto: Float[Tensor, "B d"]
    ) -> Float[Tensor, "B d"]:
        """Compute the layer like `_Attention`; the state replaces positions and mask."""
        rows = len(x)
        mixed, z, b, a = self.joint(x).split(self.widths, dim=-1)
        mixed = self._convolved(mixed)
        qk, value = mixed.tensor_split([2 * self.k * self.size], dim=1)
        qk = self.unit(qk.view(rows, 2 * self.k, self.size))
        shared = self.v // self.k
        query, key = (part.repeat_interleave(shared, dim=1) for part in qk.chunk(2, dim=1))
        decay = (self.rate * F.softplus(a.float() + self.shift)).exp_()
        state = self.cache.recurrent_states[0].mul_(decay[..., None, None])
        value = value.view(rows, self.v, -1)
        known = torch.matmul(key[:, :, None], state).squeeze(2)
        new = (value - known).mul_(b.float().sigmoid()[..., None])
        state.addcmul_(key[..., None], new[:, :, None])
        read = self.norm(torch.matmul(query[:, :, None], state).squeeze(2))
        return self.out(read.view(rows, -1).mul_(F.silu(z.float())).to(x.dtype), onto=onto)

    def _convolved(self, x: Float[Tensor, "B c"]) -> Float[Tensor, "B c"]:
        """Convolve in fp32 with the previous tokens, which the cache keeps, oldest first."""
        window = self.cache.conv_states[0].permute(2, 0, 1)
        window = torch.cat([window[1:], x[None]])
        self.cache.conv_states[0] = window.permute(1, 2, 0)
        y = (window * self.kernel).sum(0, dtype=torch.float32)
        return F.silu(y if self.bias is None else y + self.bias, inplace=True)


class Norm:
    """w x / sqrt(mean of x^2 + eps)."""

    def __init__(self, weight: Float[Tensor, "*H d"], eps: float) -> None:
        size = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self.scaled = weight.float() * math.sqrt(size)
        self.least = self.scaled.new_full((), math.sqrt(size * eps))

    @classmethod
    def of(cls, *norms: Any) -> Norm:
        """Return the norm for one norm of the model, or for one norm per head."""
        weights, eps = zip(*map(layers.weight_and_eps, norms), strict=True)
        return cls(weights[0] if len(norms) == 1 else torch.stack(weights), eps[0])

    def __call__(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        """Normalise; on a CPU as sqrt(d) w x / hypot(|x|, sqrt(d eps)), half the operations."""
        if x.device.type != "cpu":
            wide = x.to(self.weight.dtype)
            return F.rms_norm(wide, x.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide / length.hypot_(self.least)).mul_(self.scaled).to(x.dtype)


class DecodeStep:
    """A trunk's forward pass of one token a row, after the tokens in its cache.

    It copies the weights in the dtype of the computation: under autocast fp32 is rounded once.
    """

    def __init__(self, causal_lm: PreTrainedModel, cache: DynamicCache) -> None:
        trunk = causal_lm.base_model
        self.embed, self.rotary = trunk.embed_tokens, trunk.rotary_emb
        dtype = layers.computing_dtype(self.embed.weight)
        self.layers = [
            DecodeLayer(layer, is_linear=isinstance(of_layer, LinearAttentionLayer), dtype=dtype)
            for layer, of_layer in zip(trunk.layers, cache.layers, strict=True)
        ]
        self.norm = Norm.of(trunk.norm)
        head = causal_lm.get_output_embeddings()
        alike = _is_known(head) and head.weight.dtype == self.embed.weight.dtype
        self.head = lora.JointLinear(head, dtype=dtype) if alike else head
        """Function that returns the logits of hidden states."""
        self.attach(cache)

    def attach(self, cache: DynamicCache) -> None:
        """Use another cache."""
        for layer, of_layer in zip(self.layers, cache.layers, strict=True):
            layer.mix.cache = of_layer

    def __call__(
        self, tokens: Int[Tensor, "B 1"], mask: Bool[Tensor, "B S"], positions: Int[Tensor, "B 1"]
    ) -> Float[Tensor, "B d"]:
        """Return the last hidden states. mask: mask of all S tokens, this one included."""
        with torch.autocast(tokens.device.type, enabled=False):
            hidden = self.embed(tokens.squeeze(1))
            cos, sin = self.rotary(hidden, positions)
            tables = cos, layers.signed_sin(sin)
            bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
            for layer in self.layers:
                hidden = layer(hidden, tables, bias[:, None, None])
            return self.norm(hidden)


@torch.no_grad()
def decode_step(causal_lm: PreTrainedModel, cache: DynamicCache) -> DecodeStep | None:
    """Return a step on the cache; None, with a warning, where it would compute something else.

    The first step of a model in a dtype is compared with the trunk, on a cache of its own.
    """
    if not can_decode(causal_lm, cache):
        return None
    trunk, dtype = causal_lm.base_model, layers.computing_dtype(causal_lm)
    agreed = trunk.__dict__.setdefault("steps_agree", {})
    if dtype in agreed:
        return DecodeStep(causal_lm, cache) if agreed[dtype] else None
    vocab_size = trunk.embed_tokens.num_embeddings
    tokens = torch.arange(1, 9, device=causal_lm.device)[None] * 7919 % vocab_size
    own, mask = DynamicCache(config=causal_lm.config), torch.ones_like(tokens)
    inputs = {"input_ids": tokens[:, :-1], str(decoder.cache_argument(trunk)): own}
    trunk(**inputs, use_cache=True)
    expected = trunk(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    fault = "gives other hidden states"
    try:
        step = DecodeStep(causal_lm, own)
        found = step(tokens[:, -1:], mask.bool(), mask[:, :1] * 7)
        agreed[dtype] = patch.same_logits(found, expected, patch.rounding(causal_lm))
    except torch.OutOfMemoryError:  # fewer responses at once may fit
        raise
    except Exception as error:  # code written for other layers may raise anything
        agreed[dtype], fault = False, f"fails: {first_line(error)}"
    if agreed[dtype]:
        step.attach(cache)
        return step
    warnings.warn(
        f"sampling is slower, by {causal_lm.config.model_type}'s own layers: the fast decoding "
        f"step {fault}",
        stacklevel=2,
    )
    return None


def can_decode(causal_lm: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether a `DecodeStep` knows the model's layers: a patched decoder in one dtype."""
    trunk, dtype = causal_lm.base_model, causal_lm.get_input_embeddings().weight.dtype
    modules = dict(trunk.named_modules()).items()
    linear = [m for name, m in modules if hasattr(m, "in_features") and ".lora_" not in name]
    return (
        decoder.family(causal_lm) is not None
        and layers.own_class(trunk.embed_tokens) is nn.Embedding
        and dtype in (torch.float32, layers.computing_dtype(causal_lm))
        and all(isinstance(layer, decoder.PackedDecoderLayer) for layer in trunk.layers)
        and not any(isinstance(module, AuxiliaryTrainingWrapper) for _, module in modules)
        and causal_lm.config.hidden_act == "silu"
        and all(
            # All keys and values, or a state of linear attention, are kept.
            (isinstance(layer, DynamicLayer) and not layer.is_sliding)
            or type(layer) is LinearAttentionLayer
            for layer in cache.layers
        )
        and all(_is_known(layer) and layer.weight.dtype == dtype for layer in linear)
    )


def _is_known(layer: nn.Module) -> bool:
    """Return whether the layer is linear with nothing added to it but its adapters."""
    kind = layers.own_class(layer)
    if kind is lora.FusedLoRALinear and lora.is_plain_lora(layer):  # type: ignore[arg-type]
        kind = layers.own_class(layer.base_layer)  # type: ignore[arg-type]
    return kind in layers.LINEAR
