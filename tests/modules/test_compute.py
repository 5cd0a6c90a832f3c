"""Operations by the standard formula against torch's counter, and by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_rlhf.callbacks.compute import Weights, iteration_totals, step_totals, weights_of
from lightning_rlhf.core.records import Demonstrations, Preferences, Prompts, SampledResponses
from lightning_rlhf.data.lengths import DemonstrationTokens
from lightning_rlhf.models.config import POLICY, REWARD, SFT
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import supervised
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import PTX, DPOModule, RewardModule, SFTModule

from . import conftest
from .conftest import within_fit
from .experiences import Make, learn

ROOT = Path(__file__).parents[2]
FAMILIES = ("qwen3", "qwen3_5_text", "gpt2")
WITHIN = 0.1
"""Largest relative distance of the formula from torch's counter."""


def language_model(family: str) -> PreTrainedModel:
    """Four or six layers in the proportions of published models: an MLP of 3 to 4 widths."""
    sizes: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "tie_word_embeddings": True, "max_position_embeddings": 128,
    }  # fmt: skip
    if family == "qwen3_5_text":
        sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4,
                  "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 4,
                  "layer_types": [*["linear_attention"] * 3, "full_attention"]}  # fmt: skip
    if family == "gpt2":
        sizes = {"vocab_size": 2048, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).float().eval()


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_counts_what_torch_counts(family: str, counted: Any) -> None:
    """Forward alone, adapters on a frozen base, and all weights; 2 rows of 64 tokens."""
    tokens, lengths = torch.arange(128).view(2, 64), torch.tensor([64, 64])
    model = language_model(family)

    def step(roles: Any) -> None:
        roles.head(roles.hidden(tokens)).square().mean().backward()

    full = Roles(model, "plain")
    with torch.no_grad():
        forward = counted(lambda: full.head(full.hidden(tokens)))
    assert weights_of(full, "base").forward(lengths, 128) == pytest.approx(forward, rel=WITHIN)
    found = weights_of(full, "base")
    assert (found.frozen, found.head_is_trained) == (0, True)
    assert found.update(lengths, 128) == pytest.approx(counted(lambda: step(full)), rel=WITHIN)
    frozen = Roles(language_model(family).requires_grad_(False), "plain")
    frozen.add_adapter(POLICY, conftest.LORA, 3)
    of_adapters = weights_of(frozen, POLICY)
    assert of_adapters.frozen == found.trained  # the base's
    operations = counted(lambda: step(frozen))
    assert of_adapters.update(lengths, 128) == pytest.approx(operations, rel=WITHIN)
    assert weights_of(frozen, "reference").trained == 0


def test_the_formula_by_hand() -> None:
    """Rows of 3 and 1 tokens, 2 predicted; of 50 weights 10 are trained, the head has 7."""
    sizes = Weights(frozen=40, trained=10, head=7, head_is_trained=False, attention=5,
                    recomputes=False)  # fmt: skip
    lengths = torch.tensor([3, 1])
    assert sizes.forward(lengths, 2) == 2 * 50 * 4 + 2 * 7 * 2 + 4 * 5 * (9 + 1)
    assert sizes.update(lengths, 2) == (4 * 40 + 6 * 10) * 4 + 4 * 7 * 2 + 12 * 5 * (9 + 1)
    whole = replace(sizes, frozen=0, trained=50, head_is_trained=True)
    assert whole.update(lengths, 2) == 6 * 50 * 4 + 6 * 7 * 2 + 12 * 5 * (9 + 1)
    again = replace(whole, recomputes=True)
    assert again.update(lengths, 2) == whole.update(lengths, 2) + whole.forward(lengths, 2)
    # A prompt of 4 once for responses of 3 and 1; of these 2 tokens are fed, which see 5 and 6.
    prompts, responses = torch.tensor([4, 4]), torch.tensor([3, 1])
    found = sizes.sampling(prompts, responses, 2)
    assert found == 2 * 50 * (4 + 2) + 2 * 7 * 4 + 4 * 5 * (16 + 5 + 6)
    assert sizes.sampling(prompts, responses, 1) == found + 2 * 50 * 4 + 4 * 5 * 16


def test_linear_attention_has_no_square() -> None:
    assert weights_of(language_model("qwen3_5_text")).attention == 4 * 64  # of four layers one


@pytest.fixture
def make(make_ppo: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PPOModule]:
    """PPO on plain layers, with a reward that costs nothing and responses of full length."""

    def build(**changes: Any) -> PPOModule:
        def frozen(*args: Any, **kwargs: Any) -> PreTrainedModel:
            return language_model("qwen3").requires_grad_(False)

        roles = Roles(frozen(), "plain")
        roles.add_adapter(POLICY, conftest.LORA, 3)
        sizes = {"rollout_batch_size": 4, "minibatch_size": 4, "microbatch_size": 4}
        config = conftest.ppo_config(
            **{"max_response_tokens": 12, "ppo_epochs": 1} | sizes | changes
        )
        monkeypatch.setattr(conftest, "language_model", frozen)
        critic = conftest.add_critic(roles, "", config.critic) if config.has_critic else None
        chat = type(conftest.CHAT)(**vars(conftest.CHAT) | {"end_token_ids": (10**6,)})
        return PPOModule(
            roles, conftest.Reward.of(lambda decoded: [0.0] * len(decoded)), config,
            critic=critic, chat=chat, prompts={"train": [{"prompt": ""}] * 8, "val": []}, seed=0,
        )  # fmt: skip

    return build


def prompts(rows: int = 4) -> Prompts:
    tokens = torch.arange(rows * 17).view(rows, 17) % 64
    return Prompts(
        tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool), index=torch.arange(rows)
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"critic": "adapter", "ppo_epochs": 2, "microbatch_size": 2}, marks=pytest.mark.matrix
        ),
        pytest.param(
            {"critic": "model", "kl_estimator": "full", "kl_in": "reward", "critic_warmup": 1},
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["adapter critic", "whole critic, full KL reward, warm-up"],
)  # fmt: skip
def test_each_phase_of_ppo_is_counted(changes: dict[str, Any], make: Any, counted: Any) -> None:
    module, outputs = make(**changes), conftest.Outputs()
    batch = prompts(4 // module.config.samples_per_prompt)
    found: dict[str, int] = {}

    def work() -> None:
        roll_out = module.collector.roll_out
        given = batch, module.generator(0, 0), module.config.samples_per_prompt
        rollouts: list[Any] = []
        found["rollout"] = counted(lambda: rollouts.append(roll_out(*given)))
        decoded = module.collector.decode(rollouts[0], "train")
        found["score"] = counted(lambda: module.collector.score(decoded))
        experience = module.make_experience(rollouts[0])
        found["update"] = counted(lambda: learn(module, experience, module.generator(0, 1)))

    within_fit(module, work)
    del module.training_step
    conftest.fit(module, [batch], [outputs])
    totals = iteration_totals(module, outputs.steps[0], devices=3)
    for phase, operations in found.items():
        assert totals[f"{phase}_flops"] == pytest.approx(operations, rel=WITHIN), phase
    assert totals["flops"] == sum(totals[f"{phase}_flops"] for phase in found)
    # 4 responses of 12 tokens to prompts of 17.
    readings = 1 + ("critic" in changes) + (changes.get("kl_in") == "reward")
    assert totals["generated_tokens"] == 48
    assert totals["scored_tokens"] == readings * 116
    assert totals["trained_tokens"] == module.config.ppo_epochs * 116
    assert totals["device_s"] > 0


@pytest.mark.parametrize(
    ("is_exact", "missing", "readings"), [(True, [], 1), (True, ["values"], 2), (False, [], 2)]
)
def test_the_policy_reads_what_its_sampler_gives_no_numbers_for(
    make: Any, is_exact: bool, missing: list[str], readings: int
) -> None:
    """4 rows of 29 tokens: the reference reads them, and the policy where it annotates."""
    module, outputs = make(), conftest.Outputs()  # with a critic on the policy's trunk
    native = module.collector.sampler

    def sample(*given: Any) -> SampledResponses:
        return replace(native.sample(*given), **dict.fromkeys(missing))

    module.collector.sampler = SimpleNamespace(is_exact=is_exact, sample=sample)
    conftest.fit(module, [prompts()], [outputs])
    assert iteration_totals(module, outputs.steps[0])["scored_tokens"] == readings * 116


def test_demonstrations_and_reward_models_add_to_an_iteration(make: Any) -> None:
    """Two updates, each with 4 demonstrations of 33 tokens of which 16 are learned."""
    module, outputs = make(ptx_coef=1.0, ptx_batch_size=4, ppo_epochs=2), conftest.Outputs()
    example = DemonstrationTokens(list(range(17)), list(range(16)))
    module.ptx = PTX([example] * 8, module.config, pad_id=0, seed=0)
    conftest.fit(module, [prompts()], [outputs])
    whole, ptx, module.ptx = iteration_totals(module, outputs.steps[0]), module.ptx, None
    plain = iteration_totals(module, outputs.steps[0])
    rows, policy = torch.full((4,), 33), weights_of(module.roles, POLICY)
    assert ptx is not None
    assert whole["update_flops"] - plain["update_flops"] == 2 * policy.update(rows, 64)
    assert whole["trained_tokens"] - plain["trained_tokens"] == 2 * 132
    (source,) = module.collector.reward.sources
    source.module, source.role = module.roles, POLICY  # a reward model in this process
    more = iteration_totals(module, outputs.steps[0])
    assert more["score_flops"] - plain["score_flops"] == policy.forward(torch.full((4,), 29))
    assert more["scored_tokens"] - plain["scored_tokens"] == 116


@pytest.mark.parametrize(("role", "finetune"), [
    (SFT, "full"), (REWARD, "lora"), (POLICY, "lora"),
])  # fmt: skip
def test_a_batch_of_a_supervised_stage_is_counted(
    role: str, finetune: str, counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch does not count the gradient that a frozen output layer computes in its forward pass.
    plain = partial(supervised.token_logprobs, frozen_head=False)
    monkeypatch.setattr(supervised, "token_logprobs", lambda *a, frozen_head, **k: plain(*a, **k))
    roles = Roles(language_model("qwen3").requires_grad_(finetune == "full"), "plain")
    if role == REWARD:
        roles.heads[REWARD] = ScalarHeads.random(256, 1, torch.Generator().manual_seed(2))
    if finetune == "lora":
        roles.add_adapter(role, conftest.LORA, 3)
    else:
        roles.assign(role)
    sizes = {"batch_size": 8, "microbatch_size": 8}
    module: Any = {
        SFT: lambda: SFTModule(roles, conftest.sft_config(**sizes)),
        REWARD: lambda: RewardModule(roles, conftest.rm_config(**sizes), seed=0),
        POLICY: lambda: DPOModule(roles, conftest.dpo_config(**sizes)),
    }[role]()
    tokens = torch.arange(8 * 49).view(8, 49) % 64
    mask = torch.ones_like(tokens, dtype=torch.bool)
    batch: Any = Demonstrations(tokens=tokens, mask=mask, target_mask=mask & (mask.cumsum(1) > 17))
    if role != SFT:
        batch = Preferences(
            chosen=tokens, chosen_mask=mask, rejected=tokens.flip(1), rejected_mask=mask,
            margin=torch.zeros(8), prompt_tokens=torch.full((8,), 17),
        )  # fmt: skip
    operations = within_fit(module, lambda: counted(lambda: module.accumulate(batch, 8)))
    totals = step_totals(module, batch, seconds=0.5, devices=2)
    assert totals["flops"] == pytest.approx(operations, rel=WITHIN)
    assert totals["trained_tokens"] == 8 * 49 * (1 if role == SFT else 2)
    assert totals["device_s"] == 1.0
