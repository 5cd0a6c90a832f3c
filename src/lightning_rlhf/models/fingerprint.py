"""Whether a role is the model that a checkpoint was written as, or trained on: its probe logits."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.models.roles import Roles, rounding, same_logits

FINGERPRINT = "fingerprint.safetensors"


def fingerprint(final: Final, of: str) -> torch.Tensor | None:
    """Stored probe logits of the model itself ("self") or of what it stands on ("below")."""
    file = final.path / FINGERPRINT
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
    """Whether `role` gives the logits that `final` was written with, where it says which."""
    expected = fingerprint(final, of)
    if expected is None:
        return True
    found = roles.probe(role)
    # A quantised model may stand for a checkpoint of full precision; another one is further away.
    quantised = getattr(roles.causal_lm, "is_quantized", False)
    tolerance = 0.5 if quantised else rounding(roles.causal_lm)
    return found.shape == expected.shape and same_logits(found, expected, tolerance)


def check_fingerprint(roles: Roles, role: str, final: Final, of: str) -> None:
    """Raise CheckpointError unless `role` gives the logits that `final` was written with."""
    if not has_fingerprint(roles, role, final, of):
        raise CheckpointError(
            f"{final.path} does not fit: the {role} model here gives other logits than "
            f"{'it gave' if of == 'self' else 'the model that it was trained on gave'}. Train it "
            "again from this model, or point to the checkpoint that belongs to it"
        )
