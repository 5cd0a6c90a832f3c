"""Decoder layers that compute only what the wanted hidden states depend on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextModel

from lightning_rlhf.core.errors import ConfigError

WORTH = 0.08  # share of padding from which packing saves more than its copies cost
MULTIPLE = 32
"""Numbers of positions are rounded up to it: products of 16 bits are compiled for each shape, and
what was compiled is kept."""

COLUMNS, MORE = 16, 0.04
"""Attention on a CPU takes up to a third more time for a length that is no multiple; and the share
of columns that it costs less than."""


@dataclass(frozen=True)
class Packing:
    """Which of B rows of S positions are computed where each position is by itself.

    Letters: N tokens that something wanted depends on, M wanted ones, and a few others behind
    either.
    """

    rows: int
    """B."""
    columns: int
    """S."""
    real: Int[Tensor, " N"] | None
    """Places of the N among B x S; None: they are taken to be all."""
    wanted: Int[Tensor, " M"]
    """Places of the M among B x S."""
    wanted_real: Int[Tensor, " M"]
    """Places of the M among the N."""
    count: int
    """M."""
    again: Callable[[], AbstractContextManager[None]]
    """What a layer that is computed once more for its gradient is computed in."""

    @classmethod
    def of(
        cls,
        wanted: Bool[Tensor, "B S"],
        again: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Packing:
        """Every row is needed from its first position up to its last wanted one."""
        rows, columns = wanted.shape
        real = wanted.flip(1).cummax(1).values.flip(1).flatten()
        last = _rounded_up(wanted.flatten(), real)
        count = int(wanted.sum())
        if real.float().mean() > 1 - WORTH:
            return cls(rows, columns, None, last, last, count, again)
        number = real.cumsum(0) - 1
        return cls(rows, columns, _rounded_up(real, ~real), last, number[last], count, again)

    def packed(self, x: Float[Tensor, "BS d"]) -> Float[Tensor, "N d"]:
        """Without padding."""
        return x if self.real is None else _Taken.apply(x, self.real)  # type: ignore

    def padded(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "B S d"]:
        """The rows as a mixer of positions reads them, 0 on padding."""
        if self.real is not None:
            x = _Put.apply(x, self.real, self.rows * self.columns)  # type: ignore
        return x.view(self.rows, self.columns, x.shape[-1])


class _Packed(nn.Module):
    """A decoder layer: attention reads padded rows, everything else the real positions alone.

    The last layer computes the wanted ones only, but for keys and values. `recomputes`: nothing is
    kept for the gradient but what goes in, and the layer is computed once more.
    """

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    is_last = False
    recomputes = False

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
        mixed = self._mix(packing.padded(self.input_layernorm(hidden_states)), **kwargs)
        mixed = mixed.flatten(0, 1)
        if self.is_last:
            mixed = _Taken.apply(mixed, packing.wanted)
            hidden_states = _Taken.apply(hidden_states, packing.wanted_real)
        else:
            mixed = packing.packed(mixed)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def _mix(self, x: Float[Tensor, "B S d"], **kwargs: Any) -> Float[Tensor, "B S d"]:
        if isinstance(mixer := getattr(self, "linear_attn", None), nn.Module):
            return mixer(x, attention_mask=kwargs["attention_mask"])
        mixer = self.get_submodule("self_attn")
        return mixer(x, **kwargs)[0]


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


def recompute(model: PreTrainedModel) -> None:
    """Gradient checkpointing: the model's layers keep nothing for the gradient but what goes in.

    Raises ConfigError where the architecture has no layers that can.
    """
    if not pack(model):
        allowed = ", ".join(sorted(layer.__name__.removesuffix("DecoderLayer") for layer in PACKED))
        raise ConfigError(
            f"model.gradient_checkpointing=true, but {model.config.model_type} has layers of "
            f"another kind; allowed: false, or a model of {allowed}"
        )
    for layer in model.base_model.layers:
        layer.recomputes = True


def columns_to_add(columns: int) -> int:
    """For a length that attention is fast on; 0 where they would cost more than they save."""
    more = -columns % COLUMNS
    return more if more <= MORE * columns else 0


def _rounded_up(chosen: Bool[Tensor, " n"], others: Bool[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Places of what is chosen; behind them, of as many others as round the number up."""
    places, more = (x.nonzero().squeeze(1) for x in (chosen, others & ~chosen))
    return torch.cat([places, more[: -len(places) % MULTIPLE]])


class _Taken(torch.autograd.Function):
    """Rows of x, each at most once; autograd's own gradient adds them up one by one."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "n d"], index: Int[Tensor, " m"]
    ) -> Float[Tensor, "m d"]:
        ctx.save_for_backward(index)
        ctx.count = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "m d"]) -> tuple[Float[Tensor, "n d"], None]:
        (index,) = ctx.saved_tensors
        return dy.new_zeros(ctx.count, dy.shape[1]).index_copy_(0, index, dy), None


class _Put(torch.autograd.Function):
    """The rows of x at their places among `count`, 0 elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "m d"], index: Int[Tensor, " m"], count: int
    ) -> Float[Tensor, "n d"]:
        ctx.save_for_backward(index)
        return x.new_zeros(count, x.shape[1]).index_copy_(0, index, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "m d"], None, None]:
        (index,) = ctx.saved_tensors
        return dy.index_select(0, index), None, None
