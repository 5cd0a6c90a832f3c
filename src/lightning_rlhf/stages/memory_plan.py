"""The memory that a run will need, by role, from the sizes of its model and its section."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from types import SimpleNamespace
from typing import Any

import torch
from rich import box, get_console
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_rlhf.core import errors, logprobs, memory
from lightning_rlhf.core.config import DPOConfig, RMConfig, SFTConfig
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.batches import StageData
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens, PromptTokens
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import readable
from lightning_rlhf.kernels.decoder import family
from lightning_rlhf.kernels.layers import computing_dtype
from lightning_rlhf.models import build_roles, loading
from lightning_rlhf.models.config import BASE, CRITIC, POLICY, REFERENCE, REWARD, SFT, VALUE
from lightning_rlhf.models.roles import Roles, copied_bytes, layer_matrices, linear_layers
from lightning_rlhf.modules import ppo, supervised
from lightning_rlhf.parallel.sharding import local_part
from lightning_rlhf.rewards.config import HeadConfig, RandomConfig, TextModelConfig
from lightning_rlhf.runs import accelerator, folders, run, stage

PLANNED = (SFTConfig, RMConfig, DPOConfig, PPOConfig)
"""Configurations of the stages that have a plan."""
LOGITS_COPIES = 3
"""Number of fp32 tensors of the size of the logits that exist at once: the logits, their softmax,
and one in between."""
LINEAR_BYTES = {"none": None, "int8": (1.0, 4.0), "nf4": (0.5 + 4 / 64, 0.0)}
"""Quantisation -> bytes of a number of a linear layer, and of each of its outputs: int8 has an fp32
scale for an output, nf4 one for a block of 64 numbers."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one role, or of one phase of a run."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Moments of the optimizer, and with ema_decay the average of each trained number."""
    activations: int = 0
    """Numbers kept for the backward pass, or of one layer where there is none."""
    logits: int = 0
    cache: int = 0
    """Keys, values and states of linear attention, and the tokens that are sampled."""

    @property
    def total(self) -> int:
        """Return the sum of all columns."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of one process of a run: of each role, while sampling, and of an update."""

    roles: Mapping[str, Bytes]
    rollout: Bytes
    """Memory while responses are sampled; 0 in a stage that samples none while it trains."""
    row: Bytes
    """Activations of one row of a micro-batch; its logits, before their bound."""
    device: int
    """Bytes that the process can have, its loaded weights included; 0 where it is not known."""
    rows: int
    """Size of a micro-batch."""
    batch: int
    """Number of rows of an optimizer step, which a micro-batch divides."""

    def update(self, rows: int) -> Bytes:
        """Return the memory of a forward and backward pass over so many rows."""
        bound = LOGITS_COPIES * 4 * logprobs.CHUNK_ELEMENTS
        logits = min(rows * self.row.logits, bound)
        return Bytes(activations=rows * self.row.activations, logits=logits)

    def peak(self, rows: int) -> int:
        """Return the largest memory of the run with micro-batches of so many rows, in bytes.

            weights + gradients + optimizer + max(rollout, update(rows))

        Every row is taken to be as long as the longest prompt and response can be.
        """
        roles = sum(role.total for role in self.roles.values())
        return roles + max(self.rollout.total, self.update(rows).total)

    def largest(self, factor: int = 1) -> int | None:
        """Return the largest divisor of the batch that fits as a micro-batch, None if none does.

        factor: memory of a phase of the run over what the plan says of it.
        """
        roles = sum(role.total for role in self.roles.values())
        sizes = (n for n in range(self.batch, 0, -1) if self.batch % n == 0)
        fits = (n for n in sizes if roles + factor * (self.peak(n) - roles) <= self.device)
        return next(fits, None)


def plan_memory(
    config: Any, model: PreTrainedModel, roles: Mapping[str, Bytes], rows: Sequence[Any],
    demonstrations: Sequence[DemonstrationTokens], *, size: int, number: int, copied: int,
    processes: int, device: int = 0,
) -> MemoryPlan:  # fmt: skip
    """Return the plan of one process of a run.

    Args:
        config: section of the stage.
        model: language model, of which the shapes are read: loaded, or on torch's device `meta`.
        rows: examples, of which the longest counts; demonstrations: those of ppo.ptx_coef.
        size: rows of a micro-batch.
        number: bytes of a number in the computation.
        copied: bytes of the copies of weights that sampling reads, or that are gathered for it.
        processes: number of processes, which divide the responses.
        device: bytes that the process can have.
    """
    longest, rollout = max(row.length for row in rows), Bytes()
    logits = LOGITS_COPIES * 4 * model.get_output_embeddings().out_features
    if isinstance(config, PPOConfig):
        text = model.config.get_text_config()
        # The responses that a process samples at a time, with their prompts.
        samples, at_once = config.samples_per_prompt, config.generation_batch_size
        prompts = max(1, (at_once or config.rollout_batch_size) // samples)
        prompts = min(ceil(config.prompts_per_iteration / processes), prompts)
        layer = ends(model.base_model) // text.num_hidden_layers
        tokens, count = longest + config.max_response_tokens, prompts * samples
        each = build_roles.cache_bytes(text, model.dtype) + build_roles.SAMPLING_BYTES
        cache = count * (tokens * each + state_bytes(text))
        read = prompts * longest * layer * number
        if config.rollout != "vllm":
            rollout = Bytes(weights=copied, activations=read, logits=logits * count, cache=cache)
        longest = max(tokens, *(one.length for one in demonstrations), 0)
        target_tokens = (len(one.target_tokens) for one in demonstrations)
        predicted = max(config.max_response_tokens, *target_tokens, 0)
    elif isinstance(rows[0], DemonstrationTokens):
        predicted = max(len(row.target_tokens) for row in rows)
    else:
        longest *= 2  # the two sides of a pair
        sides = max(len(row.chosen) + len(row.rejected) for row in rows)
        predicted = sides if isinstance(config, DPOConfig) else 0
    row = Bytes(activations=longest * number * activation_numbers(model), logits=logits * predicted)
    batch = getattr(config, config.step_key)
    return MemoryPlan(roles=roles, rollout=rollout, row=row, device=device, rows=size, batch=batch)


def activation_numbers(model: PreTrainedModel) -> int:
    """Return how many numbers a token leaves behind for the backward pass, in all layers.

        sum over the linear layers of a trunk of inputs + outputs

    With gradient checkpointing a layer leaves its input alone, and one layer at a time the rest.
    Attention scores are not counted, as its kernels do not keep them. Norms, activation functions
    and the residual stream keep about as much as the sum counts twice, inputs that layers share.
    """
    if not getattr(model, "recomputes", False):
        return ends(model.base_model)
    layers = loading.layers_of(model)
    return len(layers) * model.get_output_embeddings().in_features + max(map(ends, layers))


def ends(trunk: nn.Module) -> int:
    """Return inputs plus outputs of all linear layers, without those of adapters."""
    return sum(inputs + outputs for _, _, inputs, outputs in linear_layers(trunk))


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
    width = config.linear_conv_kernel_dim
    return int(4 * layers * (values * config.linear_key_head_dim + (2 * keys + values) * width))


def plan_of(
    module: Any, rows: Sequence[Any], device: torch.device, processes: int, sharing: int = 1
) -> MemoryPlan:
    """Return the plan of a module of one of the stages, whose models are on `device`.

    rows: examples of its data. sharing: number of processes that divide the memory of `device`.
    """
    model, config, copied = module.roles.causal_lm, module.config, 0
    demonstrations: Sequence[DemonstrationTokens] = ()
    moments = partial(moment_bytes, module.optimizer_class.func.__name__, layer_matrices(module))
    found = {
        role: bytes_of([p for p in group if p.device.type == device.type], config, moments)
        for role, group in by_role(module).items()
    }
    loaded = sum(role.weights for role in found.values())
    free = memory.available_memory(device) + (sharing if module.replicas.size > 1 else 1) * loaded
    number = computing_dtype(model).itemsize
    if isinstance(module, ppo.PPOModule):
        demonstrations = () if module.ptx is None else module.ptx.examples
        copied = copied_bytes(model) if module.roles.kernels.kind == "fast" else 0
        # Gathered to sample; weights that are trained take the place of their gradient then.
        frozen = (p for p in model.parameters() if not p.requires_grad)
        copied += sum(p.nbytes - local_part(p).nbytes for p in frozen)
        if module.critic is not None:
            number = max(number, computing_dtype(module.critic.roles.causal_lm).itemsize)
    return plan_memory(
        config, model, found, rows, demonstrations, size=module.microbatch.rows,
        number=number, copied=copied, processes=processes, device=free // sharing,
    )  # fmt: skip


def plan_built(ready: run.Run, module: Any, data: StageData) -> MemoryPlan | None:
    """Return the plan of a stage that is built, whose models are moved to the device of the run.

    There is none of a module or a section of another kind than those of the package.
    """
    is_known = isinstance(module, supervised.SupervisedModule | ppo.PPOModule)
    if not (is_known and isinstance(module.config, PLANNED)):
        return None
    device, trainer = ready.device, ready.settings.trainer
    module.to(device)
    sharing = trainer.devices if device.type == "cpu" else 1
    is_mixed = trainer.precision == "bf16-mixed"
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed):
        return plan_of(module, (*data.train, *data.val), device, trainer.processes, sharing)


def choose_microbatch(ready: run.Run, module: Any, data: StageData) -> None:
    """Set the size of micro-batches of a stage that is built to the largest that fits, for `auto`.

    It is the smallest of those of all processes. A run that resumes goes on with the size of its
    checkpoint, as sums of another size are rounded otherwise. On a CPU, whose system ends a process
    that takes too much, and with sharded weights, phases may take twice what the plan says.
    """
    is_auto = ready.settings.config.microbatch_size == "auto" and ready.checkpoint is None
    if is_auto and (plan := plan_built(ready, module, data)) is not None:
        is_rough = ready.device.type == "cpu" or ready.settings.shards  # layers that are gathered
        size = plan.largest(2 if is_rough else 1) or 1
        module.microbatch.rows = rows = -ready.replicas.largest(-size)
        shown = f"{rows} of {plan.batch} rows, the most that fit into {readable(plan.device)}"
        print_line(f"{module.microbatch.key}: auto is {shown} by the memory plan")


def by_role(module: Any) -> dict[str, list[nn.Parameter]]:
    """Return role -> its own parameters: the base's without adapters, an adapter's, a head's.

    A value head belongs to the critic. A frozen base beside a trained one is the reference's.
    """
    found: dict[str, list[nn.Parameter]] = defaultdict(list, {BASE: []})
    for name, parameter in module.roles.named_parameters():
        base = REFERENCE if name.startswith("frozen.") else BASE
        match = re.search(r"^(?:frozen\.)?heads\.([^.]+)|\.lora_\w+\.([^.]+)", name)
        role = (match[1] or match[2]) if match else base
        found[CRITIC if role == VALUE else role].append(parameter)
    if isinstance(module, ppo.PPOModule):
        shared = (module.roles, module.roles.reference)
        if module.critic is not None and module.critic.roles not in shared:
            found[CRITIC] = list(module.critic.roles.parameters())
        for name, (model, _) in module.collector.reward.models.items():
            if model not in shared:
                found[f"{REWARD} {name}"] = list(model.parameters())
    return dict(found)


def bytes_of(
    parameters: Sequence[nn.Parameter], config: Any, moments: Callable[[nn.Parameter], int]
) -> Bytes:
    """Return the memory of the weights of a role, of which some are trained, with these moments."""
    own = [p for p in parameters if p.requires_grad]
    trained = sum(p.nbytes for p in own)
    weights = sum(local_part(p).nbytes + loading.scale_bytes(p) for p in parameters)
    optimizer = sum(moments(p) * local_part(p).numel() // p.numel() for p in own)
    optimizer += (config.ema_decay is not None) * sum(local_part(p).nbytes for p in own)
    return Bytes(weights=weights, gradients=trained, optimizer=optimizer)


def moment_bytes(
    optimizer: str, matrices: Collection[nn.Parameter], parameter: nn.Parameter
) -> int:
    """Return the bytes of an optimizer's moments of a trained parameter.

        AdamW8bit   two bytes a number and two fp32 scales a block of 256, from 4096 numbers on
        MuonAdamW   one moment of the matrices of layers, two of all others
        any other   two moments, as AdamW

    optimizer: name of its class. matrices: those of layers.
    """
    if optimizer == "AdamW8bit" and parameter.numel() >= 4096:
        return 2 * parameter.numel() + 2 * 4 * ceil(parameter.numel() / 256)
    return parameter.nbytes * (1 if optimizer == "MuonAdamW" and parameter in matrices else 2)


def plan_run(settings: stage.Settings) -> MemoryPlan:
    """Return the plan of a process of a run, of whose model only the configuration is read.

    Rows are as long as `data.max_prompt_tokens` and the limit of responses allow. Raises
    ConfigError for a stage without a plan, CheckpointError or HubError where the configuration of
    the model cannot be read or its adapters do not fit.
    """
    config, data, own = settings.config, settings.data, settings.model
    if not isinstance(config, PLANNED):
        raise errors.ConfigError(
            f"stage={settings.stage} has no memory plan; allowed: sft, rm, ppo, dpo, or a stage of "
            "your own with one of their configurations"
        )
    is_full = getattr(config, "finetune", "lora") == "full"
    roles = empty_base(settings, trainable=is_full)
    model, base = roles.causal_lm, list(roles.parameters())
    if is_full and isinstance(config, PPOConfig | DPOConfig):
        roles.frozen = empty_base(settings, trainable=False)
    assume_roles(settings, roles, is_full=is_full)
    found = by_role(SimpleNamespace(roles=roles))
    if getattr(config, "critic", None) == "model":
        found[CRITIC] += [nn.Parameter(torch.empty_like(p, dtype=torch.float32)) for p in base]
    name = str(settings.optimizer.get("_target_")).rpartition(".")[2]
    moments = partial(moment_bytes, name, layer_matrices(roles))
    sizes = {role: bytes_of(group, config, moments) for role, group in found.items()}
    if (size := LINEAR_BYTES[own.quantization]) is not None:
        weights = sizes[BASE].weights + sum(
            int(size[0] * inputs * outputs + size[1] * outputs) - layer.weight.nbytes
            for _, layer, inputs, outputs in linear_layers(model.base_model)
        )
        sizes[BASE] = Bytes(weights=weights)
    prompt, response = [0] * data.max_prompt_tokens, [0] * data.max_response_tokens
    row: Any = DemonstrationTokens(prompt, response)
    demonstrations = [row] * (isinstance(config, PPOConfig) and config.ptx_coef > 0)
    if isinstance(config, PPOConfig):
        row = PromptTokens(prompt, 0)
    elif not isinstance(config, SFTConfig) and getattr(config, "loss_type", None) != "kto":
        row = PreferenceTokens(prompt, response, response, 0.0)
    trainer, copied = settings.trainer, 0
    is_mixed, on_cpu = trainer.precision == "bf16-mixed", trainer.accelerator == "cpu"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
        number = computing_dtype(model).itemsize
        is_fast = own.kernels == "fast" or (own.kernels == "auto" and on_cpu)
        if settings.shards:
            if not is_full:
                copied = sizes[BASE].weights - ceil(sizes[BASE].weights / trainer.processes)
            for role in sizes.keys() & {BASE, REFERENCE}:
                whole, n = sizes[role], trainer.processes
                part = Bytes(weights=ceil(whole.weights / n), optimizer=ceil(whole.optimizer / n))
                sizes[role] = replace(part, gradients=whole.gradients)
        elif is_fast and family(model) and own.quantization == "none":
            copied = copied_bytes(model)
    if getattr(config, "critic", None) == "model" and not is_mixed:
        number = 4
    return plan_memory(
        config, model, sizes, [row], demonstrations, size=config.microbatch_rows,
        number=number, copied=copied, processes=trainer.processes,
    )  # fmt: skip


def empty_base(settings: stage.Settings, *, trainable: bool) -> Roles:
    """Return the base of a run on torch's device `meta`, trained in fp32 or frozen."""
    own = settings.model
    dtype = torch.float32 if trainable else getattr(torch, own.dtype)
    model = loading.empty_model(own).to(dtype).requires_grad_(trainable)
    model.recomputes = own.gradient_checkpointing
    return Roles(model, "plain")


def assume_roles(settings: stage.Settings, roles: Roles, *, is_full: bool) -> None:
    """Add those that a stage adds to its base, without any weights.

    The SFT model and the reward models of stage=rm are taken to be LoRA adapters, which is the
    default; a reward model with a base of its own is not counted. Heads are in fp32.

    is_full: whether the stage trains all weights, into which the SFT model is merged.
    """
    config, owner = settings.config, roles.reference
    starts_from_sft = settings.definition.reads_sft and settings.policy.checkpoint != BASE
    frozen, trained, heads = [SFT] * starts_from_sft, [POLICY], {}
    if is_rm := isinstance(config, RMConfig):
        trained, heads = [REWARD], {REWARD: config.heads}
    elif isinstance(config, SFTConfig):
        trained = [SFT]
    elif isinstance(config, PPOConfig):
        for name, component in settings.reward.items():
            if isinstance(component, HeadConfig | RandomConfig):
                heads[folders.reward_role(settings, name)] = 1
            if isinstance(component, HeadConfig):
                frozen.append(folders.reward_role(settings, name))
        heads |= {VALUE: 1} if config.has_critic else {}
        trained += [CRITIC] if config.has_critic and config.critic == "adapter" else []
    if is_full:  # adapters are on a frozen base alone
        trained = [role for role in trained if role == CRITIC]
        frozen = [] if owner is roles else frozen
    with torch.device("meta"):
        for role in (*frozen, *trained):
            owner.add_adapter(role, settings.model.lora)
            for parameter in owner.trained_by(role):
                parameter.requires_grad_(role in trained)
        for role, count in heads.items():
            head = nn.Linear(roles.hidden_size, count)
            roles.heads[role] = head.requires_grad_(is_rm or role == VALUE)


def print_plan(settings: stage.Settings) -> None:
    """Print the memory plan of a run, and what it assumes; no weights, data or earlier stages are
    read. Raises an RLHFError as `plan_run`."""
    run.check_trained_weights(settings)
    accelerator.quiet_libraries()
    data, count = settings.data, settings.trainer.processes
    plan = plan_run(settings)
    get_console().print(plan_shown(plan))
    response = getattr(settings.config, "max_response_tokens", data.max_response_tokens)
    print_line(
        f"for {'one process' if count == 1 else f'each of {count} processes'} on a "
        f"{settings.trainer.accelerator.upper()}, with prompts of {data.max_prompt_tokens} and "
        f"responses of {response} tokens; models of earlier stages "
        "are taken to be LoRA adapters on this base (finetune=lora), and no weights were read"
    )
    if settings.config.microbatch_size == "auto":
        one, shown = readable(plan.peak(1)), f"the largest divisor of {plan.batch} that fits"
        print_line(f"{settings.stage}.microbatch_size: auto is {shown}; the peak with 1 is {one}")
    for name, component in settings.reward.items() if settings.definition.reads_reward else ():
        if isinstance(component, TextModelConfig):
            print_line(f"not counted: the model of {stage.reward_key(settings, name)}", "yellow")


def plan_shown(plan: MemoryPlan) -> Table:
    """Return the memory plan: a row for each role and phase, a column for each kind of memory.

    It fits into 80 columns; the peak stands below it.
    """
    phases = {"rollout": plan.rollout} if plan.rollout.total else {}
    larger = "the larger of rollout and update" if phases else "update"
    table = Table(
        title="memory plan", title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD,
        caption=f"peak: {readable(plan.peak(plan.rows))} = all roles + {larger}, "
        "without what libraries take",
        padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for column in ("", *vars(plan.rollout)):
        table.add_column(column, justify="right" if column else "left")
    for name, row in {**plan.roles, **phases, "update": plan.update(plan.rows)}.items():
        table.add_row(Text(name), *(readable(size) if size else "" for size in vars(row).values()))
    return table
