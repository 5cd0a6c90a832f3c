"""Operations by formula against those that benchmarks/counting.py counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from lightning_rlhf.core.results import Compute, StepCompute
from lightning_rlhf.core.types import Demonstrations, Preferences, Prompts, SampledResponses
from lightning_rlhf.data.lengths import DemonstrationTokens
from lightning_rlhf.models.flops import Flops, model_flops
from lightning_rlhf.models.heads import RewardHeads
from lightning_rlhf.models.layer_flops import Attention, DeltaRule, Matrix, Rows
from lightning_rlhf.models.roles import POLICY, REWARD, SFT, Roles
from lightning_rlhf.modules import target_logprobs
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.ptx import PTX
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.rollout.compute import RoleFlops

from . import conftest
from .conftest import within_fit
from .experiences import Make

ROOT = Path(__file__).parents[2]
COMMON: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True,
    "max_position_embeddings": 64, "initializer_range": 0.02,
}  # fmt: skip


def tiny() -> PreTrainedModel:
    """The sizes of conf/model/tiny.yaml."""
    return Qwen3ForCausalLM(
        Qwen3Config(**COMMON, vocab_size=1792, hidden_size=128, intermediate_size=256,
                    num_hidden_layers=2)
    )  # fmt: skip


def hybrid() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **COMMON, vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=32, linear_value_head_dim=32,
        )
    )  # fmt: skip


def vocabulary_heavy() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(**COMMON, vocab_size=16384, hidden_size=64, intermediate_size=128,
                    num_hidden_layers=2)
    )  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    """Function that runs another and returns its operations by torch's counter."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from counting import flop_counter

    def count(work: Callable[[], Any]) -> int:
        with flop_counter() as counter, sdpa_kernel(SDPBackend.MATH):
            work()
        return int(counter.get_total_flops())

    return count


def measured(
    module: PPOModule, prompts: Prompts, count: Callable[[Callable[[], Any]], int]
) -> tuple[dict[str, int], Compute]:
    """Operations of rollout, score and update, as counted and by the formulas."""
    size = module.config.samples_per_prompt

    def work() -> tuple[dict[str, int], Compute]:
        # With the checks that are made once.
        experience, _, _ = module.collect(prompts, module.generator(0, 0))
        rollout = module.collector.roll_out(prompts, module.generator(0, 0), size)
        decoded = module.collector.decode(rollout, "train")
        found = {
            "rollout": count(
                lambda: module.collector.roll_out(prompts, module.generator(0, 0), size)
            ),
            "score": count(lambda: module.collector.score(decoded)),
            "update": count(lambda: module.learn(experience, module.generator(0, 1))),
        }
        compute = module.collector.compute(
            experience,
            updates=module.config.ppo_epochs * 4 // module.config.minibatch_size,
            policy_learns=module.config.critic_warmup == 0,
        )
        return found, compute

    return within_fit(module, work)  # type: ignore[no-any-return]


def close(found: dict[str, int], compute: Compute, tolerance: float) -> None:
    for phase, operations in found.items():
        assert getattr(compute, f"{phase}_flops") == pytest.approx(operations, rel=tolerance), phase


@pytest.fixture
def make(make_ppo: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PPOModule]:
    """PPO on a model, with a reward that costs nothing and responses of full length.

    The entropy bonus is on, with which torch can count the output layer's gradient.
    """

    def build(model: Callable[[], PreTrainedModel], **changes: Any) -> PPOModule:
        def frozen(*args: Any, **kwargs: Any) -> PreTrainedModel:
            torch.manual_seed(0)
            return model().float().eval().requires_grad_(False)

        roles = Roles(frozen())
        roles.add_adapter(POLICY, conftest.LORA, 3)
        sizes = {"rollout_batch_size": 4, "minibatch_size": 4, "microbatch_size": 4}
        config = conftest.ppo_config(
            **{"max_response_tokens": 32, "ppo_epochs": 1} | sizes | changes
        )
        monkeypatch.setattr(conftest, "language_model", frozen)
        critic = conftest.add_critic(roles, "", config.critic) if config.has_critic else None
        chat = replace_end(conftest.CHAT)
        return PPOModule(
            roles, conftest.Reward.of(lambda decoded: [0.0] * len(decoded)), config,
            critic=critic, chat=chat, prompts={"train": [{"prompt": ""}] * 8, "val": []}, seed=0,
        )  # fmt: skip

    return build


def replace_end(chat: Any) -> Any:
    """The chat format without an end token."""
    return type(chat)(**vars(chat) | {"end_token_ids": (10**6,)})


def prompts(rows: int = 4, length: int = 17) -> Prompts:
    """Prompts with which 48 positions are read and 32 wanted: kernels round neither up."""
    tokens = torch.arange(rows * length).view(rows, length) % 64
    return Prompts(
        tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool), index=torch.arange(rows)
    )


@pytest.mark.parametrize("model", [tiny, hybrid, vocabulary_heavy])
def test_the_formulas_count_what_torch_counts(
    model: Callable[[], PreTrainedModel], make: Any, counted: Any
) -> None:
    found, compute = measured(make(model), prompts(), counted)
    close(found, compute, 0.02)
    # 4 responses of 32 tokens; reference alone; 49 tokens a row, one epoch.
    assert (compute.generated_tokens, compute.scored_tokens, compute.trained_tokens) == (
        128, 196, 196,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("is_exact", "missing", "readings"),
    [(True, [], 1), (True, ["values"], 2), (True, ["logprobs", "values"], 2), (False, [], 2)],
)
def test_the_policy_reads_what_its_sampler_gives_no_numbers_for(
    make: Any, is_exact: bool, missing: list[str], readings: int
) -> None:
    """4 rows of 49 tokens: the reference reads them, and the policy where it annotates."""
    module = make(tiny)  # with a critic on the policy's trunk
    native = module.collector.sampler

    def sample(*given: Any) -> SampledResponses:
        return replace(native.sample(*given), **dict.fromkeys(missing))

    module.collector.sampler = SimpleNamespace(is_exact=is_exact, sample=sample)

    def work() -> Compute:
        experience, _, _ = module.collect(prompts(), module.generator(0, 0))
        compute: Compute = module.collector.compute(experience, updates=1, policy_learns=True)
        return compute

    assert within_fit(module, work).scored_tokens == readings * 196


@pytest.mark.parametrize(
    "changes",
    [
        {"critic": "adapter", "ppo_epochs": 2, "microbatch_size": 2},
        {"critic": "model"},
        {"advantage": "grpo", "samples_per_prompt": 2, "minibatch_size": 2, "microbatch_size": 2},
        {"kl_estimator": "full", "kl_in": "loss"},
        {"kl_estimator": "full", "kl_in": "reward"},
        {"critic": "adapter", "critic_warmup": 1},
    ],
    ids=["adapter critic", "whole critic", "groups", "full KL loss", "full KL reward", "warm-up"],
)
def test_each_critic_estimator_and_split_is_counted(
    changes: dict[str, Any], make: Any, counted: Any
) -> None:
    rows = 4 // changes.get("samples_per_prompt", 1)
    found, compute = measured(make(tiny, **changes), prompts(rows), counted)
    close(found, compute, 0.03)


def test_the_demonstrations_of_an_update_are_counted(
    make: Any, counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = partial(target_logprobs.token_logprobs, frozen_head=False)  # as below
    monkeypatch.setattr(
        target_logprobs, "token_logprobs", lambda *a, frozen_head, **k: plain(*a, **k)
    )
    module = make(tiny, ptx_coef=1.0, ptx_batch_size=4)
    example = DemonstrationTokens(list(range(17)), list(range(32)))
    module.ptx = PTX([example] * 6, module.config, pad_id=0, seed=0)

    def work() -> int:
        collected = module.collect(prompts(), module.generator(0, 0))
        module.collect = lambda *_: collected
        return counted(lambda: module.learn(collected[0], module.generator(0, 1)))

    operations, outputs = within_fit(module, work), conftest.Outputs()
    del module.training_step
    conftest.fit(module, [prompts()], [outputs])
    compute = outputs.steps[0].compute
    assert compute.update_flops == pytest.approx(operations, rel=0.02)
    assert compute.trained_tokens == 196 + 4 * 49  # 4 responses and 4 demonstrations of 49


def supervised(
    model: Callable[[], PreTrainedModel], role: str, finetune: str, microbatch_size: int
) -> SFTModule | RewardModule | DPOModule:
    """SFT, a reward model or DPO on a model, of which all weights or an adapter learn."""
    torch.manual_seed(0)
    roles = Roles(model().float().requires_grad_(finetune == "full").eval())
    if role == REWARD:
        generator = torch.Generator().manual_seed(2)
        roles.heads[REWARD] = RewardHeads.random(roles.hidden_size, 1, generator)
    if finetune == "lora":
        roles.add_adapter(role, conftest.LORA, 3)
    else:
        roles.assign(role)
    sizes = {"batch_size": 16, "microbatch_size": microbatch_size}
    if role == SFT:
        return SFTModule(roles, conftest.sft_config(**sizes))
    if role == POLICY:
        return DPOModule(roles, conftest.dpo_config(**sizes))
    return RewardModule(roles, conftest.rm_config(**sizes), seed=0)


@pytest.mark.parametrize(
    ("model", "finetune", "microbatch_size"),
    [(tiny, "full", 8), (tiny, "lora", 16), (hybrid, "lora", 16), (vocabulary_heavy, "full", 16)],
)
@pytest.mark.parametrize("role", [SFT, REWARD, POLICY])
def test_a_batch_of_a_supervised_stage_is_counted(
    role: str, model: Callable[[], PreTrainedModel], finetune: str, microbatch_size: int,
    counted: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # torch does not count the gradient that a frozen output layer computes in its forward pass.
    plain = partial(target_logprobs.token_logprobs, frozen_head=False)
    monkeypatch.setattr(
        target_logprobs, "token_logprobs", lambda *a, frozen_head, **k: plain(*a, **k)
    )
    if role == POLICY and finetune == "full":
        pytest.skip("the reference of DPO is the model without the policy's adapter")
    module = supervised(model, role, finetune, microbatch_size)
    tokens = torch.arange(16 * 49).view(16, 49) % 64
    mask = torch.ones_like(tokens, dtype=torch.bool)
    batch: Any = Demonstrations(tokens=tokens, mask=mask, target_mask=mask & (mask.cumsum(1) > 17))
    if role != SFT:  # 8% of the positions are padding
        batch = Preferences(
            chosen=tokens, chosen_mask=mask, rejected=tokens[:, :41], rejected_mask=mask[:, :41],
            margin=torch.zeros(16), prompt_tokens=torch.full((16,), 17),
        )  # fmt: skip

    def work() -> tuple[int, StepCompute]:
        step = type(module).training_step(module, batch, 0)["result"]
        return counted(lambda: module.gradient(batch)), step.compute

    operations, compute = within_fit(module, work)
    assert compute.flops == pytest.approx(operations, rel=0.05)
    assert compute.trained_tokens == (16 * 49 if role == SFT else 16 * (49 + 41))
    assert compute.seconds > 0


def test_a_family_without_attention_heads_is_counted() -> None:
    """RWKV: its linear layers alone."""
    config = RwkvConfig(
        hidden_size=8, attention_hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        vocab_size=16, context_length=8,
    )  # fmt: skip
    with torch.device("meta"):
        flops = model_flops(RwkvForCausalLM(config), fast=False)
    # Four matrices of the attention, 8 x 8; key, receptance and value of the feed-forward network.
    weights = 4 * 8 * 8 + 8 * 16 + 8 * 8 + 16 * 8
    assert flops.forward(Rows(torch.tensor([5]), 5)) == 2 * 5 * weights


def test_recomputed_layers_count_once_more(make: Any, counted: Any) -> None:
    module = make(tiny)
    module.roles.causal_lm.recomputes = True
    module.roles.recompute_layers()
    found, compute = measured(module, prompts(), counted)
    close(found, compute, 0.03)


def test_padding_is_not_counted(make: Any, counted: Any) -> None:
    # The packed layers skip it: of 4 x 48 positions they read 160. Attention reads it.
    batch = prompts()
    lengths = torch.tensor([17, 9, 5, 5])
    padded = replace(batch, mask=torch.arange(17) >= 17 - lengths[:, None])
    found, compute = measured(make(tiny), padded, counted)
    close({"score": found["score"], "update": found["update"]}, compute, 0.05)
    full = measured(make(tiny), batch, counted)[1]
    # 32 positions fewer of the first layer (4 x 128 x 128 + 3 x 128 x 256 weights) and of the last
    # layer's keys and values, and shorter rows of width 128 for the attention of two layers.
    linear = 2 * 32 * (4 * 128**2 + 3 * 128 * 256 + 2 * 128**2)
    squares = 4 * 48**2 - (48**2 + 40**2 + 2 * 36**2)
    assert full.score_flops - compute.score_flops == linear + 2 * 4 * 128 * squares


def test_a_linear_layer_by_hand() -> None:
    # 3 inputs, 5 outputs, 10 tokens: 2 * 15 * 10 = 300. An adapter of rank 2: 2 * 2 * 8 * 10 = 320.
    sizes = {"inputs": 3, "outputs": 5, "wanted_only": False}
    base = Matrix(
        **sizes, frozen_ranks=(), trained_ranks=(), is_trained=False, needs_input=False
    )  # fmt: skip
    assert base.forward(10, 1, merges=True) == 300
    assert base.backward(10, 1, merges=True) == 0
    assert replace(base, needs_input=True).backward(10, 1, merges=True) == 300
    assert replace(base, needs_input=True, is_trained=True).backward(10, 1, merges=True) == 600
    adapted = replace(base, trained_ranks=(2,), needs_input=True)
    assert adapted.forward(10, 1, merges=False) == 620
    # 10 tokens * 8 > 2 * 15: merged, 2 * 2 * 15 = 60 for each of 2 passes of 5 tokens.
    assert adapted.forward(10, 2, merges=True) == 300 + 2 * 60
    assert adapted.backward(10, 2, merges=True) == 300 + 2 * 320
    frozen = replace(base, frozen_ranks=(2,), needs_input=True)
    assert frozen.backward(10, 1, merges=False) == 300 + 320
    assert frozen.backward(10, 1, merges=True) == 300


def test_attention_and_linear_attention_by_hand() -> None:
    # Rows of 3 and 1 tokens, width 8: 4 * 8 * (9 + 1). Two tokens that read 3 and 4: 4 * 8 * 7.
    attention = Attention(8, learns=True)
    assert attention.forward(torch.tensor([3, 1])) == 320
    assert attention.step(7, 2) == 224
    # 50 tokens in two chunks of 25, 2 heads of keys 3 and values 5, 7 channels by 4 taps:
    # 50 * (2 * 2 * (25 * 6 + 25 * 5 + 3 * 15) + 2 * 28).
    rule = DeltaRule(2, 3, 5, 28, learns=True, short_chunks=True)
    assert rule.forward(torch.tensor([50])) == 50 * (4 * 320 + 56)
    # Chunks of 64: one, computed whole.
    long = replace(rule, short_chunks=False)
    assert long.forward(torch.tensor([50])) == 64 * 4 * (64 * 11 + 45) + 50 * 56
    # The key reads the state of 3 x 5, and so does the query.
    assert rule.step(0, 10) == 10 * 2 * 2 * 2 * 15


def test_sampling_reads_a_prompt_once_for_its_responses() -> None:
    matrix = Matrix(
        inputs=3, outputs=5, frozen_ranks=(), trained_ranks=(2,), is_trained=False,
        needs_input=False, wanted_only=True,
    )  # fmt: skip
    flops = Flops(
        {matrix: 2}, {Attention(8, learns=True): 1},  # type: ignore[arg-type]
        hidden=3, vocabulary=10, recomputes=False, merges=True,
    )  # fmt: skip
    prompts, responses = torch.tensor([4, 4]), torch.tensor([3, 1])
    # Prompt of 4 tokens once; of 3 response tokens 2 are fed, which read 5 and 6 positions.
    linear = 2 * (2 * 15 * (4 + 2) + 2 * 2 * 15)
    attention = 4 * 8 * (16 + 5 + 6)
    assert flops.sampling(prompts, responses, 2) == linear + attention + 2 * 30 * 4
    twice = 2 * (2 * 15 * 4) + 4 * 8 * 16
    assert flops.sampling(prompts, responses) == linear + attention + 2 * 30 * 4 + twice


def test_the_last_layer_computes_what_is_wanted(make: Any) -> None:
    policy = RoleFlops.of(make(tiny).roles, None).policy
    lengths = torch.tensor([10, 10])
    more = policy.forward(Rows(lengths, 20)) - policy.forward(Rows(lengths, 2))
    # 18 positions of q, o (128 x 128) and an MLP of 3 x 128 x 256, each adapted with rank 4.
    weights = 2 * 128 * 128 + 3 * 128 * 256
    adapters = 4 * (2 * 256 + 3 * 384)
    assert more == 18 * 2 * (weights + adapters)
