"""Fingerprints: stored probe logits that identify a checkpoint's model and its parent model."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.kernels.patch import rounding, same_logits
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.models.quantization import quantization_of
from lightning_rlhf.models.roles import Roles

FINGERPRINT = "fingerprint.safetensors"
REROUNDED = {"int8": 0.1, "nf4": 3e-2}
"""Kind of rounding -> largest relative difference of the logits between two computations with it.

On one machine there is none. Another device may round a weight that lies between two codes to the
other one; checkpoints of int8 of earlier versions were computed with rounded activations.
"""


def fingerprint(final: Final, of: str) -> torch.Tensor | None:
    """Return the stored probe logits of the model ("self") or of its parent model ("below").

    The parent is the model that it was trained from, to which an adapter is applied. None where
    the checkpoint has no fingerprint. Raises CheckpointError where it cannot be read.
    """
    file = final.own_file(FINGERPRINT)
    if not file.is_file():
        return None
    try:
        found = load_file(file)[of]
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not found.is_floating_point():
        raise CheckpointError(f"{file} cannot be read: {of} is of {found.dtype}, no logits")
    return found


def has_fingerprint(roles: Roles, role: str, final: Final, of: str) -> bool:
    """Return True if `role` gives the logits stored in `final`, or `final` has no fingerprint."""
    expected = fingerprint(final, of)
    if expected is None:
        return True
    found = roles.probe(role)
    return found.shape == expected.shape and same_logits(found, expected, tolerance(roles, final))


def tolerance(roles: Roles, final: Final) -> float:
    """Return the largest relative difference between a model's logits and its fingerprint.

    A quantised model may be used with a checkpoint of full precision, or of another kind of
    rounding; a different model deviates by more than that.
    """
    here, there = quantization_of(roles.causal_lm), trained_on(final)
    if here == "none":
        return rounding(roles.causal_lm)
    dtype = str(roles.causal_lm.dtype).removeprefix("torch.")
    alike = (here, dtype) == there
    return max(rounding(roles.causal_lm), REROUNDED[here]) if alike else 0.5


def trained_on(final: Final) -> tuple[str, str]:
    """Return quantization and data type of the base of an adapter; whole weights have no base."""
    config = final.manifest.config if final.manifest and final.is_adapter else {}
    model = config.get("model") or {}
    return model.get("quantization", "none"), model.get("dtype", "")


def check_fingerprint(roles: Roles, role: str, final: Final, of: str) -> None:
    """Raise CheckpointError if `role` gives other logits than those stored in `final`."""
    if not has_fingerprint(roles, role, final, of):
        here, (there, _) = quantization_of(roles.causal_lm), trained_on(final)
        why = f" with model.quantization={there}, which is {here} here" if here != there else ""
        raise CheckpointError(
            f"{final.path} does not fit: the {role} model here gives other logits than "
            f"{'it gave' if of == 'self' else 'the model that it was trained on gave'}{why}. Train "
            "it again from this model, or point to the checkpoint that belongs to it"
        )
