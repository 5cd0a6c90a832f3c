import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.callbacks.metrics import (
    repetition_metrics,
    rollout_metrics,
    step_metrics,
    step_sums,
    time_metrics,
    update_metrics,
)
from lightning_rlhf.core.records import Experience, UpdateStats
from lightning_rlhf.core.results import DPOScores, PairScores, SFTScores

from .conftest import make_experience, make_updates

PER_TOKEN = ("old_logprobs", "old_values", "ref_logprobs", "kl", "rewards", "advantages", "returns")


def test_rollout_metrics_by_hand() -> None:
    # Scores 2 and -1: mean 0.5, both 1.5 away from it. KL sums 0.6 and -0.1,
    # both 0.35 away from 0.25; reward sums 1.4, -0.9.
    # Values 1, 1, 2, 0: mean 1. Returns 2, 1, 3, -2: mean 1, variance (1 + 0 + 4 + 9) / 4 = 3.5.
    # Errors 1, 0, 1, -2: mean 0, variance (1 + 0 + 1 + 4) / 4 = 1.5.
    # Two scores are 3 apart: the quantile q is -1 + 3 q.
    expected = {
        "reward_mean": 0.5, "kl_divergence": 0.25, "rollout/kl_std": 0.35,
        "rollout/reward_std": 1.5, "rollout/reward_min": -1.0, "rollout/reward_max": 2.0,
        "rollout/score_p05": -0.85, "rollout/score_p25": -0.25, "rollout/score_p50": 0.5,
        "rollout/score_p75": 1.25, "rollout/score_p95": 1.85, "rollout/response_tokens": 2.0,
        "rollout/ended": 0.5, "rollout/shaped_return": 0.25, "rollout/value_mean": 1.0,
        "rollout/explained_variance": 1.0 - 1.5 / 3.5,
    }  # fmt: skip
    assert rollout_metrics(make_experience()) == pytest.approx(expected, abs=1e-6)


def test_groups_alike_are_those_whose_scores_are_all_equal() -> None:
    score = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 3.0])
    experience, name = replace(_random_experience([1] * 6, 0), score=score), "rollout/groups_alike"
    assert rollout_metrics(experience, 2)[name] == pytest.approx(2 / 3)  # 1 1 | 2 2 | 2 3
    assert rollout_metrics(experience, 3)[name] == 0.0  # 1 1 2 | 2 2 3
    assert name not in rollout_metrics(experience)
    # 1 1 2 | 2 2 3: variances 2/9 and 2/9; means 4/3 and 7/3, both 1/2 from theirs; all vary by
    # 2/9 + 1/4 = 17/36.
    found = rollout_metrics(experience, 3)
    spread = [found[f"rollout/{part}"] for part in ("score_std_within", "score_std_between")]
    assert spread == pytest.approx([math.sqrt(2 / 9), 0.5])
    assert found["rollout/reward_std"] == pytest.approx(math.sqrt(17 / 36))
    assert (found["rollout/prompts_effective"], rollout_metrics(experience, 2)[name]) == (2, 2 / 3)


def test_repetition_metrics_by_hand() -> None:
    # Responses 1 2 1 2 1 2 (4-grams 1212, 2121, 1212: one repeated), 1 2 1 2 1 (1212, 2121) and
    # the first once more: 2 of 8 repeated. Padding repeats nothing.
    tokens = torch.tensor([[9, 1, 2, 1, 2, 1, 2], [9, 1, 2, 1, 2, 1, 2], [9, 1, 2, 1, 2, 1, 2]])
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 5] = False
    found = repetition_metrics(make_experience(tokens=tokens, response_mask=mask))
    assert found == pytest.approx({"rollout/most_common": 2 / 3, "rollout/repetition": 2 / 8})
    short = repetition_metrics(make_experience())  # of 3 tokens and of 1
    assert short == {"rollout/most_common": 0.5, "rollout/repetition": 0.0}


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), columns=st.integers(1, 4),
    junk=st.sampled_from([-1e6, 7.5, math.nan]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_what_stands_on_padding_changes_no_metric(
    lengths: list[int], columns: int, junk: float, seed: int
) -> None:
    """Not by a bit: sums of quarters and of their squares are exact, in whatever order."""
    clean = _random_experience(lengths, seed)
    padded = _with_padding(clean, columns, junk)
    expected = rollout_metrics(clean)
    found = rollout_metrics(padded)
    assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_update_metrics_are_means_over_minibatches_but_for_the_largest_ratio_and_counts() -> None:
    metrics = update_metrics(make_updates())
    assert metrics.pop("update/ratio_max") == 3.0
    counts = {metrics.pop(f"update/{name}") for name in ("steps", "skipped", "stopped")}
    assert counts == {0.0, 4.0}  # of 1 and 3 the sum; neither is 0, so no step was taken
    assert metrics.pop("update/nonfinite") == 0.0
    assert len(metrics) == len(fields(UpdateStats)) - 4
    assert set(metrics.values()) == {2.0}


def test_minibatches_are_counted_by_what_became_of_them() -> None:
    # Five minibatches: three steps, one of them skipped in between, and a last one that stopped.
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    fate = [(zero, zero), (one, zero), (zero, zero), (zero, zero), (zero, one)]
    updates = [replace(make_updates()[0], skipped=s, stopped=t) for s, t in fate]
    metrics = update_metrics(updates)
    assert [metrics[f"update/{n}"] for n in ("steps", "skipped", "stopped")] == [3.0, 1.0, 1.0]
    spoiled = UpdateStats(**dict.fromkeys(UpdateStats.__dataclass_fields__, one * math.nan))
    spoiled = replace(spoiled, skipped=zero, stopped=zero, nonfinite=one)
    with_spoiled = update_metrics([*updates, spoiled])
    assert with_spoiled == metrics | {"update/nonfinite": 1.0}
    nothing = update_metrics([spoiled])
    assert (nothing["update/nonfinite"], nothing["update/steps"]) == (1.0, 0.0)
    assert math.isnan(nothing["ppo_loss"])
    both = [replace(make_updates()[0], skipped=one, stopped=one)]
    assert update_metrics(both)["update/steps"] == 0.0


def test_time_metrics_by_hand() -> None:
    seconds = {"rollout": 2.0, "score": 1.0, "update": 1.0, "other": 0.5}
    metrics = time_metrics(seconds, tokens=4, responses=2)
    assert metrics == {
        "time/rollout_s": 2.0, "time/score_s": 1.0, "time/update_s": 1.0, "time/iteration_s": 4.0,
        "time/other_s": 0.5, "time/tokens_per_s": 1.0, "time/episodes_per_s": 0.5,
    }  # fmt: skip


def means(*results: Any, phase: str = "eval") -> dict[str, float]:
    """Metrics of the results of several batches."""
    return step_metrics([step_sums(result) for result in results], phase)


def test_sft_loss_is_the_mean_over_tokens_however_they_are_batched() -> None:
    # 1 token of loss 4 and 3 tokens of loss 2: (4 + 6) / 4 = 2.5, where a mean of means says 3.
    number = torch.tensor
    first = SFTScores(nll_sum=number(4.0), tokens=number(1))
    second = SFTScores(nll_sum=number(6.0), tokens=number(3))
    expected = {"eval/loss": 2.5, "eval/perplexity": math.exp(2.5)}
    assert means(first, second) == pytest.approx(expected)


def test_reward_metrics_count_a_tie_as_half_right() -> None:
    # Pairs right by 2, wrong by 1 and tied: losses log(1 + e^-2), log(1 + e), log 2.
    chosen, rejected = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([-1.0, 1.0, 3.0])
    loss = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1)) + math.log(2)) / 3
    expected = {"accuracy": 0.5, "reward_chosen": 4 / 3, "reward_rejected": 1.0,
                "reward_margin": 1 / 3}  # fmt: skip
    pairs = PairScores(chosen=chosen, rejected=rejected)
    found = means(pairs, phase="update")
    assert found == pytest.approx(
        {f"update/{n}": x for n, x in (expected | {"rm_loss": loss}).items()}
    )
    # Log-probabilities -1, -2, -6 over 9 tokens: 9 nats, 1 a token.
    dpo = DPOScores(chosen=chosen, rejected=rejected, pair_losses=torch.tensor([0.5, 1.0, 0.0]),
                    chosen_logprob=torch.tensor([-1.0, -2.0, -6.0]),
                    rejected_logprob=torch.tensor([-4.0, -2.0, -3.0]),
                    chosen_tokens=torch.tensor([2, 3, 4]))  # fmt: skip
    expected |= {"dpo_loss": 0.5, "logps_chosen": -3.0, "logps_rejected": -3.0, "sft_loss": 1.0}
    assert means(dpo) == pytest.approx({f"eval/{name}": x for name, x in expected.items()})


def _random_experience(lengths: list[int], seed: int) -> Experience:
    generator = torch.Generator().manual_seed(seed)
    size, width = len(lengths), max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    numbers = {
        name: torch.where(mask, torch.randint(-8, 9, (size, width), generator=generator) / 4, 0.0)
        for name in PER_TOKEN
    }
    return Experience(
        tokens=torch.zeros(size, width, dtype=torch.long), mask=mask, response_mask=mask,
        score=torch.randn(size, generator=generator), component_scores=torch.zeros(size, 1),
        ended=torch.rand(size, generator=generator) > 0.5, index=torch.arange(size), **numbers,
    )  # fmt: skip


def _with_padding(experience: Experience, columns: int, junk: float) -> Experience:
    """The same responses with `junk` on every padded place and `columns` more of it."""
    mask = experience.response_mask

    def wider(x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([x, torch.full((len(x), columns), fill).to(x.dtype)], dim=1)

    numbers = {n: wider(getattr(experience, n).where(mask, junk), junk) for n in PER_TOKEN}
    others = {n: wider(getattr(experience, n), 0) for n in ("tokens", "mask", "response_mask")}
    return replace(experience, **numbers, **others)
