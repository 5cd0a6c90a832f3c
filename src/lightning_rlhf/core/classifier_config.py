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
"""Value of `chat_template` that calls tokenizer(prompt, response) instead of a template."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClassifierConfig:
    """Sequence classifier that scores texts: how it is loaded and how it reads a text."""

    name_or_path: Annotated[Text, described("a folder or hub id")]
    revision: Text | None
    tokenizer: Text | None
    """Hub id or folder of the tokenizer; None is the model's own."""
    chat_template: Text | None
    """Path of a Jinja file, PAIR for tokenizer(prompt, response), or None for the tokenizer's own
    template."""
    label: Annotated[
        NonNegativeInt | Text | None, described("a number, the name of an output, or null")
    ]
    """Number or name of the output that is the reward; None where there is only one."""
    dtype: DType | None
    """Type of the weights; None is the type of the training by stage=rm, or that of the file."""
    quantization: Quantization
    attn_implementation: Text | None
    trust_remote_code: bool
    max_tokens: PositiveInt | None
    """Largest number of tokens of a text; None is the model's number of positions."""
