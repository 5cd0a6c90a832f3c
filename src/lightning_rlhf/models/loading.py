"""From a hub id, a folder or a configuration to a model and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_rlhf.core.errors import CheckpointError, ConfigError, HubError
from lightning_rlhf.models.config import ModelConfig


def load_tokenizer(config: ModelConfig, checkpoint: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of `checkpoint` (an earlier stage's final/), else the preset's."""
    source = str(checkpoint or config.tokenizer or config.name_or_path)
    with naming(source, "model.tokenizer" if config.tokenizer else "model.name_or_path"):
        return AutoTokenizer.from_pretrained(
            source,
            revision=None if checkpoint or config.tokenizer else config.revision,
            trust_remote_code=config.trust_remote_code,
        )


def load_causal_lm(
    config: ModelConfig, weights: str | None = None, *, trainable: bool, seed: int
) -> PreTrainedModel:
    """The language model, in eval mode (no dropout) and with every weight frozen or trainable.

    weights: a folder or hub id that replaces the preset's own.
    trainable: full fine-tuning, which keeps fp32 weights whatever `model.dtype` says, because
        bf16 weights round small updates away.
    """
    dtype = torch.float32 if trainable else getattr(torch, config.dtype)
    if trainable and config.quantization != "none":
        raise ConfigError(
            f"model.quantization={config.quantization} cannot be fine-tuned in full; allowed: "
            "finetune=lora, or model.quantization=none"
        )
    if weights is None and config.from_config is not None:
        torch.manual_seed(seed)
        model_config = AutoConfig.for_model(**config.from_config)
        model = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=config.attn_implementation
        ).to(dtype)
    else:
        source = weights or str(config.name_or_path)
        with naming(source, "model.name_or_path"):
            model = AutoModelForCausalLM.from_pretrained(
                source,
                revision=None if weights else config.revision,
                dtype=dtype,
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
                quantization_config=_quantization(config),
            )
    return model.eval().requires_grad_(trainable)


def _quantization(config: ModelConfig) -> BitsAndBytesConfig | None:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    match config.quantization:
        case "int8":
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
        case "nf4":
            return BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=getattr(torch, config.dtype),
            )
    return None


@contextmanager
def naming(source: str, key: str) -> Iterator[None]:
    """Turns the loading library's failures into one short error that names the source."""
    if source.startswith(("/", ".", "~")) and not Path(source).is_dir():
        raise CheckpointError(
            f"{key}={source}: no such folder; allowed: a folder with config.json, weights and "
            "tokenizer, or a hub id"
        )
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        if Path(source).is_dir():
            raise CheckpointError(f"{source} cannot be loaded: {_first_line(error)}") from error
        raise HubError(
            f"{source!r} is neither a local folder nor reachable on the hub "
            f"({_first_line(error)}). Download it on a machine with access "
            f"(hf download {source} --local-dir FOLDER) and set {key}=FOLDER"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
