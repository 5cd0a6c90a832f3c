"""Decoder layers that compute only the positions on which the wanted hidden states depend.

Positions of padded rows are gathered and scattered. Without training, adapters are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from lightning_rlhf.core.masking import upload
from lightning_rlhf.kernels import layers, lora

_NAMES = ("Llama", "Qwen2", "Qwen3")
TRUNKS = {f"{name}Model": name for name in _NAMES} | {"Qwen3_5TextModel": "Qwen3_5"}
"""Class of a trunk -> family. Such a trunk only calls its layers one after another and passes a
packing on to them. A class derived from one of these may compute something else."""
ATTENTION = tuple(f"{family}Attention" for family in TRUNKS.values())
"""Names of the known attention classes: projections, norms of queries and keys, rotary embeddings,
and a gate in the last."""
WORTH = 0.08  # share of padding from which packing saves more than its copies cost
MULTIPLE = 32  # numbers of positions are rounded up to it, or to ROWS with few_shapes
COLUMNS = 16  # rows are lengthened to a multiple of it: all with few_shapes, else where it is near
MOST_ADDED = 0.04  # largest share of columns that is added without few_shapes


def family(model: PreTrainedModel) -> str | None:
    """Return the family of a model, None where the fast layers do not support it."""
    trunk = layers.own_class(model.base_model)
    return TRUNKS.get(trunk.__name__) if trunk.__module__.startswith(layers.LIBRARY) else None


def cache_argument(trunk: nn.Module) -> str | None:
    """Return the argument of a trunk that takes a cache of keys and values, None without attention.

    It is past_key_values up to transformers 5.23 and cache from 5.24 on, where Mamba has one too.
    """
    is_recurrent = {*(getattr(trunk.config, "layer_types", None) or ())} == {"linear_attention"}
    taken = () if is_recurrent else signature(trunk.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), None)


class PackedDecoderLayer(layers.FastLayer, nn.Module):
    """A decoder layer whose attention reads padded rows and whose other parts packed positions.

    The last layer computes the wanted positions only, except for keys and values.
    """

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    is_last = False

    def forward(
        self, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **kwargs: Any
    ) -> Tensor:
        """Return [M, d] from the last layer, else [N, d], where a packing is given."""
        if packing is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]
        if hidden_states.ndim == 3:  # the embeddings
            hidden_states = packing.pack(hidden_states.flatten(0, 1))
        x, mask = self.input_layernorm(hidden_states), kwargs["attention_mask"]
        mixer: Any = getattr(self, "linear_attn", None)
        is_linear = isinstance(mixer, nn.Module)
        mixer = mixer if is_linear else self.get_submodule("self_attn")
        if not is_linear and mask is None and _is_plain(mixer):
            mixed = _attend(mixer, x, packing, kwargs["position_embeddings"], self.is_last)
        else:
            x = packing.pad(x)
            padded = mixer(x, attention_mask=mask) if is_linear else mixer(x, **kwargs)[0]
            mixed = packing.pack(padded.flatten(0, 1), last=self.is_last)
        if self.is_last:
            hidden_states = gather_rows(hidden_states, packing.wanted_real)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@cache
def packed_class(layer: type) -> type[nn.Module]:
    """Return the fast class of a decoder layer's class."""
    return type(f"Packed{layer.__name__}", (PackedDecoderLayer, layer), {})


def _is_plain(layer: Any) -> bool:
    """Return whether `_attend` computes what the layer does."""
    return (
        layers.own_class(layer).__name__ in ATTENTION
        and layer.config._attn_implementation == layers.FAST_SDPA
        and not (layer.training and layer.attention_dropout)
    )


def _attend(
    layer: Any,
    x: Float[Tensor, "N d"],
    packing: Packing,
    tables: tuple[Float[Tensor, "#B S r"], Float[Tensor, "#B S r"]],
    is_last: bool,
) -> Float[Tensor, "M d"]:
    """Compute causal attention, for which queries, keys and values alone are padded."""
    size, rows, columns = layer.head_dim, packing.rows, packing.columns
    asking = gather_rows(x, packing.wanted_real) if is_last else x
    query, key, value = layer.q_proj(asking), layer.k_proj(x), layer.v_proj(x)
    gate = None
    if layers.own_class(layer).__name__ == layers.GATED:
        query, gate = query.unflatten(1, (-1, 2 * size)).chunk(2, dim=-1)
    query, key = (heads.flatten(1).unflatten(1, (-1, size)) for heads in (query, key))
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    query = layers.apply_rotary(query, *packing.rotary_tables(*tables, last=is_last))
    key = layers.apply_rotary(key, *packing.rotary_tables(*tables))
    query = packing.pad(query.flatten(1), last=is_last)
    key, value = packing.pad(key.flatten(1)), packing.pad(value)
    shape = rows, columns, -1, size
    query, key, value = (heads.view(shape).transpose(1, 2) for heads in (query, key, value))
    mixed, _ = layers.fast_sdpa(layer, query, key, value, None, scaling=layer.scaling)
    mixed = packing.pack(mixed.reshape(rows * columns, -1), last=is_last)
    return layer.o_proj(mixed if gate is None else mixed * gate.flatten(1).sigmoid())


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Replace every LoRA layer by one plain linear layer, W + sum of scale * B A, inside.

    The LoRA layers are restored, so that nothing is rounded twice. Layers that do not compute in
    fp32, where rounding would remove the adapter, quantised ones and variants stay as they are.

    Memory: a second copy of the weights under LoRA.
    """
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if not isinstance(layer, LoRALinear):
                    continue
                weight = layer.base_layer.weight
                if (
                    layers.own_class(layer.base_layer) in layers.LINEAR
                    and weight.dtype == torch.float32
                    and not torch.is_autocast_enabled(weight.device.type)
                    and lora.is_plain_lora(layer)
                ):
                    swapped.append((parent, name, layer))
                    setattr(parent, name, _plain(layer))
        yield
    finally:
        for parent, name, layer in swapped:
            setattr(parent, name, layer)


@torch.no_grad()
def _plain(layer: LoRALinear) -> nn.Linear:
    base = layer.base_layer
    weight = base.weight
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            weight = weight + layer.get_delta_weight(adapter)
    plain = layers.OneDNNLinear(base.in_features, base.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = base.bias
    return plain.eval()


@dataclass(frozen=True)
class Packing:
    """Positions of B padded rows of length S that token-wise layers compute.

    Letters: N positions that a wanted one depends on, M wanted ones, both rounded up by others.
    """

    rows: int
    """Number of rows, B."""
    columns: int
    """Length of the padded rows, S."""
    real: Int[Tensor, " N"] | None
    """Indices of the N among B x S; None where all are computed."""
    wanted: Int[Tensor, " M"]
    """Indices of the M among B x S."""
    wanted_real: Int[Tensor, " M"]
    """Indices of the M among the N."""
    count: int
    """Number of wanted positions without those that round it up."""
    _rotary: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, wanted: Bool[Tensor, "B S"], *, few_shapes: bool = False) -> Packing:
        """Return the packing of each row from its first position up to its last wanted one.

        few_shapes: whether N and M are multiples of a larger number, where enough others are there.
        """
        rows, columns = wanted.shape
        multiple = layers.ROWS if few_shapes else MULTIPLE
        real = wanted.flip(1).cummax(1).values.flip(1).flatten()
        count, every = int(wanted.sum()), torch.ones_like(real)
        if real.float().mean() > 1 - WORTH:
            last = _filled_up(wanted.flatten(), every, multiple)
            return cls(rows, columns, None, last, last, count)
        indices = _filled_up(real, every, multiple)
        number = torch.full(real.shape, -1, device=real.device)
        number[indices] = torch.arange(len(indices), device=real.device)
        last = _filled_up(wanted.flatten(), number >= 0, multiple)
        return cls(rows, columns, indices, last, number[last], count)

    def to(self, device: torch.device) -> Packing:
        """Return the packing with its indices on `device`, without waiting for that."""
        indices = {"real": self.real, "wanted": self.wanted, "wanted_real": self.wanted_real}
        moved = {k: None if x is None else upload(x, device) for k, x in indices.items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def pack(self, x: Float[Tensor, "BS d"], *, last: bool = False) -> Float[Tensor, "N d"]:
        """Gather the N positions; `last`: the M wanted ones, as the last layer computes them."""
        indices = self.wanted if last else self.real
        return x if indices is None else gather_rows(x, indices)

    def pad(self, x: Float[Tensor, "N d"], *, last: bool = False) -> Float[Tensor, "B S d"]:
        """Scatter what `pack` gathered into padded rows, 0 elsewhere."""
        indices = self.wanted if last else self.real
        x = x if indices is None else scatter_rows(x, indices, self.rows * self.columns)
        return x.view(self.rows, self.columns, x.shape[-1])

    def rotary_tables(
        self, cos: Float[Tensor, "#B S r"], sin: Float[Tensor, "#B S r"], *, last: bool = False
    ) -> tuple[Float[Tensor, "N 1 r"], Float[Tensor, "N 1 r"]]:
        """Return cos and signed sin of the positions that `pack` keeps; made once."""
        if last not in self._rotary:
            self._rotary[last] = tuple(  # type: ignore[assignment]
                self.pack(table.repeat(self.rows, 1), last=last)[:, None]
                for table in (cos[0], layers.signed_sin(sin[0]))
            )
        return self._rotary[last]


def _filled_up(
    chosen: Bool[Tensor, " n"], others: Bool[Tensor, " n"], multiple: int
) -> Int[Tensor, " m"]:
    """Return the indices of the chosen positions, then of others that round the number up."""
    indices, more = (x.nonzero().squeeze(1) for x in (chosen, others & ~chosen))
    return torch.cat([indices, more[: layers.rounded_up(len(indices), multiple) - len(indices)]])


def gather_rows(x: Float[Tensor, "n d"], indices: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
    """Return the rows of x at these indices, each at most once."""
    return _Rows.apply(x, indices, None)  # type: ignore


def scatter_rows(
    x: Float[Tensor, "m d"], indices: Int[Tensor, " m"], count: int
) -> Float[Tensor, "n d"]:
    """Return `count` rows: those of x at these indices, 0 elsewhere."""
    return _Rows.apply(x, indices, count)  # type: ignore


class _Rows(torch.autograd.Function):
    """`gather_rows` where count is None, else `scatter_rows`; each is the gradient of the other.

    Autograd's own gradient of the first adds the rows one by one, and the second would keep x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "n d"], indices: Int[Tensor, " m"], count: int | None
    ) -> Float[Tensor, "k d"]:
        ctx.save_for_backward(indices)
        ctx.count = len(x) if count is None else None
        return _moved(x, indices, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "k d"]) -> tuple[Float[Tensor, "n d"], None, None]:
        return _moved(dy, ctx.saved_tensors[0], ctx.count), None, None


def _moved(
    x: Float[Tensor, "n d"], indices: Int[Tensor, " m"], count: int | None
) -> Float[Tensor, "k d"]:
    if count is None:
        return x.index_select(0, indices)
    return x.new_zeros(count, x.shape[1]).index_copy_(0, indices, x)
