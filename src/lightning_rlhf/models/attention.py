"""The library's SDPA attention, its gradient in fp32 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

WIDE_SDPA = "wide_sdpa"


def attend_widely(model: PreTrainedModel) -> None:
    """Let a model that attends by SDPA do so by `wide_sdpa`."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(WIDE_SDPA)


def wide_sdpa(
    module: nn.Module,
    query: Float[Tensor, "B H S d"],
    key: Float[Tensor, "B K L d"],
    value: Float[Tensor, "B K L d"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B S H d"], None]:
    """As the library computes it; in 16 bits on a CPU with a gradient, in fp32 and rounded.

    On a CPU the gradient takes about seven times as long in bf16.
    """
    learns = torch.is_grad_enabled() and query.requires_grad
    if query.device.type != "cpu" or query.dtype.itemsize != 2 or not learns:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):
        wide = [x.float() for x in (query, key, value)]
        output, _ = sdpa_attention_forward(module, *wide, attention_mask, **kwargs)
    return output.to(query.dtype), None


def turned(
    x: Float[Tensor, "N H s"], cos: Float[Tensor, "N 1 r"], sin: Float[Tensor, "N 1 r"]
) -> Float[Tensor, "N H s"]:
    """Rotary position embedding of the first r dimensions.

        y = x cos + [-x_2, x_1] sin,   x = [x_1, x_2] in halves

    sin: `signed`.
    Source: Su et al. 2021, eq. 34, https://arxiv.org/abs/2104.09864
    """
    r = cos.shape[-1]
    part = x[..., :r]
    y = (part * cos).addcmul_(part.roll(r // 2, -1), sin)
    return y if r == x.shape[-1] else torch.cat([y, x[..., r:]], dim=-1)


def signed(sin: Float[Tensor, "*N r"]) -> Float[Tensor, "*N r"]:
    """Its first half negated."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


AttentionInterface.register(WIDE_SDPA, wide_sdpa)
AttentionMaskInterface.register(WIDE_SDPA, sdpa_mask)
