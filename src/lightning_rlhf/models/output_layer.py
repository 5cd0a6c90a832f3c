"""The output layer, through which all roles predict, and the probe input of fingerprints."""

from __future__ import annotations

import torch
from jaxtyping import Int
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.kernels.patch import rounding, same_logits


def probe_tokens(causal_lm: PreTrainedModel) -> Int[Tensor, "1 S"]:
    """Return the fixed sequence of tokens that models are compared on, on the model's device."""
    vocab_size = int(causal_lm.get_output_embeddings().out_features)
    return (torch.arange(1, 17) * 7919 % vocab_size)[None].to(causal_lm.device)


@torch.no_grad()
def check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Raise CheckpointError unless the model's logits are those of its output layer.

    Models that cap or scale their logits are not supported. A model without weights, on torch's
    device `meta`, has no logits and is not checked.
    """
    if causal_lm.device.type == "meta":
        return
    tokens = probe_tokens(causal_lm)
    hidden = causal_lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    ours = causal_lm.get_output_embeddings()(hidden).float()
    theirs = causal_lm(input_ids=tokens).logits.float()
    if not same_logits(ours, theirs, rounding(causal_lm)):
        raise CheckpointError(
            f"{causal_lm.config.model_type} changes its logits after the output layer "
            "(soft-capping or scaling), which is not supported"
        )


def check_not_adapted(causal_lm: PreTrainedModel) -> None:
    """Raise CheckpointError where the output layer has an adapter."""
    if isinstance(causal_lm.get_output_embeddings(), BaseTunerLayer):
        raise CheckpointError(
            "the output layer has an adapter (model.lora.target_modules names it), but all "
            "roles predict through one output layer; leave it out"
        )
