"""Digest of parameters, to compare them bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def parameters_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the hexadecimal SHA-256 of names, types, shapes and bits, in the order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()
