"""CUDA graphs on the stand-in device: a capture computes nothing, a replay the same addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from .device import Device, tensors


class Graph:
    """Operations that were captured, with the memory that they read and write."""

    made: list[Graph]
    """Graphs since `give_graphs`."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        """Memory that an operation writes to, and what it held before."""
        self.replays = 0
        self.made.append(self)

    def add(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operation for the shapes of its results, and keep it."""
        for argument, x in zip(op._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(part, part.clone()) for part in tensors(x)]
        found = op(*args, **kwargs)
        self.operations.append((op, args, kwargs, found))
        return found

    def restore(self) -> None:
        """Undo what the capture computed."""
        for x, before in reversed(self.before):
            x.copy_(before)

    def replay(self) -> None:
        """Compute all operations on the memory of the capture."""
        self.replays += 1
        for op, args, kwargs, kept in self.operations:
            for old, new in zip(tensors(kept), tensors(op(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class Stream:
    """A stream: the names of those that it waited for."""

    present: Stream

    def __init__(self, *_: Any) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, Stream.present = Stream.present, stream
    try:
        yield
    finally:
        Stream.present = before


@contextmanager
def capture(graph: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    device = Device.present
    assert device is not None
    assert capture_error_mode == "thread_local"
    with on_stream(stream):
        device.capture = graph
        try:
            yield
        finally:
            device.capture = None
            graph.restore()


def give_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Put the stand-in's graphs in place of CUDA's; return the list of those that are made."""
    Graph.made, Stream.present = [], Stream()
    for name, own in {
        "CUDAGraph": Graph, "graph": capture, "Stream": Stream, "stream": on_stream,
        "current_stream": lambda device: Stream.present, "device": lambda device: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, own)
    return Graph.made
