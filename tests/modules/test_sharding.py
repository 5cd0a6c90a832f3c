"""Models whose weights the processes share: results of one process, parts, and faults midway."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import InterruptedPassError, ProcessEndedError
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel import sharding
from lightning_rlhf.parallel.replicas import Replicas

from ..processes import replicated
from .conftest import language_model, prompts, sft_roles
from .experiences import Make
from .test_ptx import with_ptx
from .test_replicas import CASES, STEP, assert_all_same, in_all
from .test_supervised import STAGES


@pytest.mark.parametrize("case", ["adapter, running moments, adaptive KL", "all weights"])
def test_ppo_of_a_shared_base(make_ppo: Make, case: str, tmp_path: Path) -> None:
    """Its critic, on an adapter, and demonstrations have passes of their own."""
    config = STEP | CASES[case] | {"ptx_batch_size": 3}
    batches = [prompts(8), prompts(8, seed=1)]

    def make() -> Any:
        return with_ptx(make_ppo, **config, generation_batch_size=2)

    expected, found = in_all(2, make, batches, [prompts(2)], tmp_path, shards=True)
    assert_all_same(found, expected)


def test_dpo_of_a_shared_base_without_rows_for_a_process(tmp_path: Path) -> None:
    build, make_batch, _ = STAGES["dpo"]
    batch = make_batch()

    def make() -> Any:
        module = build()
        module.roles.recompute_layers()
        return module

    one = batch.select(slice(0, 1))
    expected, found = in_all(2, make, [batch, one], [one], tmp_path, shards=True)
    assert_all_same(found, expected)


def test_each_process_holds_its_part_whatever_passes_others_compute(tmp_path: Path) -> None:
    """Parts count once the processes have met; the first one alone computes with the model."""
    roles = sft_roles("qwen3")
    expected = roles.probe("sft")
    base = [p for name, p in roles.named_parameters() if "lora_" not in name]
    rows = sum(-(-len(p) // 2) * p[0].numel() for p in base)  # of each weight half, rounded up

    def work(replicas: Replicas) -> tuple[int, list[Tensor]]:
        roles.shard(sharding.mesh(replicas.device))
        found = []

        def alone() -> Tensor:
            found.append(roles.probe("sft"))
            with roles.merged(), roles.whole():
                return roles.probe("sft")

        found.append(replicas.first(alone))
        sharding.leave()
        assert not sharding.models
        parts = [sharding.local_part(p) for n, p in roles.named_parameters() if "lora_" not in n]
        return sum(part.numel() for part in parts), found

    for held, found in replicated(2, work, tmp_path):
        assert held <= rows
        for logits in found:
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_was_never_summed_ends_the_run(tmp_path: Path) -> None:
    """As where the memory runs out between two passes: it would count twice."""
    roles = Roles(language_model("qwen3").requires_grad_(True))

    def work(replicas: Replicas) -> None:
        roles.shard(sharding.mesh(replicas.device))
        roles.head(roles.hidden(torch.tensor([[5, 6, 7]]))).sum().backward()
        sharding.clear(torch.optim.SGD(roles.parameters()))

    for error in replicated(2, work, tmp_path):
        assert isinstance(error, InterruptedPassError)


@pytest.mark.parametrize("fault", ["memory", "delay", "backward"])
def test_a_pass_that_fails_midway_ends_all_processes_by_name(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also inside `gather`, where an error outside of a pass is exchanged."""
    roles = sft_roles("qwen3")
    if fault == "delay":
        monkeypatch.setattr(sharding, "TIMEOUT", sharding.timedelta(seconds=3))

    ended = tmp_path / "ended"

    def fail(*_: Any) -> None:
        left = 20.0
        while fault == "delay" and not ended.exists() and left > 0:
            time.sleep(0.1)  # until the first process has given up
            left -= 0.1
        assert left > 0
        raise torch.OutOfMemoryError("no memory is left")

    def work(replicas: Replicas) -> Any:
        roles.shard(sharding.mesh(replicas.device))
        layer = roles.causal_lm.base_model.layers[0]
        if replicas.rank == 1 and fault == "backward":
            roles.causal_lm.base_model.layers[-1].self_attn.register_full_backward_hook(fail)
        elif replicas.rank == 1:
            layer.mlp.register_forward_pre_hook(fail)
        tokens = torch.tensor([[5, 6, 7]])

        def compute() -> None:
            loss = roles.head(roles.hidden(tokens)).sum()
            with sharding.uninterrupted():
                loss.backward()

        try:
            return replicas.gather(compute)
        finally:
            if replicas.rank == 0:
                ended.touch()

    first, second = replicated(2, work, tmp_path)
    assert isinstance(first, ProcessEndedError)
    assert isinstance(second, InterruptedPassError)
    assert "too small for a pass through the sharded model (no memory is left)" in str(second)
