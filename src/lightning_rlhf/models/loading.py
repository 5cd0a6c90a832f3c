"""From a hub id, a folder or a configuration to a model and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bitsandbytes
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_rlhf.core.errors import CheckpointError, ConfigError, HubError
from lightning_rlhf.models.config import ModelConfig, Quantization


def load_tokenizer(config: ModelConfig, checkpoint: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of `checkpoint` (an earlier stage), where it has one, else the preset's."""
    if checkpoint is not None and not (checkpoint / "tokenizer_config.json").is_file():
        checkpoint = None
    source = str(checkpoint or config.tokenizer or config.name_or_path)
    key = "model.tokenizer" if config.tokenizer else "model.name_or_path"
    folder = local_folder(source, key, None if checkpoint or config.tokenizer else config.revision)
    with naming(source, key):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code
        )
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.added_tokens_decoder):
        raise CheckpointError(
            f"{source} holds no tokenizer; set model.tokenizer to a folder or hub id that does"
        )
    return tokenizer


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
        try:
            model_config = AutoConfig.for_model(**config.from_config)
        except (ValueError, TypeError, StrictDataclassError) as error:
            message = " ".join(str(error).split())[:300]
            raise ConfigError(f"model.from_config: {message}") from error
        model = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=config.attn_implementation
        ).to(dtype)
    else:
        source = weights or str(config.name_or_path)
        folder = local_folder(source, "model.name_or_path", None if weights else config.revision)
        with naming(source, "model.name_or_path"):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
                quantization_config=quantization_config(config.quantization, dtype),
            )
        if info["missing_keys"]:
            raise CheckpointError(
                f"{source} lacks weights: {', '.join(sorted(info['missing_keys'])[:5])}"
            )
    leave_unpacked(model)
    return model.eval().requires_grad_(trainable)


def leave_unpacked(model: PreTrainedModel) -> None:
    """Keep nf4 from its packing for CPUs, which takes only multiples of 32 outputs.

    It passes no gradient on either.
    """
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]


def local_folder(source: str, key: str, revision: str | None) -> Path:
    """`source` where it is a folder, else the hub's snapshot of it; asks the hub once."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    with naming(source, key):
        return Path(snapshot_download(source, revision=revision, allow_patterns=FILES))


def quantization_config(
    quantization: Quantization, dtype: torch.dtype
) -> BitsAndBytesConfig | None:
    """How bitsandbytes is to pack the weights: int8 (LLM.int8()) or nf4 (QLoRA's).

    dtype: in which nf4 computes.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    match quantization:
        case "int8":
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
        case "nf4":
            return BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=dtype,
            )
    return None


@contextmanager
def naming(source: str, key: str) -> Iterator[None]:
    """Turns the loading library's failures into one short error that names the source."""
    if source.startswith(("/", ".", "~")) and not Path(source).expanduser().is_dir():
        raise CheckpointError(
            f"{key}={source}: no such folder; allowed: a folder with config.json, weights and "
            "tokenizer, or a hub id"
        )
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, UserWarning) as error:
        if Path(source).expanduser().is_dir():
            raise CheckpointError(f"{source} cannot be loaded: {_first_line(error)}") from error
        raise HubError(
            f"{source!r} is neither a local folder nor reachable on the hub "
            f"({_first_line(error)}). Download it on a machine with access "
            f"(hf download {source} --local-dir FOLDER) and set {key}=FOLDER"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
