from __future__ import annotations

import hashlib

import pytest
import torch

from lightning_rlhf.callbacks.digest import parameters_digest

STATE = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor([[3]], dtype=torch.int8)}


def test_it_is_that_of_the_bits_in_the_order_of_the_names() -> None:
    # int8 3; 1.0f = 0x3f800000 and 2.0f = 0x40000000, little end first.
    written = b"a torch.int8 [1, 1]\n\x03b torch.float32 [2]\n\0\0\x80\x3f\0\0\0\x40"
    assert parameters_digest(STATE) == hashlib.sha256(written).hexdigest()
    assert parameters_digest(dict(reversed(STATE.items()))) == parameters_digest(STATE)


@pytest.mark.parametrize(
    "other",
    [
        STATE | {"b": torch.tensor([1.0, 2.0 + 2**-22])},  # the last bit
        STATE | {"b": torch.tensor([1.0, 2.0]).bfloat16()},
        STATE | {"b": torch.tensor([[1.0, 2.0]])},
        {"c": STATE["b"], "a": STATE["a"]},
        {"a": STATE["a"]},
    ],
)
def test_anything_else_has_another(other: dict[str, torch.Tensor]) -> None:
    assert parameters_digest(other) != parameters_digest(STATE)


def test_it_reads_what_is_not_contiguous_and_what_learns() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert parameters_digest({"x": x.T.requires_grad_()}) == parameters_digest(
        {"x": x.T.contiguous()}
    )
