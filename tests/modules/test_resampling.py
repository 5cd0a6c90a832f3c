"""Groups whose responses all have the same score give way to further prompts."""

from typing import Any

from torch import Tensor

from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.records import DecodedResponses, Experience

from .conftest import Outputs, fit, further, prompts
from .experiences import Make

CHANGES: dict[str, Any] = {"advantage": "grpo", "samples_per_prompt": 2, "missing_eos": "none"}


def coarse(decoded: DecodedResponses) -> Tensor:
    """1 for an even last token, else 0: in about half of the pairs both are alike."""
    rollout = decoded.rollout
    last = rollout.response_mask.sum(dim=1, keepdim=True) - 1
    return (rollout.responses.gather(1, last).squeeze(1) % 2 == 0).float()


def pairs(experience: Experience) -> list[Any]:
    """The real tokens of each pair, and its scores."""
    tokens, scores = real_tokens(experience.tokens, experience.mask), experience.score.tolist()
    return [(tokens[i : i + 2], scores[i : i + 2]) for i in range(0, len(scores), 2)]


def test_groups_alike_are_replaced_at_their_places(make_ppo: Make) -> None:
    def run(rounds: int) -> tuple[Any, list[Any], dict[str, Any]]:
        module, outputs = make_ppo(reward=coarse, resample_groups=rounds, **CHANGES), Outputs()
        found = fit(module, [prompts(4)], [PPOMetrics(), outputs]).callback_metrics
        return outputs.steps[0], pairs(outputs.steps[0].experience), found

    (_, plain, before), (once, replaced, _), (many, best, found) = run(0), run(1), run(9)
    alike = [place for place, (_, score) in enumerate(plain) if score[0] == score[1]]
    assert 0 < len(alike) < 4
    assert [place for place in range(4) if replaced[place] != plain[place]] == alike
    drawn = further(0, len(alike))
    asked = real_tokens(drawn.tokens, drawn.mask)
    got = [replaced[place][0][0] for place in alike]
    assert [one[: len(prompt)] for one, prompt in zip(got, asked, strict=True)] == asked
    gone = real_tokens(once.replaced[0].tokens, once.replaced[0].mask)
    assert gone == [response for place in alike for response in plain[place][0]]
    assert all(score[0] != score[1] for _, score in best)
    # The row says what it started from, and counts what was thrown away.
    thrown = sum(len(one) for one in many.replaced)
    assert thrown > len(once.replaced[0]) == 2 * len(alike)
    assert found["rollout/groups_alike_first"] == before["rollout/groups_alike"] == len(alike) / 4
    assert found["rollout/prompts_effective"] == 4
    assert found["rollout/resample_rounds"] == len(many.replaced)
    assert found["rollout/prompts_drawn"] == 4 + thrown / 2
    responses = [many.experience.response_mask, *(one.response_mask for one in many.replaced)]
    assert found["compute/generated_tokens"] == sum(int(mask.sum()) for mask in responses)
