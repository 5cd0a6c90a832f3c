"""The validated configuration of a sequence classifier. Values: conf/reward/model.yaml."""

from typing import Annotated

from pydantic.dataclasses import dataclass

from lightning_rlhf.core.config import DType, Quantization
from lightning_rlhf.core.validation import (
    STRICT,
    NonNegativeInt,
    PositiveInt,
    Text,
    described,
)

PAIR = "pair"
"""As a chat template: tokenizer(prompt, response)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClassifierConfig:
    """Which sequence classifier scores, and how it is loaded and reads a text."""

    name_or_path: Annotated[Text, described("a folder or hub id")]
    revision: Text | None
    tokenizer: Text | None
    """Hub id or folder; None is the model's own."""
    chat_template: Text | None
    """A Jinja file, PAIR for tokenizer(prompt, response), or None for the tokenizer's own."""
    label: Annotated[
        NonNegativeInt | Text | None, described("a number, the name of an output, or null")
    ]
    """Number or name of the output that is the reward; None where there is only one."""
    dtype: DType | None
    """None is as it was trained by stage=rm, or as it is stored."""
    quantization: Quantization
    attn_implementation: Text | None
    trust_remote_code: bool
    max_tokens: PositiveInt | None
    """Largest number of tokens of a text; None is as many as it has positions for."""
