"""Decoding by CUDA graphs: captured once, and repeated on the memory of the capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_rlhf.modules.ppo import TRAINING
from lightning_rlhf.rollout.static import WARM_UP, side_stream
from lightning_rlhf.rollout.static import Graph as Launched

from ..modules.conftest import prompts
from .conftest import Make
from .device import NAME, Device
from .graphs import Graph, Stream, give_graphs

CUDA = torch.device("cuda", 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    side_stream.cache_clear()
    return give_graphs(monkeypatch)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_5"])
def test_a_graph_samples_what_the_growing_loop_samples(
    make_ppo: Make, device: Device, graphs: list[Graph], architecture: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two rollouts, since the second must not read the memory of the first."""
    monkeypatch.setattr("lightning_rlhf.rollout.static.DEVICES", (NAME,))
    module = make_ppo(architecture, max_response_tokens=WARM_UP + 4)
    module.roles._kernel_choice = "fast"
    module.to(NAME)
    sampler, batch = module.collector.sampler, prompts(4).to(NAME)
    params: Any = sampler.params
    for draw in range(2):
        sampler.params = params
        expected = sampler.sample(batch, 1, module.generator(TRAINING, draw))
        sampler.params = replace(params, is_static=True)
        found = sampler.sample(batch, 1, module.generator(TRAINING, draw))
        assert len(graphs) == draw + 1
        assert graphs[-1].replays == 4
        mask, response_mask = expected.mask.cpu(), expected.response_mask.cpu()
        assert torch.equal(found.response_mask.cpu(), response_mask)
        assert torch.equal(found.tokens.cpu()[mask], expected.tokens.cpu()[mask])
        for name in ("logprobs", "values"):
            of_both = (getattr(x, name).cpu() for x in (found, expected))
            torch.testing.assert_close(*of_both, rtol=1e-5, atol=1e-5)


def test_it_is_warmed_up_on_the_stream_of_the_capture(device: Device, graphs: list[Graph]) -> None:
    """Each warm-up waits for what was launched before it, and what follows waits for it."""
    main, seen = Stream.present, []
    x = torch.zeros(2, device=NAME)

    def work() -> None:
        seen.append((Stream.present, device.capture))
        x.add_(1)

    launched = Launched(work, CUDA)
    for _ in range(WARM_UP + 3):
        launched()
    side = side_stream(CUDA)
    assert seen == [(side, None)] * WARM_UP + [(side, graphs[0])]
    assert side.waited_for == [main] * WARM_UP
    assert main.waited_for == [side] * WARM_UP
    assert x.tolist() == [WARM_UP + 3] * 2  # the capture added nothing


def test_the_stand_in_refuses_what_a_capture_must_not_do(
    device: Device, graphs: list[Graph]
) -> None:
    x = torch.ones(3, device=NAME)
    waits: list[Any] = [
        x.sum().item, x.cpu, x.nonzero, lambda: torch.tensor([1.0, 2.0], device=NAME)
    ]  # fmt: skip
    for work in waits:
        launched = Launched(work, CUDA)
        launched.calls = WARM_UP
        with pytest.raises(RuntimeError, match="while a graph is captured"):
            launched()


def test_the_stand_in_shows_memory_that_a_graph_does_not_write(
    device: Device, graphs: list[Graph]
) -> None:
    """A new tensor in each call is one tensor in all replays."""
    state = {"x": torch.zeros(2, device=NAME)}

    def work() -> None:
        state["x"] = state["x"] + 1

    launched = Launched(work, CUDA)
    for _ in range(WARM_UP + 3):
        launched()
    assert state["x"].tolist() == [WARM_UP + 1] * 2
