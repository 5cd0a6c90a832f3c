"""Loading of a language model and its tokenizer from a hub id, a folder or a configuration."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rlhf.core.config import ClassifierConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.memory import total_memory
from lightning_rlhf.models.checkpoint import (
    check_references,
    check_weights,
    config_faults,
    local_folder,
    naming,
)
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.models.heads import restore_padding
from lightning_rlhf.models.quantization import (
    quantization_config,
    quantization_of,
    use_exact_layers,
)

DESCRIPTION = ("config.json", "*.py")
"""Patterns of the files on the hub that describe a model: its configuration, and code that may come
with it."""
RoleContext = Callable[[], AbstractContextManager[None]]


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that are recomputed one by one. Raises ConfigError where there are none."""
    found = [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not found:
        raise ConfigError(
            f"model.gradient_checkpointing=true, but {model.config.model_type} has no layers "
            "that can be recomputed; allowed: false"
        )
    return found


def recompute(model: PreTrainedModel) -> None:
    """Mark a model whose layers are to be recomputed. Raises ConfigError where it has none."""
    layers_of(model)
    model.recomputes = True


def checkpoint_layers(model: PreTrainedModel, current_role: Callable[[], RoleContext]) -> None:
    """Let the model's layers keep their inputs alone, and recompute the rest for the gradient.

    transformers' own way is for models in training mode, which have dropout.

    current_role: returns the context that a layer computed now must be recomputed in.
    """

    def checkpointed(layer: GradientCheckpointingLayer, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(layer).forward, layer)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        role = current_role()
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), role()),
            preserve_rng_state=False, **kwargs,  # there is no dropout
        )  # fmt: skip

    for layer in layers_of(model):
        layer.forward = partial(checkpointed, layer)


def load_tokenizer(config: ModelConfig, checkpoint: Path | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `checkpoint` (an earlier stage), or the preset's where it has none.

    Raises CheckpointError or HubError where there is none, or it cannot be loaded.
    """
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
    """Return the language model, in eval mode (no dropout), with every weight frozen or trainable.

    weights: folder or hub id that replaces the preset's own.
    trainable: True for full fine-tuning, which uses fp32 weights independent of `model.dtype`,
        because bf16 weights round small updates away.
    seed: seed of random weights, for models described by `model.from_config`.

    Raises ConfigError, CheckpointError or HubError.
    """
    dtype = torch.float32 if trainable else getattr(torch, config.dtype)
    if trainable and config.dtype != "float32":
        warnings.warn(
            f"model.dtype={config.dtype} is for frozen weights; all weights are trained here, in "
            "float32",
            stacklevel=2,
        )
    if trainable and config.quantization != "none":
        raise ConfigError(
            f"model.quantization={config.quantization} cannot be fine-tuned in full; allowed: "
            "finetune=lora, or model.quantization=none"
        )
    if weights is None and config.from_config is not None:
        with naming_sizes():
            model = _random_model(config, seed).to(dtype).eval()
            with torch.no_grad():  # an uneven number of heads per key-value head fails only here
                model(torch.zeros((1, 2), dtype=torch.long))
    else:
        source = weights or str(config.name_or_path)
        folder = local_folder(source, "model.name_or_path", None if weights else config.revision)
        check_weights(folder)
        model = read_weights(
            AutoModelForCausalLM, folder, config, dtype, source, "model.name_or_path"
        )
        restore_padding(model)
    if config.gradient_checkpointing:
        recompute(model)
    return model.eval().requires_grad_(trainable)


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """Return the language model on torch's device `meta`, which has shapes and no memory.

    Of a model on the hub the configuration alone is downloaded.

    Raises ConfigError, CheckpointError or HubError.
    """
    if config.from_config is not None:
        with naming_sizes(), torch.device("meta"):
            described = described_sizes(config.from_config)
            return AutoModelForCausalLM.from_config(described)  # type: ignore[no-any-return]
    source, key = str(config.name_or_path), "model.name_or_path"
    folder = local_folder(source, key, config.revision, DESCRIPTION)
    check_references(folder / "config.json")
    trusts = {"trust_remote_code": config.trust_remote_code}
    with naming(source, key), torch.device("meta"):
        described = AutoConfig.from_pretrained(folder, **trusts)
        return AutoModelForCausalLM.from_config(described, **trusts)  # type: ignore[no-any-return]


@contextmanager
def naming_sizes() -> Iterator[None]:
    """Convert any exception of the block into a ConfigError that names model.from_config."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # inconsistent sizes raise various errors in transformers
        message = " ".join(str(error).split())[:300] or repr(error)
        raise ConfigError(f"model.from_config: {message}") from error


def described_sizes(from_config: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration of random weights. Raises ConfigError for too many layers."""
    for key, value, allowed in config_faults(from_config):
        raise ConfigError(f"model.from_config.{key} is {value!r}{allowed}")
    return AutoConfig.for_model(**from_config)  # type: ignore[no-any-return]


def _random_model(config: ModelConfig, seed: int) -> PreTrainedModel:
    """Return the model of `from_config` with random weights.

    Its sizes are checked before memory is allocated. Raises ConfigError.
    """
    assert config.from_config is not None
    build = partial(
        AutoModelForCausalLM.from_config,
        described_sizes(config.from_config),
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    with torch.device("meta"):
        shapes = {name: tuple(x.shape) for name, x in build().named_parameters()}
    for name, shape in shapes.items():
        if 0 in shape:
            raise ConfigError(
                f"model.from_config gives {name} the shape {shape}; allowed: sizes of 1 and more"
            )
    count, there = sum(map(math.prod, shapes.values())), total_memory(torch.device("cpu"))
    if 4 * count > there:  # transformers makes random weights in float32
        raise ConfigError(
            f"model.from_config describes {count:.3g} parameters, {4 * count / 2**30:.3g} GiB in "
            f"float32, and this machine has {there / 2**30:.3g} GiB; allowed: smaller sizes"
        )
    torch.manual_seed(seed)
    return build()  # type: ignore[no-any-return]


def read_weights(
    auto: Any,
    folder: Path,
    config: ModelConfig | ClassifierConfig,
    dtype: torch.dtype,
    source: str,
    key: str,
    **more: Any,
) -> PreTrainedModel:
    """Return the model in `folder`, loaded by the transformers class `auto`.

    source, key: hub id or folder as configured, and its configuration key, for error messages.
    more: further arguments of `from_pretrained`.

    Raises CheckpointError where weights are missing.
    """
    with naming(source, key):
        model, info = auto.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            quantization_config=quantization_config(config.quantization, dtype),
            **more,
        )
    if info["missing_keys"]:
        raise CheckpointError(
            f"{source} lacks weights: {', '.join(sorted(info['missing_keys'])[:5])}; they would be "
            "random"
        )
    if quantization_of(model) in ("int8", "nf4"):
        use_exact_layers(model)
    return model  # type: ignore[no-any-return]
