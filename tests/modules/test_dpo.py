"""Direct preference optimization: log-probabilities and gradients, and what they depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lightning_rlhf.core.records import Labels, Preferences
from lightning_rlhf.data.batches import collate_labels
from lightning_rlhf.data.lengths import LabelTokens
from lightning_rlhf.models.config import POLICY, REFERENCE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.supervised import DPOModule, KTOModule

from .conftest import (
    LORA,
    Outputs,
    by_architecture,
    close,
    dpo_config,
    fit,
    language_model,
    same_direction,
    sft_roles,
    shake,
    with_policy,
)
from .test_reward import CHOSEN, REJECTED, pad_to

PROMPT = torch.tensor([2, 2, 1, 4, 0, 0]) + 1
"""Tokens of each prompt; a row has at least one more."""
LENGTHS = tuple(tuple(max(n, int(p) + 1) for n, p in zip(side, PROMPT, strict=True))
                for side in (CHOSEN, REJECTED))  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "smoothed": {"label_smoothing": 0.2},
    "sigmoid_norm": {"loss_type": "sigmoid_norm"},
    "ipo": {"loss_type": "ipo"},
    "reference_free": {"reference_free": True},
    "sft": {"sft_coef": 0.7},
    "orpo": {"loss_type": "orpo", "sft_coef": 1.0},
    "simpo": {"loss_type": "simpo", "simpo_gamma": 0.3},
    "cpo": {"loss_type": "cpo", "sft_coef": 1.0},
}


def preferences(chosen_width: int = 9, rejected_width: int = 12) -> Preferences:
    """Six pairs with common prompts; wider batches hold other ids on the padding alone."""
    chosen, chosen_mask = pad_to(LENGTHS[0], chosen_width, seed=0)
    rejected, rejected_mask = pad_to(LENGTHS[1], rejected_width, seed=1)
    in_prompt = torch.arange(chosen_width) < PROMPT[:, None]
    rejected = rejected.clone()
    rejected[:, :chosen_width][in_prompt] = chosen[in_prompt]
    return Preferences(
        chosen=chosen, chosen_mask=chosen_mask, rejected=rejected, rejected_mask=rejected_mask,
        prompt_tokens=PROMPT, margin=torch.zeros(6),
    )  # fmt: skip


def dpo_roles(architecture: str, *, trained: bool = True) -> Roles:
    """A policy on an SFT adapter, as if it had been trained a while."""
    roles = sft_roles(architecture)
    roles.add_adapter(POLICY, LORA, 3)
    if trained:
        shake(roles, f".{POLICY}.", seed=3)
    return roles


def labels() -> Labels:
    """Six responses, four of them good, to prompts of other lengths; ids at random."""
    ids = torch.randint(64, (6, 20), generator=torch.Generator().manual_seed(4)).tolist()
    rows = zip(ids, PROMPT, (4, 1, 7, 3, 5, 2), (0, 1, 1, 0, 1, 1), strict=True)
    examples = [LabelTokens(row[:p], row[10 : 10 + n], label=x == 1) for row, p, n, x in rows]
    return collate_labels(examples, pad_id=0)


def slow_logprobs(
    roles: Roles, role: str, tokens: Tensor, lengths: Sequence[int], starts: Tensor = PROMPT
) -> Tensor:
    """Row by row without padding, from all logits in float64: the sum over the response."""
    found, roles = [], roles.reference if role == REFERENCE else roles
    with roles.use_role(role):
        for row, length in enumerate(lengths):
            logits = roles.causal_lm(input_ids=tokens[row, :length][None]).logits[0].double()
            logprobs, start = logits.log_softmax(-1), int(starts[row])
            found.append(sum(logprobs[t - 1, tokens[row, t]] for t in range(start, length)))
    return torch.stack(found)


def slow_loss(roles: Roles, batch: Preferences, **changes: Any) -> Tensor:
    config = dpo_config(**changes)
    logprobs, ratios = {}, {}
    for side, lengths in zip(("chosen", "rejected"), LENGTHS, strict=True):
        tokens = getattr(batch, side)
        logprobs[side] = slow_logprobs(roles, POLICY, tokens, lengths)
        with torch.no_grad():
            reference = slow_logprobs(roles, REFERENCE, tokens, lengths)
        has_none = config.reference_free or config.loss_type in ("orpo", "simpo", "cpo")
        ratios[side] = logprobs[side] - (0 if has_none else reference)
        if config.loss_type not in ("sigmoid", "cpo"):
            ratios[side] = ratios[side] / (torch.tensor(lengths) - PROMPT)
    h, e = ratios["chosen"] - ratios["rejected"], config.label_smoothing
    if config.loss_type == "ipo":
        losses = (h - 1 / (2 * config.beta)) ** 2
    elif config.loss_type == "orpo":
        odds = {side: r.exp() / (1 - r.exp()) for side, r in ratios.items()}
        losses = config.beta * (1 + odds["rejected"] / odds["chosen"]).log()
    elif config.loss_type == "simpo":
        losses = (1 + (config.simpo_gamma - config.beta * h).exp()).log()
    else:
        losses = (1 + (-config.beta * h).exp()).log() * (1 - e)
        losses = losses + (1 + (config.beta * h).exp()).log() * e
    tokens = (torch.tensor(LENGTHS[0]) - PROMPT).sum()
    return losses.mean() - config.sft_coef * logprobs["chosen"].sum() / tokens


def step_of(module: DPOModule, batch: Preferences | Labels | None = None) -> Outputs:
    outputs = Outputs()
    fit(module, [preferences() if batch is None else batch], [outputs])
    return outputs


def check(outputs: Outputs, slow_roles: Roles, expected: Tensor) -> None:
    """Check loss and gradient of the step by those of the slow version."""
    expected.backward()
    close(outputs.steps[0].loss.double(), expected.detach())
    same_direction(
        outputs.grads[0],
        {f"roles.{n}": p.grad for n, p in slow_roles.named_parameters() if p.grad is not None},
        rtol=2e-5,
    )


def slow_kto(roles: Roles, batch: Labels, **changes: Any) -> Tensor:
    config, lengths = dpo_config(loss_type="kto", **changes), batch.mask.sum(1).tolist()
    logprobs, ratios = {}, {}
    starts = batch.mask.sum(1) - batch.target_mask.sum(1)
    texts = [row[:length] for row, length in zip(batch.tokens, lengths, strict=True)]
    further = [
        torch.cat([texts[i][: starts[i]], texts[(i + 3) % 6][starts[(i + 3) % 6] :]])
        for i in range(6)
    ]
    for name, rows in (("own", texts), ("other", further)):
        tokens, sizes = pad_sequence(rows, batch_first=True), [len(row) for row in rows]
        with torch.no_grad():
            reference = slow_logprobs(roles, REFERENCE, tokens, sizes, starts)
        logprobs[name] = slow_logprobs(roles, POLICY, tokens, sizes, starts)
        ratios[name] = logprobs[name] - reference
    kl = max(0.0, ratios["other"].mean().item())
    assert kl > 0.01
    values = 1 / (1 + (-config.beta * (ratios["own"] - kl)).exp())
    losses = torch.where(
        batch.label, config.desirable_weight * (1 - values), config.undesirable_weight * values
    )
    tokens = batch.target_mask[batch.label].sum()
    return losses.mean() - config.sft_coef * logprobs["own"][batch.label].sum() / tokens


def test_kto_and_its_gradient_are_those_of_the_slow_version() -> None:
    changes = {"desirable_weight": 1.25, "undesirable_weight": 0.75, "sft_coef": 0.7}
    slow_roles, module = (
        dpo_roles("qwen3"),
        KTOModule(dpo_roles("qwen3"), dpo_config(loss_type="kto", **changes)),
    )
    check(step_of(module, labels()), slow_roles, slow_kto(slow_roles, labels(), **changes))


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_are_those_of_the_slow_version(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, slow_roles, asked = VARIANTS[variant], dpo_roles("qwen3"), set[str]()
    read = DPOModule.logprobs
    monkeypatch.setattr(DPOModule, "logprobs", lambda *a: asked.add(a[1]) or read(*a))
    outputs = step_of(DPOModule(dpo_roles("qwen3"), dpo_config(**changes)))
    has_none = variant in ("reference_free", "orpo", "simpo", "cpo")
    assert asked == ({POLICY} if has_none else {POLICY, REFERENCE})
    check(outputs, slow_roles, slow_loss(slow_roles, preferences(), **changes))


@by_architecture
def test_scores_are_the_rewards_and_log_probabilities(architecture: str) -> None:
    roles, batch = dpo_roles(architecture), preferences()
    with torch.no_grad():
        found = DPOModule(roles, dpo_config(beta=0.5)).validation_step(batch, 0)
        for side, lengths in zip(("chosen", "rejected"), LENGTHS, strict=True):
            policy, reference = (
                slow_logprobs(roles, role, getattr(batch, side), lengths)
                for role in (POLICY, REFERENCE)
            )
            close(getattr(found, f"{side}_logprob").double(), policy, atol=1e-5)
            close(getattr(found, side).double(), 0.5 * (policy - reference), atol=1e-5)
    assert found.chosen_tokens.tolist() == (torch.tensor(LENGTHS[0]) - PROMPT).tolist()
    # The losses follow from the rewards.
    close(found.losses, F.softplus(found.rejected - found.chosen))


@by_architecture
def test_padding_changes_nothing(architecture: str) -> None:
    module = DPOModule(dpo_roles(architecture), dpo_config(loss_type="sigmoid_norm"))
    with torch.no_grad():
        narrow, wide = (module.scores(preferences(*widths)) for widths in ((9, 12), (14, 20)))
    for name in ("chosen", "rejected", "pair_losses", "chosen_logprob", "rejected_logprob"):
        close(getattr(wide, name), getattr(narrow, name), atol=1e-5)
    assert torch.equal(wide.chosen_tokens, narrow.chosen_tokens)


@pytest.mark.parametrize(("finetune", "lr"), [("lora", 1e-2), ("full", 1e-3)])
def test_it_learns_to_prefer_the_chosen_side(finetune: str, lr: float) -> None:
    roles = with_policy(Roles(language_model("qwen3")), language_model("qwen3"), finetune)
    module = DPOModule(roles, dpo_config(lr=lr, beta=0.3, microbatch_size=6))
    outputs = Outputs()
    fit(module, [preferences()] * 15, [outputs])
    first, last = outputs.steps[0], outputs.steps[-1]
    assert first.loss == pytest.approx(math.log(2), abs=1e-6)
    assert last.scores.ranked_right.min() == 1
    assert last.loss < 0.1
    # The reference is the model as it was.
    with torch.no_grad():
        kept = slow_logprobs(module.roles, REFERENCE, preferences().chosen, LENGTHS[0])
        fresh = Roles(language_model("qwen3"))
        close(kept, slow_logprobs(fresh, REFERENCE, preferences().chosen, LENGTHS[0]))


def test_rows_by_themselves_are_those_of_the_batch() -> None:
    module, batch = DPOModule(dpo_roles("qwen3"), dpo_config(sft_coef=0.7)), preferences()
    scores = module.scores(batch)
    nll = -scores.chosen_logprob / scores.chosen_tokens
    close(module.row_losses(batch), (scores.pair_losses + 0.7 * nll).detach())
    swapped = replace(
        batch, chosen=batch.rejected, chosen_mask=batch.rejected_mask, rejected=batch.chosen,
        rejected_mask=batch.chosen_mask,
    )  # fmt: skip
    close(module.scores(swapped).rejected, scores.chosen, atol=1e-5)
