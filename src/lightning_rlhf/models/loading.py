"""Loading of a language model and its tokenizer from a hub id, a folder or a configuration.

bitsandbytes is imported for a quantised model alone: not every machine has a build of it.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rlhf.core.config import ClassifierConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError, first_line
from lightning_rlhf.core.memory import total_memory
from lightning_rlhf.models import checkpoint, heads
from lightning_rlhf.models.config import ModelConfig

DESCRIPTION = ("config.json", "*.py")
"""Patterns of the files on the hub that describe a model: configuration, and code with it."""


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that are recomputed one by one. Raises ConfigError where there are none."""
    found = [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not found:
        raise ConfigError(
            f"model.gradient_checkpointing=true, but {model.config.model_type} has no layers "
            "that can be recomputed; allowed: false"
        )
    return found


def load_tokenizer(config: ModelConfig, final: Path | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `final` (of an earlier stage); where it has none, the preset's.

    Raises CheckpointError or HubError where there is none, or it cannot be loaded.
    """
    if final is not None and not (final / "tokenizer_config.json").is_file():
        final = None
    source = str(final or config.tokenizer or config.name_or_path)
    key = "model.tokenizer" if config.tokenizer else "model.name_or_path"
    revision = None if final or config.tokenizer else config.revision
    folder = checkpoint.local_folder(source, key, revision)
    trusts = {"trust_remote_code": config.trust_remote_code}
    with checkpoint.naming(source, key):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **trusts)
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.added_tokens_decoder):
        advice = "set model.tokenizer to a folder or hub id that does"
        raise CheckpointError(f"{source} holds no tokenizer; {advice}")
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
        reason = "is for frozen weights; all are trained here, in float32"
        warnings.warn(f"model.dtype={config.dtype} {reason}", stacklevel=2)
    if weights is None and config.from_config is not None:
        model = random_model(config, seed).to(dtype).eval()
    else:
        source, key = weights or str(config.name_or_path), "model.name_or_path"
        folder = checkpoint.local_folder(source, key, None if weights else config.revision)
        checkpoint.check_weights(folder)
        model = read_weights(transformers.AutoModelForCausalLM, folder, config, dtype, source, key)
        heads.restore_padding(model)
    model.recomputes = config.gradient_checkpointing
    return model.eval().requires_grad_(trainable)


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """Return the language model on torch's device `meta`, which has shapes and no memory.

    Of a model on the hub the configuration alone is downloaded.

    Raises ConfigError, CheckpointError or HubError.
    """
    if config.from_config is not None:
        with described_sizes(config.from_config) as sizes, torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(sizes)  # type: ignore[no-any-return]
    source, key = str(config.name_or_path), "model.name_or_path"
    folder = checkpoint.local_folder(source, key, config.revision, DESCRIPTION)
    checkpoint.check_references(folder / "config.json")
    trusts = {"trust_remote_code": config.trust_remote_code}
    with checkpoint.naming(source, key), torch.device("meta"):
        described = transformers.AutoConfig.from_pretrained(folder, **trusts)
        return transformers.AutoModelForCausalLM.from_config(described, **trusts)  # type: ignore[no-any-return]


@contextmanager
def described_sizes(from_config: Mapping[str, Any]) -> Iterator[PretrainedConfig]:
    """Yield the configuration of random weights, unless `config_faults` names something in it.

    Any exception of the block becomes a ConfigError that names model.from_config.
    """
    try:
        for key, value, allowed in checkpoint.config_faults(from_config):
            raise ValueError(f"{key} is {value!r}{allowed}")
        yield transformers.AutoConfig.for_model(**from_config)
    except Exception as error:  # inconsistent sizes raise various errors in transformers
        message = " ".join(str(error).split())[:300] or repr(error)
        raise ConfigError(f"model.from_config: {message}") from error


def random_model(config: ModelConfig, seed: int) -> PreTrainedModel:
    """Return the model of `from_config` with random weights.

    Its sizes are checked before memory is allocated. Raises ConfigError.
    """
    assert config.from_config is not None
    shapes = {name: p.shape for name, p in empty_model(config).named_parameters()}
    count, total = sum(s.numel() for s in shapes.values()), total_memory(torch.device("cpu"))
    with described_sizes(config.from_config) as sizes:
        if empty := [f"{name} has the shape {(*s,)}" for name, s in shapes.items() if 0 in s]:
            raise ValueError(f"{empty[0]}; allowed: sizes of 1 and more")
        if 4 * count > total:  # transformers makes random weights in float32
            raise ValueError(
                f"it describes {count:.3g} parameters, {4 * count / 2**30:.3g} GiB in float32, and "
                f"this machine has {total / 2**30:.3g} GiB; allowed: smaller sizes"
            )
        torch.manual_seed(seed)
        attention, trusts = config.attn_implementation, config.trust_remote_code
        model = transformers.AutoModelForCausalLM.from_config(
            sizes, attn_implementation=attention, trust_remote_code=trusts
        )
        with torch.no_grad():  # an uneven number of heads per key-value head fails only here
            model.eval()(torch.zeros((1, 2), dtype=torch.long))
    return model  # type: ignore[no-any-return]


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

    Raises CheckpointError where weights are missing, ConfigError without a needed bitsandbytes.
    """
    quantization, settings = config.quantization, None
    if quantization != "none":
        try:
            import bitsandbytes  # noqa: F401
        except Exception as error:  # a build for another machine raises errors of any type
            raise ConfigError(
                f"model.quantization is '{quantization}', but bitsandbytes cannot be imported "
                f"({first_line(error)}); allowed: none, or install bitsandbytes"
            ) from error
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        options: dict[str, Any] = {"int8": {"load_in_8bit": True}, "nf4": nf4}
        settings = transformers.BitsAndBytesConfig(**options[quantization])
    with checkpoint.naming(source, key):
        model, info = auto.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            quantization_config=settings,
            **more,
        )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise CheckpointError(f"{source} lacks weights: {missing}; they would be random")
    if quantization_of(model) in ("int8", "nf4"):
        use_exact_layers(model)
    return model  # type: ignore[no-any-return]


def quantization_of(model: PreTrainedModel) -> str:
    """Return the kind of a model's weights: none, int8, nf4, or another method's name."""
    if not getattr(model, "is_quantized", False):
        return "none"
    config = model.config.quantization_config
    if getattr(config, "load_in_8bit", False):
        return "int8"
    return str(getattr(config, "bnb_4bit_quant_type", type(config).__name__))


def scale_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of the scales beside a quantised parameter; 0 of any other."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        return int(state.absmax.nbytes)
    return 4 * len(parameter) if parameter.dtype == torch.int8 else 0


def use_exact_layers(model: nn.Module) -> None:
    """Let the layers of bitsandbytes in `model` compute with their weights, dequantised.

    int8: see `int8_linear`. nf4: packing for CPUs, which limits sizes and has no gradient, is off.
    """
    import bitsandbytes

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.forward = partial(int8_linear, module)


def int8_linear(layer: Any, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
    """Compute a linear layer of 8-bit weights: y = x W^T + b, W = codes * scale / 127.

    Departs from LLM.int8(), https://arxiv.org/abs/2208.07339, which bitsandbytes' own layer
    computes: that also rounds activations to 8 bits, except columns in which any row of the batch
    exceeds a threshold. There a text's log-probabilities depend on the texts beside it, and the
    probability ratio of a policy that has not changed is not 1.
    """
    if layer.weight.SCB is not None:
        layer.init_8bit_state()
    scales = layer.state.SCB.to(x.device)  # moving a whole model moves the codes alone
    y: Tensor = _Int8Product.apply(x, layer.weight.data, scales)  # type: ignore
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


class _Int8Product(torch.autograd.Function):
    """x W^T, and the gradient of x; W is made of its codes for each product and is not kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*n i"], codes: Int8[Tensor, "o i"], scales: Float[Tensor, " o"]
    ) -> Float[Tensor, "*n o"]:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, _dequantised(codes, scales).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "*n o"]) -> tuple[Tensor, None, None]:
        return dy @ _dequantised(*ctx.saved_tensors).to(dy.dtype), None, None


def _dequantised(codes: Int8[Tensor, "o i"], scales: Float[Tensor, " o"]) -> Float[Tensor, "o i"]:
    from bitsandbytes.functional import int8_vectorwise_dequant

    return int8_vectorwise_dequant(codes, scales)
