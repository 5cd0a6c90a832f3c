"""Tokenizers in which every ASCII character is one token, so that lengths can be read off."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.core.validation import build
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.runs.console import HOME

SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|eot|>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's: the end marker is followed by a newline, which is no part of a response."""

LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    def make(template: str | None, **special_tokens: str) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: i for i, token in enumerate(SPECIALS + alphabet)}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(SPECIALS)
        if "bos_token" in special_tokens:
            backend.post_processor = processors.TemplateProcessing(
                single="<|bos|> $A", special_tokens=[("<|bos|>", vocabulary["<|bos|>"])]
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def chatml(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML, eos_token="<|eos|>", pad_token="<|pad|>")


@pytest.fixture
def llama(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer(LLAMA, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>")


@pytest.fixture
def ids() -> Callable[..., list[int]]:
    """Token ids of pieces, each a special token or plain ASCII text."""

    def of(tokenizer: PreTrainedTokenizerFast, *pieces: str) -> list[int]:
        tokens: list[str] = []
        for piece in pieces:
            characters = piece.replace(" ", "\u0120").replace("\n", "\u010a")
            tokens += [piece] if piece in SPECIALS else list(characters)
        return tokenizer.convert_tokens_to_ids(tokens)

    return of


@pytest.fixture
def make_config() -> Callable[..., DataConfig]:
    def make(**changes: Any) -> DataConfig:
        preset = yaml.safe_load((HOME / "conf" / "data" / "files.yaml").read_text())
        limits = {"max_prompt_tokens": 100, "max_response_tokens": 100, "max_val_rows": None}
        return build(DataConfig, preset | limits | changes, "data")

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows, one JSON object a line, and gives the path."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
