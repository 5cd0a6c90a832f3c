"""A device that is not the CPU, for tests of what a GPU would show.

Its tensors hold real data of the CPU, on which every operation is computed. The device refuses
operands of mixed devices, counts synchronisations and operations, and on demand refuses float64. It
takes every branch of the package for devices that are no CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "standin"
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default: "item", aten.nonzero.default: "nonzero",
    aten.masked_select.default: "boolean index", aten.equal.default: "item",
    aten.unique_dim.default: "nonzero", aten._unique2.default: "nonzero",
    aten.repeat_interleave.Tensor: "nonzero",
}  # fmt: skip
"""Operation -> kind of synchronisation: the processor waits for a result of the device."""
COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default,
           aten._index_put_impl_.default}  # fmt: skip
WAITING = {*READS, *COPIES, *INDEXED}
LOWER = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "conv1d",
         "scaled_dot_product_attention")  # fmt: skip
"""Operations that autocast computes in 16 bits."""
LIBRARIES: list[torch.library.Library] = []
"""What was registered with torch, which stays as long as these objects."""


class StandInTensor(Tensor):
    """A tensor on the stand-in device; `raw` holds its data."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> StandInTensor:
        wrapper = Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=torch.device(NAME, 0),
        )  # fmt: skip
        wrapper.raw = raw
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert Device.present is not None, f"{op} outside the device's context"
        return Device.present.run(op, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **kwargs: Any) -> str:
        return f"standin({self.raw!r})"


class Device(TorchDispatchMode):
    """The device, present inside its `with` block."""

    present: Device | None = None

    def __init__(self, *, float64: bool = True) -> None:
        """float64: False refuses it, as MPS does."""
        super().__init__()
        self.float64 = float64
        self.operations: Counter[Any] = Counter()
        self.synchronisations: Counter[str] = Counter()

    def __enter__(self) -> Device:
        future = torch.__future__
        self.before = (
            Device.present,
            torch._C._only_lift_cpu_tensors(),
            torch.autograd.is_multithreading_enabled(),
            future.get_swap_module_params_on_conversion(),
        )
        Device.present = self
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device=...) is seen here
        torch.autograd.set_multithreading_enabled(False)  # another thread has no such context
        future.set_swap_module_params_on_conversion(True)  # a moved parameter is the same object
        return super().__enter__()

    def __exit__(self, *fault: object) -> None:
        super().__exit__(*fault)
        Device.present, lifts, threads, swaps = self.before
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.autograd.set_multithreading_enabled(threads)
        torch.__future__.set_swap_module_params_on_conversion(swaps)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper of torch costs a tenth of the time

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if StandInTensor in types or is_here(kwargs.get("device")):
            return self.run(op, args, kwargs)
        return op(*args, **kwargs)

    def run(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation on the data of the CPU."""
        given: list[Tensor] = []
        raw_args, raw_kwargs = opened(args, given), opened(kwargs, given)
        here = [x for x in given if isinstance(x, StandInTensor)]
        away = [x for x in given if not isinstance(x, StandInTensor)]
        target = kwargs.get("device")
        uploads = is_here(target) if target is not None else isinstance(args[0], StandInTensor)
        if here and any(x.ndim for x in away) and op not in COPIES:
            shapes = [(str(x.device), tuple(x.shape)) for x in given]
            raise RuntimeError(f"{op} of tensors on mixed devices: {shapes}")
        self.operations[op] += 1
        kind = None
        if op in WAITING:
            kind = waits_for(op, args, here=bool(here), away=bool(away), uploads=uploads)
        if kind is not None and not (uploads and kwargs.get("non_blocking")):
            self.synchronisations[kind] += 1
        if op is aten._fused_sdp_choice.default:
            return 0  # attention by its formula, as fused ones are a device's own
        kept = {id(x.raw): x for x in here}
        if target is not None:
            raw_kwargs["device"] = torch.device("cpu")
        found = op(*raw_args, **raw_kwargs)
        if op is aten._to_copy.default and any(found is x for x in raw_args):
            found = found.clone()
        if op in COPIES and not uploads:
            return found if op is aten._to_copy.default else args[0]

        def wrapped(x: Tensor) -> Tensor:
            return kept[id(x)] if id(x) in kept else self.wrap(x, op)

        return mapped(wrapped, found)

    def wrap(self, raw: Tensor, op: Any) -> StandInTensor:
        """Return a tensor of the device."""
        if raw.dtype == torch.float64 and not self.float64:
            raise TypeError(f"{op} makes float64, which the device does not support")
        return StandInTensor(raw)

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count what happens inside the block."""
        before = self.operations.copy(), self.synchronisations.copy()
        yield (found := Counts())
        found.operations = self.operations - before[0]
        found.synchronisations = self.synchronisations - before[1]


def waits_for(op: Any, args: Any, *, here: bool, away: bool, uploads: bool) -> str | None:
    """Return the kind of synchronisation that an operation makes, None where it makes none."""
    if op in COPIES and (here if not uploads else away):
        return "copy from the host" if uploads else "copy to the host"
    if op in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1]):
        fills = len(args) > 2 and args[2].numel() == 1
        return None if fills else "boolean index"
    return READS.get(op)


class Counts:
    """Operations and synchronisations by kind of a block."""

    operations: Counter[Any]
    synchronisations: Counter[str]


def is_here(device: Any) -> bool:
    """Return whether a device argument names the stand-in."""
    return device is not None and torch.device(device).type == NAME


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return arguments or results with `function` applied to each tensor; torch's is slower."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([mapped(function, x) for x in tree])
    return tree


def opened(tree: Any, given: list[Tensor]) -> Any:
    """Return arguments with the data of tensors of the device; `given` gains all tensors."""
    if isinstance(tree, StandInTensor):
        given.append(tree)
        return tree.raw
    if isinstance(tree, (list, tuple)):
        return type(tree)([opened(x, given) for x in tree])
    if isinstance(tree, dict):
        return {key: opened(x, given) for key, x in tree.items()}
    if isinstance(tree, Tensor):
        given.append(tree)
    return tree


class Backend:
    """Functions that torch asks of the module of a device."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Any] = {
            "is_available": True, "is_initialized": True, "_is_in_bad_fork": False,
            "current_device": 0, "device_count": 1, "manual_seed_all": None,
            "get_rng_state": torch.empty(0), "set_rng_state": None,
            "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
        }  # fmt: skip
        if name not in answers:
            raise AttributeError(name)
        return lambda *args, **kwargs: answers[name]


def lowered(op: Any) -> Callable[..., Tensor]:
    """Return the operation as autocast computes it."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(NAME)

        def lower(x: Tensor) -> Tensor:
            return x.to(dtype) if x.is_floating_point() and is_here(x.device) else x

        args = mapped(lower, args)
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(*args, **kwargs)

    return compute


def register() -> None:
    """Give torch the device, once in a process."""
    if hasattr(torch, NAME):
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    others, ours = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    LIBRARIES.extend([others, ours])
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in LOWER:
        ours.impl(name, lowered(getattr(aten, name).default), "AutocastPrivateUse1")
