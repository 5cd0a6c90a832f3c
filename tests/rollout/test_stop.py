"""Texts that end a response, in a vocabulary whose tokens hold one letter or two."""

import torch

from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.sampler import SamplingParams

from .conftest import sample

TEXTS = ("x", "ab", "hel")
"""A letter, two that may be one token or two or the ends of others, and three."""


def roll_out(roles: Roles, prompts: Prompts, chat: ChatFormat, *texts: str) -> SampledResponses:
    with roles.use_role(POLICY):
        return sample(
            roles, prompts, max_response_tokens=20, temperature=2.0,
            end_token_ids=chat.end_token_ids, stop_strings=texts, tokenizer=chat.tokenizer,
        )  # fmt: skip


def test_a_response_ends_where_the_text_first_appears(
    roles: Roles, crowd: Prompts, chat: ChatFormat
) -> None:
    """The same draws as without, cut after the token with which a text is complete."""
    free, cut = roll_out(roles, crowd, chat), roll_out(roles, crowd, chat, *TEXTS)
    width, stopped = cut.response_mask.shape[1], 0
    for i in range(len(crowd)):
        said = [int(token) for token in free.responses[i][free.response_mask[i]]]
        # Ids that the tokenizer does not know are no text, and no text goes on over them.
        last_unknown = [max((k for k in range(n) if said[k] > 57), default=-1)
                        for n in range(1, len(said) + 1)]  # fmt: skip
        ends = [
            n for n in range(1, len(said) + 1)
            if any(text in chat.tokenizer.decode(said[last_unknown[n - 1] + 1 : n])
                   for text in TEXTS)
        ]  # fmt: skip
        length = ends[0] if ends else len(said)
        stopped += bool(ends)
        assert cut.responses[i, :length].tolist() == said[:length]
        assert cut.response_mask[i].tolist() == [t < length for t in range(width)]
        assert bool(cut.ended[i]) == (bool(ends) or said[-1] in chat.end_token_ids)
        assert not cut.mask[i, cut.tokens.shape[1] - width + length :].any()
        assert not cut.logprobs[i, length:].any()
        assert not cut.values[i, length:].any()
    assert 20 < stopped < 120
    assert cut.ended.sum() > free.ended.sum()


def test_ids_beyond_the_tokenizer_end_nothing(chat: ChatFormat) -> None:
    """Models have more embeddings than their tokenizers have tokens."""
    params = SamplingParams(
        max_response_tokens=1, temperature=1.0, end_token_ids=chat.end_token_ids,
        stop_strings=("x",), tokenizer=chat.tokenizer,
    )  # fmt: skip
    assert (stop := params.stop) is not None
    x = chat.tokenizer.convert_tokens_to_ids("x")
    rows = torch.tensor([[60, x], [x, 60], [59, 58]])
    assert stop(rows, None).tolist() == [True, False, False]
