"""The switch that replaces a model's own layers by fast ones where they are supported."""

import warnings
from typing import Literal, NamedTuple

import torch
import transformers
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.core.config import KernelChoice
from lightning_rlhf.core.errors import ConfigError, first_line
from lightning_rlhf.kernels import decoder, layers, lora

LAYERS = 4
"""Number of layers from which rounding in 16 bits grows."""


class Kernels(NamedTuple):
    """Kind of layers with which a model computes."""

    kind: Literal["fast", "plain"]
    reason: str

    def __str__(self) -> str:
        return f"kernels: {self.kind} ({self.reason})"


def use_kernels(choice: KernelChoice, model: PreTrainedModel) -> Kernels:
    """Patch the model's layers by `choice` on the device of its weights, or restore its own.

    Fast layers that change the model's results are removed again; with auto, a warning is printed.

    Raises ConfigError where the choice is fast and the model cannot have fast layers.
    """
    unpatch(model)
    name, device = model.config.model_type, model.device.type
    place, allowed = "the CPU" if device == "cpu" else device, "auto, plain"
    if choice == "plain":
        return Kernels("plain", "model.kernels=plain")
    if decoder.family(model) is None:
        reason = f"{name} has layers of another kind"
        allowed = f"auto, plain, or a model of {', '.join(sorted(decoder.TRUNKS.values()))}"
    elif any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        reason = "the weights are sharded"
    elif choice == "auto" and device != "cpu":
        reason = f"fast ones are not measured on {place}"
    elif (fault := patch_fault(model)) is None:
        return Kernels("fast", f"{name} on {place}")
    else:
        unpatch(model)
        reason = f"{name} of transformers {transformers.__version__}: {fault}"
        if choice == "auto":
            message = f"the model keeps its own layers, which are slower: {reason}"
            warnings.warn(message, stacklevel=2)
    if choice == "fast":
        raise ConfigError(f"model.kernels is 'fast', but {reason}; allowed: {allowed}")
    return Kernels("plain", reason)


def patch_layers(model: nn.Module) -> None:
    """Give every layer that has a fast class that class."""
    for layer in model.modules():
        kind = layers.fast_class(type(layer))  # type: ignore[arg-type]
        if type(layer) is LoRALinear and type(layer.base_layer) in layers.LINEAR:
            kind = lora.FusedLoRALinear
        layer.__class__ = kind or type(layer)


def unpatch(model: PreTrainedModel) -> None:
    """Restore the class that its library gave every layer."""
    layers.use_fast_sdpa(model, fast=False)
    for layer in model.modules():
        if isinstance(layer, layers.FastLayer):
            layer.__class__ = type(layer).__bases__[-1]
            layer.__dict__.pop("is_last", None)


@torch.no_grad()
def patch_fault(model: PreTrainedModel) -> str | None:
    """Patch the model; return how its results then differ from before, None if they do not.

    The hidden states of two short rows are compared, the second one padded.
    """
    trunk = model.base_model
    count = trunk.embed_tokens.num_embeddings
    tokens = (torch.arange(1, 33, device=model.device) * 7919 % count).view(2, 16)
    wanted = torch.ones_like(tokens, dtype=torch.bool)
    wanted[1, 9:] = False
    expected = trunk(input_ids=tokens, use_cache=False).last_hidden_state[wanted]
    patch_layers(model)
    layers.use_fast_sdpa(model, fast=True)
    for layer in trunk.layers:  # which then accept a `Packing`
        layer.__class__ = decoder.packed_class(type(layer))  # type: ignore[arg-type]
        layer.is_last = layer is trunk.layers[-1]
    try:
        packing = decoder.Packing.of(wanted)
        found = trunk(input_ids=tokens, use_cache=False, packing=packing).last_hidden_state
    except Exception as error:  # code written for other layers may raise anything
        return f"the fast layers fail: {first_line(error)}"
    quantised = getattr(model, "is_quantized", False)  # its activations are rounded too
    tolerance = 0.5 if quantised else rounding(model)
    same = same_logits(found[: packing.count], expected, tolerance)
    return None if same else "the fast layers give other hidden states"


def same_logits(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether the root mean square of a - b is at most `tolerance` times that of b."""
    a, b = a.float(), b.float()
    return bool((a - b).square().mean() <= tolerance**2 * b.square().mean())


def rounding(model: PreTrainedModel, other: str = "float32") -> float:
    """Return the relative difference of a model's logits between two ways to compute them.

    other: name of the type of the numbers in the second way, where it may be the coarser one.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", LAYERS)
    dtypes = layers.computing_dtype(model), getattr(torch, other)
    return max(rounding_of(dtype, count) for dtype in dtypes)


def rounding_of(dtype: torch.dtype, count: int) -> float:
    """Return the relative difference of logits of `count` layers between two ways to compute them.

    1e-4 in fp32 (other kernels, other order of sums). In 16 bits (numbers rounded once more, in
    each layer) 3e-2, which grows with the square root of the layers; measured: 4e-2 of 24 layers.
    """
    return 1e-4 if dtype == torch.float32 else 3e-2 * max(1.0, count / LAYERS) ** 0.5
