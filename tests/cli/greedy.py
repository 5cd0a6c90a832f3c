"""A sampler from outside the package: greedy, token by token, without a cache.

It knows of the library what `Sampler` says: it is built as `Class(roles, params)` and returns
`SampledResponses`. As a server would, it knows nothing of critics and tells no log-probabilities.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.sampler import SamplingParams


class Greedy:
    is_exact = False

    def __init__(self, roles: Roles, params: SamplingParams) -> None:
        self.roles = roles
        self.params = params

    def sync(self, version: int) -> None:
        with Path("versions.txt").open("a") as file:
            file.write(f"{version} ")

    @torch.no_grad()
    def sample(
        self,
        prompts: Prompts,
        samples_per_prompt: int,
        generator: torch.Generator,
        share: torch.Tensor,
    ) -> SampledResponses:
        prompts = prompts.select(share).repeat(samples_per_prompt)
        tokens, mask = prompts.tokens, prompts.mask
        end = torch.tensor(list(self.params.end_token_ids), device=tokens.device)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for _ in range(self.params.max_response_tokens):
            hidden = self.roles.causal_lm.base_model(
                input_ids=tokens,
                attention_mask=mask.long(),
                position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
            ).last_hidden_state[:, -1]
            token = self.roles.head(hidden).argmax(-1, keepdim=True)
            tokens, mask = torch.cat([tokens, token], 1), torch.cat([mask, ~ended[:, None]], 1)
            ended = ended | torch.isin(token.squeeze(1), end)
        return SampledResponses(
            tokens=tokens,
            mask=mask,
            response_mask=mask[:, prompts.tokens.shape[1] :],
            ended=ended,
            logprobs=None,
            values=None,
            index=prompts.index,
        )
