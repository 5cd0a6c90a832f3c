"""Models whose weights are divided among the processes, by torch's FSDP2.

A process holds its part of every weight, and gathers a layer while it computes it. That takes all
processes, which compute different numbers of passes. So each gives the number of the pass that it
wants, 0 while it waits in a collective operation, and all gather the layers of the largest number:
those that want another pass drop them, and ask again. Embedding, last norm and output layer are
held from the first pass to the next collective operation: 1 is added where a process lacks them.

Gradients of trained weights stay whole in each process until `sum_gradients`; the optimizer has a
part of the weights, of the gradient and of its moments.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_rlhf.core.errors import InterruptedPassError, ProcessEndedError, first_line
from lightning_rlhf.parallel.replicas import Replicas, arrivals, ended_processes

FORWARD, BACKWARD, WHOLE, NUMBERS = 2, 4, 6, 8
"""Kinds of passes: layers in their order, in reverse, and in their order and held by sampling; a
pass through model i has the number i * NUMBERS + kind."""
TIMEOUT = timedelta(minutes=10)
"""Longest time that a process waits for the others within a pass, which all of them have begun."""
models: list["ShardedModel"] = []
"""Sharded models of this process, in the order in which every process has made them."""


class ShardedModel:
    """The weights of a language model, sharded over the processes, without its adapters."""

    def __init__(self, model: Any, layers: Sequence[Any], processes: DeviceMesh) -> None:
        """Shard the weights; this process frees those that belong to others.

        layers: those that are gathered one by one, in the order of a forward pass.
        """
        self.model, self.layers, self.first = model, layers, NUMBERS * len(models)
        self.is_whole = False
        """True inside `whole`, where passes need no other process."""
        self.used = 0
        """Parts with a gradient since the last sum: 0 none, 1 the trunk, 2 the output layer too."""
        adapters = {p for name, p in model.named_parameters() if "lora_" in name}
        self.is_trained = any(p.requires_grad and p not in adapters for p in model.parameters())
        """True if the weights themselves are trained."""
        for module in (*layers, model):
            fully_shard(module, mesh=processes, ignored_params=adapters)
            module.set_modules_to_backward_prefetch([module])  # no layer that `follow` does not
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False, recurse=False)
        model.set_unshard_in_backward(False)
        model.get_output_embeddings().register_forward_hook(self._use_head)
        # The gradient then passes through all layers, whichever of them have adapters.
        model.get_input_embeddings().register_forward_hook(
            lambda _, args, found: found.requires_grad_(torch.is_grad_enabled())
        )
        self._trunk = model.base_model.forward
        model.base_model.forward = self._forward
        model.compute_trunk = self._compute
        register_fsdp_forward_method(model, "compute_trunk")
        models.append(self)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_whole:
            return self.model.compute_trunk(*args, **kwargs)
        self._begin(FORWARD)
        with uninterrupted():
            return self.model.compute_trunk(*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        output = self._trunk(*args, **kwargs)
        if output.last_hidden_state.requires_grad and not self.is_whole:
            # Registered before the hooks of FSDP, which gather the layers.
            self.used = max(self.used, 1)
            output.last_hidden_state.register_hook(lambda _: self._begin(BACKWARD))
        return output

    def _begin(self, kind: int) -> None:
        """Take part in the passes of other processes until all begin this one."""
        number_here = self.first + kind
        while True:
            lacks_ends = isinstance(self.model.get_output_embeddings().weight, DTensor)
            number = agreed(number_here + lacks_ends)
            if number // 2 == number_here // 2:
                break
            follow(number)
        self.gather_ends(number)

    def gather_ends(self, number: int) -> None:
        """Gather embedding, last norm and output layer if a process lacks them for a pass."""
        if number % 2:
            self.model.reshard()
            self.model.unshard()

    def _use_head(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.used = 2

    @torch.enable_grad()
    def sum_gradients(self) -> None:
        """Add up what all processes have computed, in one more pass with a gradient of 0.

        There is no gradient afterwards where no process has computed one.
        """
        used = agreed(self.used)
        if not used:
            return
        self.is_whole = True  # nobody is waited for in this pass, which all begin at once
        self.model.set_requires_gradient_sync(True)
        with uninterrupted():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
            hidden = self.model.compute_trunk(input_ids=token, use_cache=False).last_hidden_state
            found = self.model.get_output_embeddings()(hidden) if used == 2 else hidden
            (0.0 * found).sum().backward()
        self.model.set_requires_gradient_sync(False)
        self.used, self.is_whole = 0, False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all weights inside the block, in which passes need no other process."""
        if self.is_whole:  # in a block around this one
            yield
            return
        self._begin(WHOLE)
        try:
            with uninterrupted():
                for layer in self.layers:
                    layer.unshard()
                    layer.set_reshard_after_forward(False)
            self.is_whole = True
            yield
        finally:
            self.is_whole = False
            for layer in self.layers:
                layer.set_reshard_after_forward(True)
                layer.reshard()


@cache
def mesh(device: torch.device) -> DeviceMesh:
    """Return all processes as a mesh, over which models are sharded in turn from then on.

    All processes call it at once. device: as of `Replicas`.
    """
    arrivals.append(arrive)
    return DeviceMesh.from_group(distributed.new_group(timeout=TIMEOUT), device.type)


def local_part(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this process holds, all of it unless it is sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def trains() -> bool:
    """Return whether weights are trained of which this process holds a part."""
    return any(sharded.is_trained for sharded in models)


def sum_and_clip(
    trained: Sequence[nn.Parameter], most: float, numbers: Tensor, replicas: Replicas
) -> tuple[Tensor, Tensor]:
    """Sum all gradients over the processes, and clip them to a norm of `most` over all of them.

    trained: all trained parameters. numbers: as of `Replicas.sum_gradients`.
    Returns: the numbers of each process, in their order, and the norm before clipping, 0-d.
    """
    table = replicas.sum_gradients([p for p in trained if not isinstance(p, DTensor)], numbers)
    if not trains():
        return table, nn.utils.clip_grad_norm_(trained, most)
    for sharded in filter(lambda one: one.is_trained, models):
        sharded.sum_gradients()
    found = [p.grad for p in trained if p.grad is not None]
    parts = [local_part(gradient) for gradient in found if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in found if not isinstance(gradient, DTensor)]
    square = replicas.sum(nn.utils.get_total_norm(parts).double() ** 2)
    norm = (square + nn.utils.get_total_norm(whole).double() ** 2).sqrt().float()
    for gradient in (*parts, *whole):
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return table, norm


def clear(optimizer: Any) -> None:
    """Set all gradients to None. Raises InterruptedPassError where a sharded one was never summed.

    It would count twice, as after the memory ran out between two passes.
    """
    if any(sharded.is_trained and sharded.used for sharded in models):
        raise InterruptedPassError(
            "the memory of the device is too small for a micro-batch, which is not halved where "
            "processes share trained weights; allowed: a smaller microbatch_size"
        )
    optimizer.zero_grad()


def whole_tensors(tree: Any) -> Any:
    """Return a state with whole tensors on the CPU for sharded ones, None in all but process 0.

    All processes call it at once where sharded weights are trained.
    """
    is_first = not models or distributed.get_rank() == 0
    if trains():
        arrive()

    def gathered(part: DTensor) -> Tensor | None:
        with uninterrupted():
            tensor = part.full_tensor()
        return tensor.cpu() if is_first else None

    return tree_map_only(DTensor, gathered, tree)


def part_of(tensor: Any, like: Tensor | None) -> Any:
    """Return this process's part of a whole tensor, where one of the same shape is sharded."""
    if not isinstance(like, DTensor) or getattr(tensor, "shape", None) != like.shape:
        return tensor
    mesh, places = like.device_mesh, like.placements
    return distribute_tensor(tensor.to(like.device), mesh, places, src_data_rank=None)


def sharded_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with this process's parts of the moments, and its own kind of step."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    parts = {
        number: {name: part_of(x, own[number]) for name, x in state.items()}
        for number, state in saved["state"].items()
    }
    groups = [
        {**saved_group, **{key: group[key] for key in ("fused", "foreach") if key in group}}
        for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**saved, "state": parts, "param_groups": groups}


def agreed(number: int) -> int:
    """Return the largest of the numbers of all processes."""
    found = torch.tensor(number)
    with ended_processes():
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return int(found)


def follow(number: int) -> None:
    """Gather the layers of a pass that other processes compute, and drop each of them."""
    model = models[number // NUMBERS]
    is_backward = number % NUMBERS in (BACKWARD, BACKWARD + 1)
    with uninterrupted():
        model.gather_ends(number)
        for layer in reversed(model.layers) if is_backward else model.layers:
            layer.unshard()
            layer.reshard()


def arrive() -> None:
    """Take part in the passes of other processes until all have come here.

    Embeddings and output layers are dropped before and after it. Does nothing without a mesh.
    """
    number = 1
    while arrivals and number:
        for sharded in models:
            sharded.model.reshard()
        if number := agreed(0):
            follow(number)


def leave() -> None:
    """Take part in the passes of other processes to the end of the run, and remove its models."""
    arrive()
    models.clear()
    arrivals.clear()
    mesh.cache_clear()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Raise an error by name where a pass through a sharded model does not come to its end.

    The other processes would wait for the rest of it.

    Raises: InterruptedPassError where the memory runs out, ProcessEndedError where another process
        has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if models and isinstance(error, torch.OutOfMemoryError):
            raise InterruptedPassError(
                "the memory of the device is too small for a pass through the sharded model "
                f"({first_line(error)}); a smaller microbatch_size in the section of the stage, "
                "or model.gradient_checkpointing=true, needs less"
            ) from error
        if models and (isinstance(error, distributed.DistError) or "gloo" in str(error)):
            raise ProcessEndedError from error
        raise
