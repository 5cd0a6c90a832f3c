"""Log-probabilities of the response tokens that a batch of given texts is trained on."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.core.masking import picker
from lightning_rlhf.models.roles import Roles


def target_logprobs(
    roles: Roles, tokens: Int[Tensor, "B S"], target_mask: Bool[Tensor, "B S"]
) -> Float[Tensor, " N"]:
    """Return the log-probability of each target token under the active role, row after row, nats.

    target_mask: True on the tokens to be predicted, none of which is the first of its row. Where it
        is on the CPU, the device of the tokens is not waited for.
    """
    mask = target_mask[:, 1:]
    hidden = roles.hidden_at(tokens[:, :-1], mask)
    logprobs, _ = token_logprobs(
        hidden, picker(mask)(tokens[:, 1:]), roles.head,
        temperature=1.0, vocab_size=roles.vocab_size, frozen_head=not roles.head_is_trained,
        row_multiple=roles.row_multiple,
    )  # fmt: skip
    return logprobs
