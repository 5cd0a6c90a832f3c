"""The penalty on the KL: in the reward or as a term of the loss."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.records import Experience
from lightning_rlhf.models.config import POLICY, REFERENCE
from lightning_rlhf.modules.ppo import TRAINING, PPOModule

from .conftest import by_architecture, close, prompts, within_fit
from .experiences import Make, nothing_to_gain, off_policy, on_policy, update, updated

ALONE = {"kl_in": "loss", "ent_coef": 0.0, "vf_coef": 0.0, "kl_coef": 1.0}
WAYS = [("k2", "lora"), ("k3", "full"), ("full", "lora"), ("full", "full")]
LOSSES = {"k2": lambda p, q: (p - q) ** 2 / 2, "k3": lambda p, q: (q - p).exp() - 1 - (q - p)}


@torch.no_grad()
def tables(module: PPOModule, experience: Experience, role: str) -> Tensor:
    """Log-probabilities [N, V] before each response token in float64, row by row, unpadded."""
    found, roles = [], module.roles.reference if role == REFERENCE else module.roles
    with roles.use_role(role):
        for row in range(len(experience)):
            tokens = experience.tokens[row][experience.mask[row]]
            length = int(experience.response_mask[row].sum())
            logits = roles.causal_lm(tokens[None]).logits[0, -length - 1 : -1].double()
            found.append((logits / module.config.temperature).log_softmax(-1))
    return torch.cat(found)


def slow_kl(module: PPOModule, experience: Experience) -> Tensor:
    """Over the whole vocabulary, of each response token, [N]."""
    p, q = (tables(module, experience, role) for role in (POLICY, REFERENCE))
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize(("estimator", "finetune"), WAYS)
def test_the_term_is_the_slow_estimate_of_the_policy_now(
    make_ppo: Make, estimator: str, finetune: str
) -> None:
    """Not of the policy at sampling, which off_policy sets elsewhere."""
    changes = {"kl_estimator": estimator, "finetune": finetune, "kl_in": "loss", "kl_coef": 0.3}
    module = make_ppo(**changes, temperature=0.7)
    experience = off_policy(module)
    if estimator == "full":
        expected = slow_kl(module, experience)
    else:
        said = experience.responses[experience.response_mask][:, None]
        p, q = (tables(module, experience, role).gather(1, said) for role in (POLICY, REFERENCE))
        expected = LOSSES[estimator](p, q)
    module.kl_coef = 0.7  # as kl_control leaves it
    stats, _ = updated(module, experience)
    close(stats.kl_loss, expected.mean().float())
    config = module.config
    total = (
        stats.policy_loss + 0.7 * stats.kl_loss
        + config.vf_coef * stats.value_loss - config.ent_coef * stats.entropy
    )  # fmt: skip
    close(stats.loss, total)


@by_architecture
def test_a_price_on_the_whole_vocabulary_is_the_slow_sum(make_ppo: Make, architecture: str) -> None:
    module = make_ppo(
        architecture, kl_estimator="full", kl_coef=2.0, missing_eos="none", temperature=0.7
    )
    rollout = module.collector.roll_out(prompts(), module.generator(TRAINING, 0))
    scores = module.collector.score(module.collector.decode(rollout, "train"))
    experience = on_policy(module)
    mask = experience.response_mask
    slow = torch.zeros(mask.shape).masked_scatter(mask, slow_kl(module, experience).float())
    # Differences of log-probabilities of some nats, each rounded to 1e-6.
    close(scores.vocabulary_kl, slow, atol=1e-5)
    last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
    expected = -2.0 * slow + torch.where(last, experience.score[:, None], 0.0)
    close(experience.rewards, expected, atol=1e-4)
    assert slow.max() > 0.01


@pytest.mark.parametrize("estimator", ["k2", "full"])
def test_a_policy_that_has_strayed_is_pulled_back(make_ppo: Make, estimator: str) -> None:
    module = make_ppo(kl_estimator=estimator, lr=1e-3, **ALONE | {"kl_coef": 100.0})
    experience = replace(off_policy(module), advantages=nothing_to_gain(module))
    before = slow_kl(module, experience).mean()
    reference = module.roles.probe(REFERENCE)
    within_fit(module, lambda: update(module, experience))
    assert before > 0.01
    assert slow_kl(module, experience).mean() < 0.98 * before
    assert torch.equal(module.roles.probe(REFERENCE), reference)
