"""Groups whose responses all have the same score give way to further prompts."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.records import DecodedResponses, Experience, Prompts
from lightning_rlhf.modules.ppo import PPOModule

from .conftest import Outputs, fit, prompts
from .experiences import Make
from .test_ppo_over_iterations import resumed

CHANGES: dict[str, Any] = {"advantage": "grpo", "samples_per_prompt": 2, "missing_eos": "none"}


def further(number: int, count: int) -> Prompts:
    """Wider prompts than those of the batch."""
    return prompts(8, width=7, seed=100 + number).select(slice(0, count))


def coarse(decoded: DecodedResponses) -> Tensor:
    """1 for an even last token, else 0: in about half of the pairs both are alike."""
    rollout = decoded.rollout
    last = rollout.response_mask.sum(dim=1, keepdim=True) - 1
    return (rollout.responses.gather(1, last).squeeze(1) % 2 == 0).float()


def pairs(experience: Experience) -> list[Any]:
    """The real tokens of each pair, and its scores."""
    tokens, scores = real_tokens(experience.tokens, experience.mask), experience.score.tolist()
    return [(tokens[i : i + 2], scores[i : i + 2]) for i in range(0, len(scores), 2)]


def test_groups_alike_are_replaced_at_their_places(make_ppo: Make, tmp_path: Path) -> None:
    def run(rounds: int) -> tuple[PPOModule, Any, dict[str, Any]]:
        module, outputs = make_ppo(reward=coarse, resample_groups=rounds, **CHANGES), Outputs()
        module.further = further
        trainer = fit(module, [prompts(4)], [PPOMetrics(), outputs])
        return module, outputs.steps[0], {n: float(x) for n, x in trainer.callback_metrics.items()}

    (_, plain, before), (_, once, after), (_, many, found) = run(0), run(1), run(9)
    fresh = [pair for pair, (_, score) in zip(pairs(once.experience), pairs(plain.experience),
                                              strict=True) if score[0] == score[1]]  # fmt: skip
    kept = [pair for pair in pairs(plain.experience) if pair[1][0] != pair[1][1]]
    alike = 4 - len(kept)
    assert 0 < alike < 4
    assert [pair for pair in pairs(once.experience) if pair not in fresh] == kept
    drawn = real_tokens(further(0, alike).tokens, further(0, alike).mask)
    assert [pair[0][0][: len(asked)] for pair, asked in zip(fresh, drawn, strict=True)] == drawn
    assert len(once.replaced[0]) == 2 * alike
    assert all(score[0] != score[1] for _, score in pairs(many.experience))
    assert torch.equal(many.replaced[0].tokens, once.replaced[0].tokens)
    # Both say what they started from, and count what they threw away.
    assert before["rollout/groups_alike"] == after["rollout/groups_alike_first"] == alike / 4
    assert found["rollout/prompts_effective"] == 4
    assert found["rollout/resample_rounds"] == len(many.replaced) > 1
    thrown = sum(len(one) for one in many.replaced)
    assert found["rollout/prompts_drawn"] == 4 + thrown / 2
    responses = [many.experience.response_mask, *(one.response_mask for one in many.replaced)]
    assert found["compute/generated_tokens"] == sum(int(mask.sum()) for mask in responses)


def test_a_resumed_run_draws_the_same_further_prompts(make_ppo: Make) -> None:
    third, again, *_ = resumed(make_ppo, further, reward=coarse, resample_groups=2, **CHANGES)
    assert len(third.replaced) > 0
    assert torch.equal(again.experience.tokens, third.experience.tokens)
