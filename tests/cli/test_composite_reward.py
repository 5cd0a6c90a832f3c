"""Several rewards at once: what is reported of each sample, and the reward of PPO."""

import json
from pathlib import Path

import pytest

from .conftest import Workplace, rows

RULES = """
def threes(prompts, responses):
    return [3.0] * len(responses)
"""
WEIGHTS = {"liked": 1.0, "short": -0.5, "steady": 2.0, "noise": 0.25, "hum": -1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace) -> Path:
    """A run of PPO on a reward of five components, without a penalty on KL or length.

    They are a learned reward, a shipped function, one of a file and two random heads.
    """
    place = pipeline.copied(tmp_path_factory.mktemp("several") / "work")
    (place.folder / "rules.py").write_text(RULES)
    kinds = {"liked": "head", "short": "function", "steady": "function"}
    kinds |= {"noise": "random", "hum": "random"}
    words = [
        "reward=sum", *(f"+reward@reward.components.{name}={kind}" for name, kind in kinds.items()),
        *(f"reward.components.{name}.weight={weight}" for name, weight in WEIGHTS.items()),
        "reward.components.short.path=lightning_rlhf.rewards.functions:length_band",
        "reward.components.short.arguments={shortest: 1, longest: 4}",
        f"reward.components.steady.path={place.folder / 'rules.py'}:threes",
        "reward.components.steady.clip=0.5", "reward.components.noise.normalization=running",
    ]  # fmt: skip
    free = ("ppo.kl_coef=0", "ppo.missing_eos=none")
    place.mini("stage=ppo", "job=several", *words, *free).succeeded  # noqa: B018
    return place.outputs / "default" / "mini" / "several" / "ppo"


def test_the_score_of_a_sample_is_the_weighted_sum_of_its_parts(folder: Path) -> None:
    files = sorted((folder / "samples").glob("eval_*.jsonl"))
    found = [json.loads(line) for file in files for line in file.open()]
    assert len(found) == 12  # four prompts before, in the middle and at the end
    for sample in found:
        assert list(sample["parts"]) == list(WEIGHTS)
        liked, short, steady, noise, hum = sample["parts"].values()
        # The band of 1 to 4 words, which falls to 0 at 8.
        words = len(sample["response"].split())
        assert short == pytest.approx(0 if words == 0 else min(1, max(0, 2 - words / 4)))
        assert steady == 3
        expected = liked - 0.5 * short + 2 * 3 + 0.25 * noise - hum
        assert sample["score"] == pytest.approx(expected, 1e-5)
        assert abs(noise - hum) > 1e-3  # each random head is another one
    assert len({sample["parts"]["liked"] for sample in found}) > 1
    assert len({sample["parts"]["noise"] for sample in found}) > 1


def test_ppo_is_paid_components_that_are_normalised_and_clipped(folder: Path) -> None:
    """Without KL penalty and end rule the shaped return is the reward, mean over the batch."""
    first = next(row for row in rows(folder) if "reward_mean" in row)
    liked, short, hum = (
        float(first[f"rollout/reward/{name}"]) for name in ("liked", "short", "hum")
    )
    # steady is 3, kept at 0.5, of weight 2. noise less its mean over all so far, which in the first
    # iteration is this batch's, has mean 0.
    expected = liked - 0.5 * short + 2 * 0.5 + 0 - hum
    assert float(first["rollout/shaped_return"]) == pytest.approx(expected, abs=1e-5)
    for row in (row for row in rows(folder) if "reward_mean" in row):
        reward, shaped = (float(row[f"rollout/{n}"]) for n in ("reward_paid", "shaped_return"))
        assert reward == pytest.approx(shaped, abs=1e-5)
    assert abs(float(first["rollout/reward/noise"])) > 1e-3
