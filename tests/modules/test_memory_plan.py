"""The memory plan: its arithmetic by hand, and beside what an update and a rollout really take."""

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rlhf.core import memory
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens, PromptTokens
from lightning_rlhf.models.build_roles import SAMPLING_BYTES
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.optim import MuonAdamW
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import RewardModule, SFTModule
from lightning_rlhf.stages.memory_plan import (
    Bytes,
    MemoryPlan,
    activation_numbers,
    choose_microbatch,
    plan_of,
)
from lightning_rlhf.stages.preflight import of_memory

from .conftest import Outputs, fit, language_model, rm_config, rm_roles, sft_config, sft_roles

CPU = torch.device("cpu")
PROMPT = 40
"""Tokens of each prompt whose memory is measured."""


def data(*examples: Any) -> Any:
    return SimpleNamespace(train=examples, val=examples)


def plan_memory(
    module: Any, rows: Any, device: torch.device, processes: int | None = None, sharing: int = 1
) -> MemoryPlan:
    processes = processes or module.replicas.size
    return plan_of(module, (*rows.train, *rows.val), device, processes, sharing)


def plan(**changes: Any) -> MemoryPlan:
    """6 bytes of a role, 100 of a rollout, 20 and 5 of each row of an update, in batches of 12."""
    own: dict[str, Any] = {
        "roles": {"policy": Bytes(weights=1, gradients=1, optimizer=4)},
        "rollout": Bytes(cache=100), "row": Bytes(activations=20, logits=5), "device": 1000,
        "rows": 4, "batch": 12,
    }  # fmt: skip
    return MemoryPlan(**own | changes)


def test_the_peak_is_that_of_the_larger_phase() -> None:
    assert plan().peak(4) == 6 + 100  # the update of 4 rows takes 100 too
    assert plan().peak(6) == 6 + 6 * 25
    assert plan(row=Bytes(activations=1, logits=10**9)).update(4).logits == 3 * 4 * 16_000_000


def test_the_largest_micro_batch_divides_the_batch() -> None:
    for device, rows, largest, verdict in (
        (306, 4, 12, "passed"),  # 6 + 12 * 25
        (305, 4, 6, "passed"),  # of 12 only its divisors are allowed
        (106, 12, 4, "warning"),  # it can be smaller
        (105, 4, None, "failed"),  # the rollout does not fit
    ):
        found = plan(device=device, rows=rows)
        assert (found.largest(), of_memory(found, "a key").verdict) == (largest, verdict)


def linear_elements(layers: int = 2) -> int:
    """Inputs and outputs of the linear layers of a Qwen3 of width 32, with 2 heads of 16, 1 shared.

    q 32+32, k and v 32+16 each, o 32+32, gate and up 32+48 each, down 48+32.
    """
    return layers * (64 + 48 + 48 + 64 + 80 + 80 + 80)


def test_supervised_plans_by_hand() -> None:
    roles = sft_roles("qwen3")
    config = sft_config(microbatch_size=2, batch_size=6)
    rows = data(DemonstrationTokens([1] * 5, [2] * 3), DemonstrationTokens([1], [2] * 4))
    found = plan_memory(SFTModule(roles, config), rows, CPU)
    base = sum(p.numel() for p in language_model("qwen3").parameters())
    # r=4 on each linear layer: 4 * (inputs + outputs)
    adapter = 4 * linear_elements()
    assert found.roles == {
        "base": Bytes(weights=4 * base),
        "sft": Bytes(weights=4 * adapter, gradients=4 * adapter, optimizer=8 * adapter),
    }
    # The longest row has 8 tokens, the longest response 4; logits are of 64 tokens, three times.
    row = Bytes(activations=8 * 4 * linear_elements(), logits=3 * 4 * 4 * 64)
    assert (found.row, found.rollout) == (row, Bytes())
    assert (found.rows, found.batch) == (2, 6)
    pairs = data(PreferenceTokens([1] * 5, [2] * 3, [2], 0.0))
    found = plan_memory(RewardModule(rm_roles("qwen3"), rm_config(), seed=0), pairs, CPU)
    # Two sequences a pair, and no logits.
    assert found.row == Bytes(activations=2 * 8 * 4 * linear_elements())


def test_recomputed_layers_keep_their_inputs_and_one_layer_the_rest() -> None:
    model = language_model("qwen3")
    model.recomputes = True
    assert activation_numbers(model) == 2 * 32 + linear_elements(1)


@pytest.mark.parametrize(("architecture", "cached", "state"), [
    ("qwen3", 2 * 2 * 16, 0),  # keys and values of two layers, one head of 16
    # One layer of each kind. State: 4 value heads * 8 * 8, and a convolution of 4 over
    # 2 * (2 heads * 8) + 4 heads * 8 channels.
    ("qwen3_5", 1 * 2 * 16, 4 * 8 * 8 + 4 * (2 * 16 + 32)),
])  # fmt: skip
def test_a_rollout_by_hand(
    make_ppo: Callable[..., PPOModule], architecture: str, cached: int, state: int
) -> None:
    module = make_ppo(architecture, fresh=True, max_response_tokens=6, rollout_batch_size=8)
    found = plan_memory(module, data(PromptTokens([1] * 5, 0)), CPU).rollout
    # 11 tokens of 8 responses, each with its place in the cache and what is kept of its sample.
    assert found.cache == 8 * (11 * (4 * cached + SAMPLING_BYTES) + 4 * state)
    assert found.logits == 3 * 4 * 8 * 64


@pytest.mark.parametrize(("processes", "at_once", "rows"), [
    (1, None, 24), (5, None, 8), (1, 3, 4),
])  # fmt: skip
def test_a_process_samples_its_share_in_pieces(
    make_ppo: Callable[..., PPOModule], processes: int, at_once: int | None, rows: int
) -> None:
    """6 prompts of 4 responses: at least the responses to one prompt are sampled together."""
    module = make_ppo(
        advantage="rloo", samples_per_prompt=4, rollout_batch_size=24, minibatch_size=24,
        generation_batch_size=at_once,
    )  # fmt: skip
    module.replicas = SimpleNamespace(size=processes)  # type: ignore[assignment]
    found = plan_memory(module, data(PromptTokens([1] * 5, 0)), CPU).rollout
    assert found.logits == 3 * 4 * rows * 64


@pytest.mark.parametrize(("running", "allowed"), [(1, 1000 + 1), (4, 1000 + 4)])
def test_processes_of_a_machine_divide_its_memory(
    monkeypatch: pytest.MonkeyPatch, running: int, allowed: int
) -> None:
    """4 processes, 1000 models of free memory and a model loaded in each that is running."""
    module = SFTModule(sft_roles("qwen3"), sft_config())
    loaded = sum(p.nbytes for p in module.parameters())
    monkeypatch.setattr(memory, "available_memory", lambda _: 1000 * loaded)
    module.replicas = SimpleNamespace(size=running)  # type: ignore[assignment]
    rows = data(DemonstrationTokens([1], [2]))
    found = plan_memory(module, rows, CPU, processes=4, sharing=4)
    assert found.device == allowed * loaded // 4


@pytest.mark.parametrize(("fits", "of_others", "chosen"), [
    (6, 6, 6), (5, 6, 3),  # 4 and 5 do not divide the 6 rows of a batch
    (6, 2, 2),  # another process has less memory
    (0, 6, 1),
])  # fmt: skip
def test_auto_is_the_largest_micro_batch_that_fits_in_every_process(
    monkeypatch: pytest.MonkeyPatch, fits: int, of_others: int, chosen: int
) -> None:
    module = SFTModule(sft_roles("qwen3"), sft_config(microbatch_size="auto", batch_size=6))
    assert module.microbatch.rows == 6
    rows = data(DemonstrationTokens([1] * 5, [2] * 3))
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    # Weights are counted as allowed; gradients and two moments are to come, and the rows, twice.
    a_row = 8 * 4 * linear_elements() + 3 * 4 * 3 * 64
    free = 3 * trained + 2 * fits * a_row
    monkeypatch.setattr(memory, "available_memory", lambda _: free)
    trainer = SimpleNamespace(devices=1, processes=1, precision="32-true")
    settings = SimpleNamespace(config=module.config, trainer=trainer)
    others = SimpleNamespace(largest=lambda number: max(number, -of_others))
    ready: Any = SimpleNamespace(settings=settings, device=CPU, replicas=others, checkpoint=None)
    choose_microbatch(ready, module, rows)
    assert module.microbatch.rows == chosen
    module.microbatch.rows, ready.checkpoint = 5, Path("a checkpoint, whose size it is")
    choose_microbatch(ready, module, rows)
    assert module.microbatch.rows == 5


@pytest.mark.parametrize("optimizer", [AdamW, AdamW8bit, MuonAdamW])
def test_a_plan_has_the_moments_of_the_optimizer(optimizer: Any) -> None:
    """Of all weights: matrices with less and more than 4096 numbers, an embedding, and vectors."""
    roles = Roles(language_model("qwen3").requires_grad_(True))
    roles.causal_lm.resize_token_embeddings(200)  # of width 32
    module = SFTModule(roles, sft_config())
    module.optimizer_class = partial(optimizer)
    found = plan_memory(module, data(DemonstrationTokens([1] * 5, [2] * 3)), CPU)
    made = module.build_optimizer([(1.0, module.parameters())], 4)["optimizer"]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    # Without numbers of one step, and tables that all moments share.
    held = (
        x for one in made.state.values() for n, x in one.items() if n[:4] not in ("step", "qmap")
    )
    assert sum(x.nbytes for x in held) == found.roles["base"].optimizer


class Peak(TorchDispatchMode):
    """The largest number of bytes of the tensors that operations inside made and that live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.count(tensor if tensor.is_mkldnn else tensor.untyped_storage())
        return out

    def count(self, owner: Tensor | torch.UntypedStorage) -> None:
        """Count memory by what owns it: a storage, or a tensor that oneDNN has laid out."""
        if owner._cdata in self.sizes:
            return
        self.sizes[owner._cdata] = owner.nbytes() if callable(owner.nbytes) else owner.nbytes
        self.now += self.sizes[owner._cdata]
        self.most = max(self.most, self.now)
        weakref.finalize(owner, self.forget, owner._cdata)

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


@pytest.mark.parametrize(("critic", "kernels"), [("head", "plain"), ("model", "fast")])
def test_a_plan_is_between_half_and_twice_of_what_is_used(
    make_ppo: Callable[..., PPOModule], monkeypatch: pytest.MonkeyPatch, critic: str, kernels: str
) -> None:
    """All rows are as long as they can be: nothing ends a response."""
    sizes = {"minibatch_size": 8, "microbatch_size": 4, "max_response_tokens": 8}
    module = make_ppo(fresh=True, critic=critic, **sizes)
    if kernels == "plain":  # with layers that are computed again
        module.roles.causal_lm.recomputes = True
        module.roles.recompute_layers()
    module.roles._kernel_choice = kernels  # type: ignore[assignment]
    module.roles._set_kernels()
    object.__setattr__(module.collector.sampler.params, "end_token_ids", ())
    found = plan_memory(module, data(PromptTokens([1] * PROMPT, 0)), CPU)
    used: dict[str, int] = {}

    def measured(owner: object, name: str) -> None:
        whole = getattr(owner, name)

        def work(*args: Any, **kwargs: Any) -> Any:
            with Peak() as peak:
                result = whole(*args, **kwargs)
            used[name] = peak.most
            return result

        monkeypatch.setattr(owner, name, work)

    measured(module.collector, "roll_out")
    measured(module, "accumulate")
    tokens = torch.randint(9, 64, (8, PROMPT), generator=torch.Generator().manual_seed(0))
    asked = Prompts(tokens=tokens, mask=tokens > 0, index=torch.arange(8))
    fit(module, [asked], [outputs := Outputs()])
    assert outputs.steps[0].experience.response_mask.all()
    trained = sum(role.gradients for role in found.roles.values())
    update = found.update(4).total + trained
    assert update / 2 < used["accumulate"] < 2 * update
    assert found.rollout.total / 2 < used["roll_out"] < 2 * found.rollout.total
    moments = [x.nbytes for state in module.optimizers().state.values() for x in state.values()]
    steps = 4 * len(module.optimizers().state)
    assert sum(moments) == sum(role.optimizer for role in found.roles.values()) + steps


def test_a_control_group_leaves_its_limit_less_what_is_used(tmp_path: Path) -> None:
    assert memory.left_in_group(tmp_path, 7) == 7
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 250\ninactive_file 150\nactive_file 0\n")
    assert memory.left_in_group(tmp_path, 7) == 1000 - (400 - 150)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.left_in_group(tmp_path, 7) == 7
