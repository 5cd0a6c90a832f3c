"""Models of some ten thousand random weights, and prompts of uneven lengths."""

import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.models.config import POLICY, VALUE, LoRASettings
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams

from ..models.conftest import _calm as _calm
from ..models.conftest import build_model

VOCABULARY = 61
END = (1, 2, 3, 4, 5, 6)
"""Many end tokens, so that responses of random models end here and there."""
FAMILIES = ("qwen3", "qwen3_5_text", "gpt2")
"""The last has learned positions, which show a row that was shifted as a whole."""
ADAPTER_STD = {"qwen3_5_text": 0.05}
"""Its recurrence magnifies rounding. The difference from the reference is still as large."""


def sample(
    roles: Roles, prompts: Prompts, *, samples_per_prompt: int = 1, seed: int = 3, **changes: Any
) -> SampledResponses:
    """Responses of the acting role by the native sampler, which reads the value head too."""
    generator = changes.pop("generator", None) or torch.Generator().manual_seed(seed)
    value_head = changes.pop("value_head", roles.heads[VALUE])
    settings: dict[str, Any] = {"max_response_tokens": 24, "temperature": 0.7, "end_token_ids": END}
    sampler = NativeSampler(roles, SamplingParams(**(settings | changes)), value_head)
    return sampler.sample(prompts, samples_per_prompt, generator, torch.arange(len(prompts)))


@pytest.fixture(params=FAMILIES)
def roles(request: pytest.FixtureRequest) -> Roles:
    """A policy that differs from its reference, and a critic that is not zero."""
    is_mamba = request.param == "mamba"  # it has a state of its own in place of the cache
    shape: dict[str, Any] = {"state_size": 8} if is_mamba else {}
    roles = Roles(build_model(request.param, vocab_size=VOCABULARY, **shape))
    targets = ["in_proj"] if is_mamba else "all-linear"
    roles.add_adapter(POLICY, LoRASettings(r=4, alpha=8, target_modules=targets))
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=ADAPTER_STD.get(request.param, 0.2))
    roles.heads[VALUE] = ScalarHeads(32, 1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        roles.heads[VALUE].linear.weight.normal_(std=0.2, generator=generator)
    return roles


@pytest.fixture
def make_prompts() -> Callable[..., Prompts]:
    def make(*rows: list[int], extra: int = 0, pad: int = 1) -> Prompts:
        """Left-padded to the longest and `extra` more, with an id that is also an end token."""
        width = max(map(len, rows)) + extra
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        mask = torch.arange(width) >= width - torch.tensor([len(row) for row in rows])[:, None]
        return Prompts(tokens=tokens, mask=mask, index=10 + torch.arange(len(rows)))

    return make


@pytest.fixture
def prompts(make_prompts: Callable[..., Prompts]) -> Prompts:
    """1, both filler and end token, is also in two prompts: only the mask shows which."""
    return make_prompts(
        [7, 8, 9, 10, 11, 12], [13], [1, 14, 1], [15, 16, 17, 1], [18, 19], [20, 21, 22, 23, 24]
    )


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Let the next rollouts use these uniform numbers, [B, T], in place of random ones."""

    def use(uniforms: Tensor) -> None:
        def rand(*size: int, **kwargs: Any) -> Tensor:
            assert size == tuple(uniforms.shape)
            return uniforms.clone()

        monkeypatch.setattr(torch, "rand", rand)

    return use


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    """58 tokens of one letter or two, some of which overlap; the model knows 61."""
    letters = list(string.ascii_lowercase)
    pairs = ["ab", "xy", "ya", "bq", "he", "el", "lo", "za"]
    words = ["<eos>", *letters, *string.ascii_uppercase[:23], *pairs]
    tokenizer: Any = Tokenizer(models.BPE(
        vocab={word: i for i, word in enumerate(words)}, merges=[(p[0], p[1]) for p in pairs]
    ))  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.get_vocab_size() == 58
    return ChatFormat(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"), {})


@pytest.fixture
def crowd(make_prompts: Callable[..., Prompts]) -> Prompts:
    """Many prompts, so that every text is sampled."""
    return make_prompts(*[[7 + i % 50, 3 + i % 40] for i in range(120)])
