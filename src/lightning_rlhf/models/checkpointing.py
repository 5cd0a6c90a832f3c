"""Gradient checkpointing of decoder layers, whichever role a model has when it recomputes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rlhf.core.errors import ConfigError

RoleContext = Callable[[], AbstractContextManager[None]]


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that are recomputed one by one.

    Raises ConfigError where the model has none.
    """
    found = [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not found:
        raise ConfigError(
            f"model.gradient_checkpointing=true, but {model.config.model_type} has no layers "
            "that can be recomputed; allowed: false"
        )
    return found


def recompute(model: PreTrainedModel) -> None:
    """Mark a model whose layers are to be recomputed. Raises ConfigError where it has none."""
    layers_of(model)
    model.recomputes = True


def checkpoint_layers(model: PreTrainedModel, current_role: Callable[[], RoleContext]) -> None:
    """Let the model's layers keep their inputs alone, and recompute the rest for the gradient.

    transformers' own way is for models in training mode, which have dropout.

    current_role: returns the context that a layer computed now must be recomputed in.
    """
    for layer in layers_of(model):
        layer.forward = partial(_checkpointed, layer, current_role)


def _checkpointed(
    layer: GradientCheckpointingLayer,
    current_role: Callable[[], RoleContext],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    forward = partial(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)  # type: ignore[no-any-return]
    role = current_role()
    return checkpoint(  # type: ignore[no-any-return]
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # there is no dropout
        context_fn=lambda: (nullcontext(), role()),
        **kwargs,
    )
