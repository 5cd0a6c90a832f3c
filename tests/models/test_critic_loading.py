"""Scalar heads, and where a critic's head stands and what it starts as."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.models.build_roles import add_critic, attach_reward, start_from
from lightning_rlhf.models.checkpoint import Final, find
from lightning_rlhf.models.config import CRITIC, POLICY, REFERENCE, REWARD, VALUE
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.stages.final import write_final

from .conftest import build_manifest, randomise

MASK = torch.ones(3, 9, dtype=torch.bool)
NO_SCALE = (0.0, 1.0)


def policy(lineage: Any) -> Roles:
    """As stage=ppo puts its models together, before the critic; the policy has been trained."""
    roles = start_from(lineage.config, lineage.sft, trainable=False, seed=0)
    attach_reward(roles, REWARD, lineage.rm, lineage.config, lineage.hash)
    roles.add_adapter(POLICY, lineage.config.lora)
    randomise(roles, POLICY, seed=6)
    return roles


def critic(lineage: Any, kind: str, *, reward: Final | None = None,
           scale: tuple[float, float] = NO_SCALE) -> tuple[Roles, Roles, str]:  # fmt: skip
    roles = policy(lineage)
    owner, role = add_critic(
        roles, lineage.config, kind, sft=lineage.sft, reward=reward, scale=scale, seed=0
    )  # type: ignore[arg-type]
    return roles, owner, role


@torch.no_grad()
def last_value(owner: Roles, role: str, tokens: Tensor) -> Tensor:
    """V after the whole sequence."""
    with owner.use_role(role):
        return owner.heads[VALUE](owner.hidden(tokens)[:, -1]).squeeze(-1)


@pytest.fixture
def full_reward(tmp_path: Path, lineage: Any, tokenizer: Any) -> Final:
    """A reward model whose language model was trained whole: the SFT model's, or the base's."""
    sft = None if lineage.sft.is_adapter else lineage.sft
    roles = start_from(lineage.config, sft, trainable=True, seed=0)
    roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, torch.Generator().manual_seed(3))
    roles.assign(REWARD)
    with torch.no_grad():
        for parameter in roles.model.parameters():
            parameter += 0.02
    manifest = build_manifest("rm", tokenizer_hash=lineage.hash)
    write_final(tmp_path / "final", roles, REWARD, tokenizer, manifest, REWARD)
    return find(str(tmp_path / "final"), "reward.checkpoint")


@pytest.mark.parametrize("kind", ["head", "adapter", "model"])
def test_every_value_starts_at_zero_and_can_be_trained(
    lineage: Any, tokens: Tensor, kind: str
) -> None:
    roles, owner, role = critic(lineage, kind)
    assert (owner is roles, role) == (kind != "model", POLICY if kind == "head" else CRITIC)
    assert not last_value(owner, role, tokens).any()
    assert all(p.requires_grad for p in owner.heads[VALUE].parameters())
    for reader, reads in ((roles, POLICY), (owner, role)):
        assert list(reader.trained_by(reads))
    # Apart from the policy, it starts as the reference and not as the policy, which was trained.
    if kind != "head":
        assert torch.allclose(owner.probe(role), roles.probe(REFERENCE), atol=1e-5)
        assert not torch.allclose(roles.probe(POLICY), roles.probe(REFERENCE), atol=1e-2)
        mine = {id(p) for p in owner.trained_by(role)}
        assert not mine & {id(p) for p in roles.trained_by(POLICY)}


@torch.no_grad()
def test_an_adapter_starts_as_the_reward_model_standardised(lineage: Any, tokens: Tensor) -> None:
    roles, owner, role = critic(lineage, "adapter", reward=lineage.rm, scale=(0.5, 2.0))
    raw = roles.reward(tokens, MASK)
    assert raw.std() > 0.01
    expected = (raw - 0.5) / 2.0
    torch.testing.assert_close(last_value(owner, role, tokens), expected, rtol=1e-5, atol=1e-6)
    # A copy that is trained: the reward model itself stays what it is.
    trained = {n for n, p in roles.named_parameters() if p.requires_grad and f".{CRITIC}." in n}
    frozen = {n for n, p in roles.named_parameters() if not p.requires_grad and ".reward." in n}
    assert trained
    assert {n.replace(f".{CRITIC}.", ".reward.") for n in trained} <= frozen
    for parameter in owner.trained_by(role):
        parameter.add_(0.1)
    owner.heads[VALUE].linear.weight.add_(1.0)
    assert torch.equal(roles.reward(tokens, MASK), raw)


def test_a_model_starts_as_the_reward_model_standardised(
    lineage: Any, tokens: Tensor, full_reward: Final
) -> None:
    """Whatever the SFT model is: whole weights, or an adapter on others."""
    roles = start_from(lineage.config, lineage.sft, trainable=False, seed=0)
    judge = attach_reward(roles, REWARD, full_reward, lineage.config, lineage.hash)
    with torch.no_grad():
        raw = judge.reward(tokens, MASK)
    roles.add_adapter(POLICY, lineage.config.lora)
    owner, role = add_critic(roles, lineage.config, "model", sft=lineage.sft, reward=full_reward,
                             scale=(-1.0, 0.25), seed=0)  # fmt: skip
    assert owner not in (roles, judge)
    expected = (raw + 1.0) / 0.25
    torch.testing.assert_close(last_value(owner, role, tokens), expected, rtol=1e-5, atol=1e-5)
    assert all(p.requires_grad for p in owner.parameters())


@torch.no_grad()
def test_a_model_starts_as_a_reward_adapter_merged(lineage: Any, tokens: Tensor) -> None:
    """On whole SFT weights or on an SFT adapter, which is merged as well."""
    roles, owner, role = critic(lineage, "model", reward=lineage.rm, scale=(0.5, 2.0))
    expected = (roles.reward(tokens, MASK) - 0.5) / 2.0
    torch.testing.assert_close(last_value(owner, role, tokens), expected, rtol=1e-5, atol=1e-5)
    assert not [name for name, _ in owner.named_parameters() if "lora" in name]
    assert all(parameter.requires_grad for parameter in owner.parameters())


def test_a_random_head_has_standard_deviation_one_over_root_d_plus_one() -> None:
    d = 20_000
    head = ScalarHeads.random(d, 1, torch.Generator().manual_seed(0))
    expected = 1 / math.sqrt(d + 1)
    # The standard error of a standard deviation of n normals is sigma / sqrt(2 n): 4 of them.
    assert head.linear.weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * d))
    assert abs(head.linear.weight.mean().item()) < 4 * expected / math.sqrt(d)
    assert head.linear.bias.tolist() == [0.0]


def test_a_head_computes_in_fp32_under_autocast_and_from_bf16() -> None:
    head = ScalarHeads.random(512, 1, torch.Generator().manual_seed(0))
    hidden = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = hidden.double() @ head.linear.weight.detach().double().T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0)
