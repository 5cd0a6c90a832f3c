"""Adapters added in place or merged have the outputs and gradients of PEFT's forward."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor, nn

from lightning_rlhf.kernels import lora
from lightning_rlhf.kernels.lora import FusedLoRALinear, _LoRA
from lightning_rlhf.models.config import POLICY, REFERENCE, LoRASettings
from lightning_rlhf.models.roles import Roles

from .conftest import build_model

PEFT_FORWARD = LoRALinear.forward
TOKENS = torch.tensor([[3, 9, 4, 11, 7], [8, 2, 2, 5, 10]])


def a_policy(dtype: torch.dtype = torch.float32) -> Roles:
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
    model = build_model("qwen3", **sizes, **heads)
    roles = Roles(model.to(dtype))
    for role in ("sft", POLICY):
        roles.add_adapter(role, LoRASettings(r=4, alpha=8, target_modules="all-linear"))
        if role == "sft":
            roles._stacks[REFERENCE] = roles._stacks["sft"]
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if "lora_" in name or "bias" in name:
                parameter.normal_(std=0.2)
    return roles


def outcome(roles: Roles, tokens: Tensor = TOKENS) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the gradients of a weighted sum of them."""
    roles.zero_grad()
    hidden = roles.hidden(tokens)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden.float() * weights).sum().backward()
    return hidden.detach(), {n: p.grad for n, p in roles.named_parameters() if p.grad is not None}


def quick_and_plain(
    roles: Roles, monkeypatch: pytest.MonkeyPatch, tokens: Tensor = TOKENS
) -> tuple[tuple[Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]:
    """The outcome of our forward, and of PEFT's in every layer."""
    quick = outcome(roles, tokens)
    quick = quick[0], {n: g.clone() for n, g in quick[1].items()}
    with monkeypatch.context() as patch:
        patch.setattr(FusedLoRALinear, "forward", PEFT_FORWARD)
        plain = outcome(roles, tokens)
    return quick, plain


@pytest.fixture
def peft_is_asked(monkeypatch: pytest.MonkeyPatch) -> list[LoRALinear]:
    """The layers that PEFT's own forward computed."""
    asked: list[LoRALinear] = []

    def spy(self: LoRALinear, *args: object, **kwargs: object) -> Tensor:
        asked.append(self)
        return PEFT_FORWARD(self, *args, **kwargs)

    monkeypatch.setattr(LoRALinear, "forward", spy)
    return asked


def quick_layers(roles: Roles) -> list[FusedLoRALinear]:
    return [module for module in roles.modules() if isinstance(module, FusedLoRALinear)]


@pytest.mark.parametrize("merges", [False, True])
def test_the_formula_has_the_gradients_that_autograd_gives_it(merges: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, learns: bool = True) -> Tensor:
        found = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return found.requires_grad_(learns)

    x, weight, bias = random(2, 3, 5), random(4, 5, learns=False), random(4, learns=False)
    matrices = random(2, 5), random(4, 2), random(3, 5), random(4, 3)
    scales = [2.0, 0.5]

    def ours(x: Tensor, *matrices: Tensor) -> Tensor:
        return _LoRA.apply(x, weight, bias, merges, scales, *matrices)

    a, b, c, d = matrices
    expected = x @ weight.T + bias + 2 * x @ a.T @ b.T + 0.5 * x @ c.T @ d.T
    torch.testing.assert_close(ours(x, *matrices), expected)
    assert torch.autograd.gradcheck(ours, (x, *matrices))


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what was multiplied with the sum of the matrices."""
    shapes: list[torch.Size] = []

    class Spy(_LoRA):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
            shapes.extend([x.shape] * args[2])  # merges
            return _LoRA.forward(ctx, x, *args)

    monkeypatch.setattr(lora, "_LoRA", Spy)
    return shapes


@pytest.mark.parametrize("merging", [0, 1e9])
@pytest.mark.parametrize("role", [POLICY, "sft"])
def test_hidden_states_and_gradients_are_those_of_peft(
    role: str, merging: float, monkeypatch: pytest.MonkeyPatch, peft_is_asked: list[LoRALinear],
    folds: list[torch.Size], by_onednn: list[tuple[int, ...]],
) -> None:  # fmt: skip
    """The policy on a frozen SFT adapter, which are two adapters in a layer; and one alone."""
    monkeypatch.setattr(lora, "MERGE_FROM", merging)
    roles = a_policy()
    roles._stack("sft", trainable=role == "sft")
    roles.set_role(role)
    by_onednn.clear()
    outcome(roles)
    # Of a layer what it says and the gradient of its input, which the first three have not; and
    # four for an adapter that learns, where it stands in the weight.
    count, learns = len(quick_layers(roles)), quick_layers(roles)[0].active_adapters.count(role)
    assert len(by_onednn) == 2 * count - 3 + (4 * learns * count if merging == 0 else 0)
    folds.clear()
    before = len(peft_is_asked)
    (hidden, gradients), (plain, plain_gradients) = quick_and_plain(roles, monkeypatch)
    assert len(peft_is_asked) == before
    assert len(folds) == (len(quick_layers(roles)) if merging == 0 else 0)
    torch.testing.assert_close(hidden, plain, atol=1e-5, rtol=0)
    assert gradients.keys() == plain_gradients.keys()
    assert all(f".{role}." in name for name in gradients)
    scale = max(float(g.abs().max()) for g in plain_gradients.values())
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(
            gradient, plain_gradients[name], rtol=0, atol=1e-5 * scale, msg=name
        )


def test_under_autocast_they_are_as_near_to_the_truth_as_those_of_peft(
    monkeypatch: pytest.MonkeyPatch, peft_is_asked: list[LoRALinear]
) -> None:
    """The truth: the same weights and adapters, computed in fp32.

    On one batch either may be nearer by chance, so that it is the mean over batches that counts.
    """
    roles, exact = a_policy(torch.bfloat16), a_policy(torch.bfloat16).float()
    for model in (roles, exact):
        model.set_role(POLICY)
    off, gradients_off = [0.0, 0.0], [0.0, 0.0]
    for seed in range(24):
        tokens = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(seed))
        truth, true_gradients = outcome(exact, tokens)
        whole = flat(true_gradients, true_gradients)
        with torch.autocast("cpu", torch.bfloat16):
            found = quick_and_plain(roles, monkeypatch, tokens)
        for i, (hidden, gradients) in enumerate(found):
            assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
            off[i] += float((hidden - truth).norm() / truth.norm()) / 24
            difference = flat(gradients, true_gradients) - whole
            gradients_off[i] += float(difference.norm() / whole.norm()) / 24
    assert not peft_is_asked
    assert off[0] < 1.2 * off[1] < 0.1
    assert gradients_off[0] < 1.2 * gradients_off[1] < 0.1


def flat(gradients: dict[str, Tensor], names: Iterable[str]) -> Tensor:
    """The gradients of `names`, one behind the other."""
    return torch.cat([gradients[name].flatten() for name in names])


def merge(roles: Roles) -> None:
    roles.model.merge_adapter(["sft", POLICY])


def train_the_base(roles: Roles) -> None:
    for layer in quick_layers(roles):
        layer.base_layer.weight.requires_grad_(True)


def dropout(roles: Roles) -> None:
    roles.train()
    for layer in quick_layers(roles):
        layer.lora_dropout[POLICY] = nn.Dropout(0.5)


@pytest.mark.parametrize("change", [merge, train_the_base, dropout])
def test_what_is_no_sum_on_frozen_weights_is_left_to_peft(
    change: Callable[[Roles], None], peft_is_asked: list[LoRALinear]
) -> None:
    roles = a_policy()
    roles.set_role(POLICY)
    change(roles)
    roles.hidden(TOKENS)
    assert len(peft_is_asked) == len(quick_layers(roles)) > 0


# Merged while nothing is trained


@torch.no_grad()
def logits(roles: Roles) -> Tensor:
    return roles.head(roles.hidden(TOKENS))


def lora_layers(roles: Roles) -> int:
    return sum(isinstance(module, LoRALinear) for module in roles.modules())


@pytest.mark.parametrize("role", [POLICY, REFERENCE])
def test_every_role_has_the_same_outputs_from_plain_layers(role: str) -> None:
    """In fp32: of 16 bits the sum would lose most of a small adapter, and they stay as they are."""
    narrow = a_policy(torch.bfloat16)
    with narrow.merged():
        assert lora_layers(narrow) > 0
    roles = a_policy()
    with roles.use_role(role):
        beside = logits(roles)
        with roles.merged():
            assert lora_layers(roles) == 0
            torch.testing.assert_close(logits(roles), beside, atol=1e-5, rtol=0)
        assert torch.equal(logits(roles), beside)
    roles.set_role(POLICY)
    assert (logits(roles) - beside).abs().max() > 0.1 or role == POLICY


def test_afterwards_the_very_modules_are_back() -> None:
    roles = a_policy()
    before: dict[str, Any] = {name: id(module) for name, module in roles.named_modules()}
    state = {name: tensor.clone() for name, tensor in roles.state_dict().items()}
    trained = [name for name, p in roles.named_parameters() if p.requires_grad]
    with pytest.raises(KeyboardInterrupt), roles.merged():
        raise KeyboardInterrupt
    assert {name: id(module) for name, module in roles.named_modules()} == before
    assert list(before) == [name for name, _ in roles.named_modules()]
    assert all(torch.equal(tensor, state[name]) for name, tensor in roles.state_dict().items())
    assert [name for name, p in roles.named_parameters() if p.requires_grad] == trained


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_that_is_no_plain_sum_stays_as_it_is(option: dict[str, bool]) -> None:
    """From another program: DoRA scales the columns of W + B A; an adapter may add a bias."""
    roles = a_policy()
    roles.model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], **option))
    roles._stacks["other"] = ("other",)
    roles.set_role("other")
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if ".other." in name:
                parameter.add_(0.1)
    beside = logits(roles)
    with roles.merged():
        assert lora_layers(roles) == 2  # q_proj of two layers; the others have nothing to add
        torch.testing.assert_close(logits(roles), beside, atol=1e-5, rtol=0)


def test_no_other_role_is_used_from_merged_weights() -> None:
    """They are the active role's; another role would have its outputs."""
    roles = a_policy()
    roles.set_role(POLICY)
    with roles.merged():
        with pytest.raises(RuntimeError, match="reference cannot be activated"):
            roles.set_role(REFERENCE)
        with roles.merged(), roles.use_role(POLICY):
            assert lora_layers(roles) == 0
        with pytest.raises(RuntimeError, match="reference cannot be activated"):
            roles.set_role(REFERENCE)
    with roles.use_role(REFERENCE):
        assert lora_layers(roles) > 0
