"""Decoding in fixed shapes: every token repeats the same operations, as a CUDA graph must."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lightning_rlhf.core.types import SampledResponses
from lightning_rlhf.kernels.decoder import rotates_by_length
from lightning_rlhf.kernels.decoding import DecodeStep
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.rollout.cache import make_static
from lightning_rlhf.rollout.decode_state import ASKED, DecodeState
from lightning_rlhf.rollout.sample import sample
from lightning_rlhf.rollout.sampler import SamplingParams

DEVICES = ("cuda",)
"""Types of the devices on which batches are decoded in fixed shapes."""
WARM_UP = 3
"""Number of tokens that are decoded before a graph is captured: libraries choose their kernels and
allocate their workspaces in the first ones."""


class StaticDecoding:
    """The decoding of a batch after its prompts, in shapes that no token changes.

    Keys and values have memory for the longest responses from the start, and are written at a
    position that the device counts; rows that have ended stay in the batch. On a device other than
    the CPU the operations of one token are a `Graph`, which the processor launches as a whole.
    """

    def __init__(
        self,
        step: DecodeStep,
        params: SamplingParams,
        value_head: ScalarHead | None,
        state: DecodeState,
        cache: DynamicCache,
    ) -> None:
        """Take over a batch whose prompts are read; step, state, cache: changed from here on."""
        device, self.room = state.tokens.device, state.logprobs.shape[1]
        self.step, self.params = step, params
        self.value_head, self.state = value_head, state
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        """Number of tokens so far, on the device."""
        self.place = self.column + state.width
        make_static(cache, state.width + self.room, self.place)
        step.attach(cache, in_place=True)
        self.end = torch.tensor(list(params.end_token_ids), device=device)
        if value_head is not None:
            state.values = torch.zeros_like(state.logprobs)

    @torch.no_grad()
    def run(self, hidden: Float[Tensor, "B d"], uniforms: Float[Tensor, "B T"]) -> SampledResponses:
        """Return the responses.

        hidden: hidden states after the prompts.
        uniforms: number in [0, 1) with which each token is drawn.
        """
        self.hidden, self.uniforms = hidden.clone(), uniforms
        state, on_cpu = self.state, hidden.device.type == "cpu"
        decode = self.decode if on_cpu else Graph(self.decode, hidden.device)
        for done in range(self.room):
            if done and done % ASKED == 0 and not state.unfinished.any():
                break
            decode()
            state.length = done + 1
        return state.sampled()

    def decode(self) -> None:
        """Draw a token for every row, and compute the hidden states after it."""
        state = self.state
        logits = self.step.head(self.hidden).float()
        if self.params.temperature != 1:
            logits.div_(self.params.temperature)
        uniform = self.uniforms.index_select(1, self.column).squeeze(1)
        token, logprob = sample(logits, uniform)
        state.tokens.index_copy_(1, self.place, token[:, None])
        state.mask.index_copy_(1, self.place, state.unfinished[:, None])
        state.logprobs.index_copy_(1, self.column, logprob[:, None])
        if self.value_head is not None and state.values is not None:
            state.values.index_copy_(1, self.column, self.value_head(self.hidden)[:, None])
        state.unfinished.logical_and_((token[:, None] != self.end).all(dim=1))
        positions = state.prompt_tokens[:, None] + self.column
        self.hidden.copy_(self.step(token[:, None], state.mask, positions))
        self.column.add_(1)
        self.place.add_(1)


class Graph:
    """Work that repeats the same operations on the same memory, launched as one CUDA graph.

    The first WARM_UP calls compute it operation by operation on the stream on which the next one
    captures it, so that the workspaces of that stream are not part of the graph's memory. Other
    threads may use the device during the capture.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        """Make the graph; work: function that neither waits for the device nor reads from it."""
        self.work, self.device, self.stream = work, device, side_stream(device)
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Compute the work once."""
        if self.calls < WARM_UP:
            with ordered_stream(self.stream, self.device):
                self.work()
        else:
            self.replay()
        self.calls += 1

    def replay(self) -> None:
        """Launch the graph, after capturing it in the first call; capturing computes nothing."""
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                self.graph, stream=self.stream, capture_error_mode="thread_local"
            ):
                self.work()
        with torch.cuda.device(self.device):
            self.graph.replay()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for warming up and capturing, one a device: its memory is used again."""
    return torch.cuda.Stream(device)


@contextmanager
def ordered_stream(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Compute on a stream, after what is launched before the block and before what follows it."""
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def is_static(causal_lm: PreTrainedModel, params: SamplingParams, step: DecodeStep | None) -> bool:
    """Return whether to decode in fixed shapes; a warning says why it is asked for in vain."""
    if not params.is_static or causal_lm.device.type not in DEVICES:
        return False
    fault = None
    if step is None:
        fault = "the fast decoding step does not compute this model: model.kernels=fast may help"
    elif rotates_by_length(causal_lm):
        fault = "the rotary embeddings of this model depend on the length"
    elif params.stop is not None:
        fault = "stop strings are looked for in responses that grow"
    if fault is not None:
        warnings.warn(f"ppo.cuda_graphs=true is not used: {fault}", stacklevel=2)
    return fault is None
