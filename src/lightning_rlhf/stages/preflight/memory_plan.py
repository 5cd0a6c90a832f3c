"""The memory that a run will need, by role, against what its device has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn
from transformers import PretrainedConfig

from lightning_rlhf.core.device_memory import available_memory
from lightning_rlhf.core.logprobs import CHUNK_ELEMENTS
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.io.storage import readable
from lightning_rlhf.kernels.products import computing_dtype
from lightning_rlhf.models.build_roles import SAMPLING_BYTES, cache_bytes
from lightning_rlhf.models.checkpointing import layers_of
from lightning_rlhf.models.copies import copied_bytes, linear_layers
from lightning_rlhf.models.quantization import scale_bytes
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.stages.preflight.check import Check, Verdict
from lightning_rlhf.stages.preflight.parameters import by_role

Planned = SFTModule | RewardModule | DPOModule | PPOModule
"""Modules whose memory is planned."""
LOGITS_COPIES = 3
"""Number of fp32 tensors of the size of the logits that exist at once: the logits, their softmax,
and one in between."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one role, or of one phase of a run."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Two moments of AdamW for each trained number, and with ema_decay its average."""
    activations: int = 0
    """Numbers kept for the backward pass, or of one layer where there is none."""
    logits: int = 0
    cache: int = 0
    """Keys, values and states of linear attention, and the tokens that are sampled."""

    @property
    def total(self) -> int:
        """Return the sum of all columns."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a run: of each role, while sampling, and of an update by its micro-batch."""

    roles: Mapping[str, Bytes]
    rollout: Bytes
    """Memory while responses are sampled; 0 in a stage that samples none while it trains."""
    row: Bytes
    """Activations of one row of a micro-batch; its logits, before their bound."""
    device: int
    """Bytes that the process can have: those that are free, and those of its weights, which are
    loaded; on a CPU the processes of a machine divide them."""
    key: str
    """Configuration key of the size of a micro-batch."""
    rows: int
    """Size of a micro-batch."""
    batch: int
    """Number of rows of an optimizer step, which a micro-batch divides."""

    def update(self, rows: int) -> Bytes:
        """Return the memory of a forward and backward pass over so many rows."""
        bound = LOGITS_COPIES * 4 * CHUNK_ELEMENTS
        logits = min(rows * self.row.logits, bound)
        return Bytes(activations=rows * self.row.activations, logits=logits)

    def peak(self, rows: int) -> int:
        """Return the largest memory of the run with micro-batches of so many rows, in bytes.

            weights + gradients + optimizer + max(rollout, update(rows))

        Every row is taken to be as long as the longest prompt and response can be.
        """
        roles = sum(role.total for role in self.roles.values())
        return roles + max(self.rollout.total, self.update(rows).total)

    @property
    def largest(self) -> int | None:
        """Return the largest divisor of the batch that fits as a micro-batch, None if none does."""
        sizes = (n for n in range(self.batch, 0, -1) if self.batch % n == 0)
        return next((n for n in sizes if self.peak(n) <= self.device), None)

    def check(self) -> Check:
        """Return the check that the run fits into its device."""
        peak, largest = self.peak(self.rows), self.largest
        verdict: Verdict = "passed" if peak <= self.device else "warning" if largest else "failed"
        fits = "of which not even 1 fits" if largest is None else f"of at most {largest}"
        return Check(
            "memory", f"{readable(peak)} with {self.key}={self.rows}",
            f"<= {readable(self.device)}, with a size {fits}", verdict,
        )  # fmt: skip


def plan_memory(
    module: Planned, data: StageData, device: torch.device, *,
    processes: int | None = None, sharing: int = 1,
) -> MemoryPlan:  # fmt: skip
    """Return the plan of one process of a run, whose models are on `device`.

    processes: number of processes of the run, which divide the responses; None: as in `module`.
    sharing: number of them that divide the memory of `device`: on a CPU those of this machine.
    """
    roles, size = module.roles, module.replicas.size
    found = by_role(module)
    parameters = {
        role: [p for p in group if p.device.type == device.type] for role, group in found.items()
    }
    copies = 2 + (module.config.ema_decay is not None)
    of_roles = {role: of_parameters(group, copies) for role, group in parameters.items()}
    loaded = sum(role.weights for role in of_roles.values())
    longest = max(example.length for example in (*data.train, *data.val))
    trunks, sequences, predicted, rollout = [roles], 1, 0, Bytes()
    if isinstance(module, PPOModule):
        batch, predicted = module.config.minibatch_size, module.config.max_response_tokens
        rollout = of_rollout(module, longest, processes or size)
        longest += predicted
        if module.ptx is not None:
            longest = max(longest, module.ptx.longest)
            predicted = max(predicted, *(example.targets for example in module.ptx.examples))
        if module.critic is not None:
            trunks.append(module.critic.roles)
    else:
        batch = module.config.batch_size
        if isinstance(module, SFTModule):
            predicted = max(example.targets for example in data.train)
        else:
            sequences = 2  # the two sides of a pair
        if isinstance(module, DPOModule):
            predicted = max(len(e.chosen) + len(e.rejected) for e in data.train)
    return MemoryPlan(
        roles=of_roles,
        rollout=rollout,
        row=Bytes(
            activations=sequences * longest * max(activation_bytes(trunk) for trunk in trunks),
            logits=LOGITS_COPIES * 4 * predicted * roles.vocab_size,
        ),
        device=(available_memory(device) + (sharing if size > 1 else 1) * loaded) // sharing,
        key=f"{module.guard.stage}.microbatch_size",
        rows=module.config.microbatch_size,
        batch=batch,
    )


def of_parameters(parameters: list[nn.Parameter], copies: int) -> Bytes:
    """Return the memory of weights, and of gradients and `copies` numbers for each trained one."""
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    weights = sum(p.nbytes + scale_bytes(p) for p in parameters)
    return Bytes(weights=weights, gradients=trained, optimizer=copies * trained)


def activation_bytes(roles: Roles) -> int:
    """Return the bytes that one token leaves behind for the backward pass, in all layers.

        sum over the linear layers of a trunk of (inputs + outputs) * bytes of a number

    With gradient checkpointing a layer leaves its input alone, and one layer at a time the rest.
    Attention scores are not counted, as its kernels do not keep them. Norms, activation functions
    and the residual stream keep about as much as the sum counts twice, inputs that layers share.
    """
    model, number = roles.causal_lm, bytes_of_number(roles)
    if not getattr(model, "recomputes", False):
        return linear_sizes(model.base_model) * number
    layers = layers_of(model)
    return (len(layers) * roles.hidden_size + max(map(linear_sizes, layers))) * number


def linear_sizes(trunk: nn.Module) -> int:
    """Return inputs plus outputs of all linear layers, without those of adapters."""
    return sum(layer.in_features + layer.out_features for layer in linear_layers(trunk))


def bytes_of_number(roles: Roles) -> int:
    """Return the bytes of a number in the computation: of the weights, 2 where autocast is on."""
    return computing_dtype(roles.causal_lm).itemsize


def of_rollout(module: PPOModule, longest: int, processes: int) -> Bytes:
    """Return the memory while a process samples its share of an iteration's responses.

    They are as many at a time as ppo.generation_batch_size says. The weights are the copies of
    `copied_bytes`.
    longest: number of tokens of the longest prompt.
    processes: number of processes that divide the responses.
    """
    roles, config = module.roles, module.config
    samples, at_once = config.samples_per_prompt, module.collector.generation_rows.rows
    share = math.ceil(config.prompts_per_iteration / processes)
    prompts = min(share, max(1, at_once // samples))
    rows, tokens = prompts * samples, longest + config.max_response_tokens
    model, number = roles.causal_lm, bytes_of_number(roles)
    text_config = model.config.get_text_config()
    row = tokens * (cache_bytes(text_config, model.dtype) + SAMPLING_BYTES)
    layer = linear_sizes(model.base_model) // text_config.num_hidden_layers
    return Bytes(
        weights=copied_bytes(model) if roles.copies_weights else 0,
        activations=prompts * longest * layer * number,
        logits=LOGITS_COPIES * 4 * rows * roles.vocab_size,
        cache=rows * (row + state_bytes(text_config)),
    )


def state_bytes(config: PretrainedConfig) -> int:
    """Return the bytes of a sequence's states in all layers of linear attention; 0 without any.

    value heads * key size * value size + (2 * key heads * key size + value heads * value size)
    * width of the convolution, in fp32
    """
    layers = (getattr(config, "layer_types", None) or []).count("linear_attention")
    if not layers or not hasattr(config, "linear_num_value_heads"):
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = values * config.linear_key_head_dim
    return int(4 * layers * (state + (2 * keys + values) * config.linear_conv_kernel_dim))
