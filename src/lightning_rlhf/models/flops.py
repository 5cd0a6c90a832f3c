"""Floating-point operations of a model's passes over tokens, from its sizes alone.

They are those of matrix products, two for a multiplication with its addition. For S positions of a
row, n positions in all, N of them wanted, and passes over several rows at a time:

    forward    2 i o n                    each linear layer of o outputs and i inputs
               2 r (i + o) n              each active adapter of rank r, beside the weight; where
                                          the kernels add it to the weight first, 2 r i o a pass
               4 a S^2                    attention of a = heads x head size, not its causal half
               see `DeltaRule`            linear attention
               2 d V N                    output layer of hidden size d and vocabulary V
    backward   2 i o n                    gradient of the input of a linear layer, where anything
                                          before it is trained
               2 i o n                    gradient of a weight that is trained: not under LoRA
               4 r (i + o) n              trained adapter: its gradients and the input's
               2 r (i + o) n              frozen adapter beside the weight: the input's
               twice the forward          attention, linear attention
               the forward once more      decoder layers under gradient checkpointing

With fast kernels the last decoder layer computes the N wanted positions, except for keys, values
and linear attention. Padding is not counted. Nor are norms, activations, softmax, embeddings,
scalar heads, triangular solves, the optimizer, and experts that a router chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from lightning_rlhf.models.layer_flops import Attention, DeltaRule, Matrix, Rows
from lightning_rlhf.models.roles import Roles

OUTWARD = ("o_proj", "out_proj", "down_proj")
"""Names of the linear layer of a block that reads what the others computed."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a model in one role."""

    matrices: Counter[Matrix]
    """Linear layers of the decoder layers, each with the number of its equals."""
    mixers: Counter[Attention | DeltaRule]
    """Attention of the decoder layers, each with the number of its equals."""
    hidden: int
    """Size of a hidden state; 0 without an output layer."""
    vocabulary: int
    """Number of logits; 0 without an output layer."""
    recomputes: bool
    """True if decoder layers are computed once more for the gradient."""
    merges: bool
    """True if the kernels may add an adapter to the weight."""

    def forward(self, rows: Rows) -> float:
        """Return the operations of the trunk's forward pass."""
        linear = sum(
            times * m.forward(rows.wanted if m.wanted_only else rows.count, rows.passes,
                              merges=self.merges)
            for m, times in self.matrices.items()
        )  # fmt: skip
        return linear + sum(times * m.forward(rows.lengths) for m, times in self.mixers.items())

    def backward(self, rows: Rows) -> float:
        """Return the operations of the trunk's backward pass, recomputation included."""
        linear = sum(
            times * m.backward(rows.wanted if m.wanted_only else rows.count, rows.passes,
                               merges=self.merges)
            for m, times in self.matrices.items()
        )  # fmt: skip
        mixing = sum(
            times * 2 * m.forward(rows.lengths) for m, times in self.mixers.items() if m.learns
        )
        return linear + mixing + (self.forward(rows) if self.recomputes else 0.0)

    def head(self, tokens: int) -> float:
        """Return the operations of the output layer's forward pass, or of its input's gradient."""
        return 2.0 * self.hidden * self.vocabulary * tokens

    def sampling(
        self, prompts: Int[Tensor, " B"], responses: Int[Tensor, " B"], samples_per_prompt: int = 1
    ) -> float:
        """Return the operations of sampling with a cache, by a sampler that reads a prompt once.

        The adapters are merged once where the kernels merge them. Every token is fed to the trunk
        but the last of its response.

        prompts, responses: number of tokens of each response's prompt, and of the response.
        """
        first, steps = prompts[::samples_per_prompt], responses - 1
        n, decoded = int(first.sum() + steps.sum()), int(steps.sum())
        contexts = float((steps * prompts + steps * (steps + 1) // 2).sum())
        linear = sum(
            times * (2.0 * m.inputs * m.outputs * n + self._sampled_adapters(m, n))
            for m, times in self.matrices.items()
        )
        mixing = sum(
            times * (m.forward(first) + m.step(contexts, decoded))
            for m, times in self.mixers.items()
        )
        return linear + mixing + self.head(int(responses.sum()))

    def _sampled_adapters(self, matrix: Matrix, n: int) -> float:
        ranks = sum(matrix.frozen_ranks + matrix.trained_ranks)
        if self.merges:
            return 2.0 * ranks * matrix.inputs * matrix.outputs
        return 2.0 * ranks * (matrix.inputs + matrix.outputs) * n


def role_flops(roles: Roles, role: str) -> Flops:
    """Return the operations of a role: the model with the role's adapters."""
    return model_flops(roles.causal_lm, roles.adapters(role), fast=roles.kernels.kind == "fast")


def reading(of_model: Callable[[], Flops]) -> Callable[[Int[Tensor, " B"], int], float]:
    """Return a function from (lengths of rows, forward passes) to the operations of a reward model.

    Its output is taken at the last token of each row. of_model: called once, at the first rows.
    """
    found = cache(of_model)
    return lambda lengths, passes: found().forward(Rows(lengths, len(lengths), passes))


def model_flops(model: PreTrainedModel, adapters: Collection[str] = (), *, fast: bool) -> Flops:
    """Return the operations of a model of any family, of its layers and their present sizes.

    adapters: names of the active adapters. fast: whether its layers are those of `kernels/`.
    """
    trunk: Any = model.base_model
    layers: list[Any] = [m for m in trunk.modules() if isinstance(m, GradientCheckpointingLayer)]
    layers = layers or [trunk]
    learns = any(p.requires_grad for p in model.get_input_embeddings().parameters())
    matrices: Counter[Matrix] = Counter()
    mixers: Counter[Attention | DeltaRule] = Counter()
    for layer in layers:
        skips = fast and layer is layers[-1]
        for name, block in layer.named_children():
            linear = dict(linear_layers(block))
            if not linear:
                continue
            last = next((n for n in OUTWARD if n in linear), [*linear][-1])
            is_delta = hasattr(block, "head_k_dim")
            found = [
                matrix(
                    linear[n],
                    adapters,
                    needs_input=learns,
                    wanted_only=skips and not is_delta and n not in ("k_proj", "v_proj"),
                )
                for n in linear
                if n != last
            ]
            learns = learns or any(m.learns for m in found)
            if is_delta:
                mixers[delta_rule(block, learns, fast=fast)] += 1
            elif "attn" in name or "attention" in name:
                mixers[Attention(attention_width(model), learns)] += 1
            found.append(
                matrix(
                    linear[last], adapters, needs_input=learns, wanted_only=skips and not is_delta
                )
            )
            learns = learns or found[-1].learns
            matrices.update(found)
    output = model.get_output_embeddings()
    return Flops(
        matrices=matrices,
        mixers=mixers,
        hidden=0 if output is None else output.in_features,
        vocabulary=0 if output is None else output.out_features,
        recomputes=bool(getattr(model, "recomputes", False)),
        merges=fast and model.dtype == torch.float32,
    )


def linear_layers(module: nn.Module, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the linear layers of a module with their names, each without the parts of its own."""
    if isinstance(module, nn.Linear | Conv1D | BaseTunerLayer):
        yield name, module
        return
    for child, part in module.named_children():
        yield from linear_layers(part, child)


def matrix(
    layer: Any, adapters: Collection[str], *, needs_input: bool, wanted_only: bool
) -> Matrix:
    """Return the sizes of a linear layer and of its active adapters."""
    ranks: dict[bool, list[int]] = {True: [], False: []}
    base = layer
    if isinstance(layer, BaseTunerLayer):
        base = layer.get_base_layer()
    if isinstance(layer, LoraLayer):
        for name in adapters:
            if name in layer.lora_A:
                inward = layer.lora_A[name]
                ranks[inward.weight.requires_grad].append(inward.out_features)
    outputs, inputs = (
        (base.nf, base.nx) if isinstance(base, Conv1D) else (base.out_features, base.in_features)
    )
    return Matrix(
        inputs=inputs,
        outputs=outputs,
        frozen_ranks=tuple(ranks[False]),
        trained_ranks=tuple(ranks[True]),
        is_trained=base.weight.requires_grad,
        needs_input=needs_input,
        wanted_only=wanted_only,
    )


def attention_width(model: PreTrainedModel) -> int:
    """Return the number of attention heads times their size; 0 for RWKV, which has none."""
    config = model.config.get_text_config()
    if not hasattr(config, "num_attention_heads"):
        return 0
    heads = int(config.num_attention_heads)
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def delta_rule(block: Any, learns: bool, *, fast: bool) -> DeltaRule:
    """Return the sizes of a layer of linear attention."""
    return DeltaRule(
        heads=block.num_v_heads,
        key=block.head_k_dim,
        value=block.head_v_dim,
        taps=block.conv1d.out_channels * block.conv1d.kernel_size[0],
        learns=learns,
        short_chunks=fast and block.conv1d.weight.device.type == "cpu",
    )
