"""Each check of the preflight passes on the modules of the stages, and fails on a planted fault."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.core.records import SampledResponses
from lightning_rlhf.data.batches import collate_demonstrations, collate_preferences, collate_prompts
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens, PromptTokens
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD, SFT, VALUE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import RewardModule, SFTModule
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout import score
from lightning_rlhf.rollout.sampler import Sampler
from lightning_rlhf.stages.preflight import at_most, examine, of_models, relative, trainable

from .conftest import (
    VOCABULARY,
    changed,
    parameters,
    ppo_config,
    rm_config,
    rm_roles,
    sft_config,
    sft_roles,
)

CPU = torch.device("cpu")
OF_PPO = {"ratio", "KL to the reference", "padding: base"}


def data(kind: str) -> Any:
    """Six rows of 2 to 7 tokens, of which the four shortest but one each are looked at."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(9, 64, (count,), generator=generator).tolist()

    examples: Sequence[Any]
    if kind == "prompts":
        examples = [PromptTokens(tokens(n), n - 2) for n in range(2, 10)]
        collate = partial(collate_prompts, pad_id=0)
    elif kind == "demonstrations":
        examples = [DemonstrationTokens(tokens(n), tokens(9 - n)) for n in range(2, 8)]
        collate = partial(collate_demonstrations, pad_id=0)  # type: ignore[assignment]
    else:
        examples = [PreferenceTokens(tokens(n), tokens(n), tokens(8 - n), 0.0) for n in range(2, 8)]
        collate = partial(collate_preferences, pad_id=0)  # type: ignore[assignment]
    return SimpleNamespace(train=examples, val=examples, collate=collate)


@torch.no_grad()
def verdicts(module: Any, kind: str = "prompts") -> dict[str, str]:
    """Name of each check that applies -> its verdict."""
    checks = [*trainable(module), *of_models(module, data(kind), CPU)]
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check.verdict for check in checks}


def failing(module: Any, kind: str = "prompts") -> set[str]:
    """Names of the checks that fail."""
    return {name for name, verdict in verdicts(module, kind).items() if verdict == "failed"}


@pytest.mark.parametrize("critic", ["head", "adapter", "model"])
def test_a_new_ppo_passes_every_check(
    make_ppo: Callable[..., PPOModule], architecture: str, critic: str
) -> None:
    module = make_ppo(architecture, fresh=True, critic=critic, samples_per_prompt=2)
    found = verdicts(module)
    assert set(found.values()) == {"passed"}
    trained = {f"trainable: {role}" for role in ("base", POLICY, REWARD, "critic")}
    own = {"padding: critic"} if critic == "model" else set()
    assert found.keys() == OF_PPO | own | trained


def test_checks_change_no_weight_no_role_and_no_random_state(
    make_ppo: Callable[..., PPOModule],
) -> None:
    """Of a model that draws numbers wherever it is read, as dropout does."""

    def draws(*_: Any) -> None:
        torch.rand(1), random.random()

    module = make_ppo(fresh=True)
    module.roles.causal_lm.base_model.register_forward_pre_hook(draws)
    before, head = parameters(module), module.roles.heads[VALUE]
    trainer = SimpleNamespace(precision="32-true", devices=1, processes=1)
    ready: Any = SimpleNamespace(device=CPU, settings=SimpleNamespace(trainer=trainer))
    state, drawn = torch.get_rng_state(), random.getstate()
    checks, _ = examine(ready, module, data("prompts"), resumed=False)
    assert {check.name for check in checks} > OF_PPO
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == drawn
    assert not changed(before, parameters(module))
    assert module.roles.heads[VALUE] is head
    assert (module.roles.role, module.iteration) == (POLICY, 0)
    assert module.collector.sampler.params.max_response_tokens == ppo_config().max_response_tokens


def read_padding(monkeypatch: pytest.MonkeyPatch, *roles: str) -> None:
    """Let the hidden states of these roles depend on all columns of a batch."""
    hidden_at = Roles.hidden_at

    def sees(self: Roles, tokens: Tensor, wanted: Tensor) -> Tensor:
        hidden = hidden_at(self, tokens, wanted)
        mean = tokens.float().mean() / VOCABULARY
        return hidden * (1 + mean) if self.role in roles else hidden

    monkeypatch.setattr(Roles, "hidden_at", sees)


class Wrong(Sampler):
    """A sampler whose log-probabilities are those of twice the temperature, nearly."""

    def __init__(self, sampler: Any, *, is_exact: bool) -> None:
        self.sampler, self.is_exact = sampler, is_exact

    def sample(self, *given: Any) -> SampledResponses:
        found = self.sampler.sample(*given)
        return replace(found, logprobs=found.logprobs / 2)


def test_log_probabilities_of_another_temperature_fail(make_ppo: Callable[..., PPOModule]) -> None:
    module = make_ppo(fresh=True)
    sampler = module.collector.sampler
    module.collector.sampler = Wrong(sampler, is_exact=True)
    assert failing(module) == {"ratio", "KL to the reference"}
    module.collector.sampler = Wrong(sampler, is_exact=False)  # the model's own are used
    assert failing(module) == set()


def test_the_kl_of_a_policy_that_was_trained_is_not_judged(
    make_ppo: Callable[..., PPOModule],
) -> None:
    found = verdicts(make_ppo(fresh=False))
    assert found.pop("KL to the reference") == "not applicable"
    assert set(found.values()) == {"passed"}


def another_reference(module: PPOModule, patch: pytest.MonkeyPatch) -> None:
    module.roles._stacks[REFERENCE] = (REWARD,)


def shifted_update(module: PPOModule, patch: pytest.MonkeyPatch) -> None:
    whole = score.policy_outputs

    def shifted(*arguments: Any) -> Any:
        outputs = whole(*arguments)
        return replace(outputs, logprobs=outputs.logprobs.roll(1))

    patch.setattr(score, "policy_outputs", shifted)


def infinite_logits(module: PPOModule, patch: pytest.MonkeyPatch) -> None:
    module.roles.causal_lm.get_input_embeddings().weight.data.fill_(torch.nan)


@pytest.mark.parametrize(("plant", "failed"), [
    (another_reference, {"KL to the reference"}), (shifted_update, {"ratio"}),
    (infinite_logits, {"ratio"}),
    # The sampler has a loop of its own.
    (lambda _, patch: read_padding(patch, POLICY), {"ratio", "padding: base"}),
])  # fmt: skip
def test_a_fault_of_the_policy_fails(
    make_ppo: Callable[..., PPOModule], monkeypatch: pytest.MonkeyPatch, plant: Any,
    failed: set[str],
) -> None:  # fmt: skip
    module = make_ppo(fresh=True)
    plant(module, monkeypatch)
    assert failing(module) == failed


@pytest.mark.parametrize("fault", ["critic", "reward", "no number", None])
def test_models_with_a_base_of_their_own_are_read_too(
    make_ppo: Callable[..., PPOModule], monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """A reward that reads the last column, which is padding in a shorter row, or refuses."""
    module, owner = make_ppo(fresh=True, critic="model"), rm_roles("qwen3").requires_grad_(False)

    def rewards(tokens: Tensor, mask: Tensor) -> Tensor:
        if fault == "no number":
            raise RewardError("the template refuses")
        return owner.rewards(tokens, torch.ones_like(mask) if fault == "reward" else mask)

    (learned,) = module.collector.reward.sources
    module.collector.reward = Reward.of(replace(learned, rewards=rewards, module=owner))
    assert module.critic is not None
    if fault == "critic":
        read_padding(monkeypatch, module.critic.role)
    name = module.collector.reward.terms[0].name if fault in ("reward", "no number") else fault
    assert failing(module) == ({f"padding: {name}"} if fault else set())


@pytest.mark.parametrize(("marker", "trained", "role"), [
    ("embed_tokens", True, "base"),
    (f"heads.{VALUE}", False, "critic"),
])  # fmt: skip
def test_a_role_that_is_trained_or_frozen_by_mistake_fails(
    make_ppo: Callable[..., PPOModule], marker: str, trained: bool, role: str
) -> None:
    module = make_ppo(fresh=True)
    for name, parameter in module.named_parameters():
        if marker in name:
            parameter.requires_grad_(trained)
    found = {check.name for check in trainable(module) if check.verdict == "failed"}
    assert found == {f"trainable: {role}"}


def test_supervised_stages_pass_and_fail_where_padding_is_read(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = SFTModule(sft_roles(architecture), sft_config())
    assert set(verdicts(tuned, "demonstrations").values()) == {"passed"}
    scored = RewardModule(rm_roles(architecture), rm_config(), seed=0)
    assert set(verdicts(scored, "preferences").values()) == {"passed"}
    read_padding(monkeypatch, SFT, REWARD)
    assert failing(tuned, "demonstrations") == {"padding: base"}
    assert failing(scored, "preferences") == {"padding: base"}


def test_a_difference_is_relative_to_large_numbers_alone_and_nan_fails() -> None:
    ones = torch.ones(4)
    assert relative(0.1 * ones, 0.2 * ones).tolist() == pytest.approx([-0.1] * 4)  # 0.2 is below 1
    assert relative(90 * ones, 100 * ones).tolist() == pytest.approx([-0.1] * 4)
    assert at_most("x", torch.tensor([0.1, -0.1]), 0.10001).verdict == "passed"
    assert at_most("x", torch.tensor([0.11, -0.11]), 0.1).verdict == "failed"
    assert at_most("x", relative(ones * torch.nan, ones), 0.1).verdict == "failed"
    assert at_most("x", relative(ones, ones * torch.nan), 0.1).verdict == "failed"
