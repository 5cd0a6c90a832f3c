"""What is told of a sequence classifier. The values live in conf/reward/model.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rlhf.core.config import DType, Quantization

PAIR = "pair"
"""As a chat template: tokenizer(prompt, response)."""


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Which one, and how it is loaded and read. The reward that it is has the bounds."""

    name_or_path: str
    revision: str | None
    tokenizer: str | None
    """Hub id or folder; None is the model's own."""
    chat_template: str | None
    """A Jinja file, PAIR for tokenizer(prompt, response), or None for the tokenizer's own."""
    label: int | str | None
    """Which of several outputs is the reward, by number or name; None where there is one."""
    dtype: DType | None
    """None is as it was trained by stage=rm, or as it is stored."""
    quantization: Quantization
    attn_implementation: str | None
    trust_remote_code: bool
    max_tokens: int | None
    """None is as many as it has positions for."""
