"""stage=rank: data from a policy's own responses, ranked by the reward."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from .conftest import Workplace, tree

REWARD = "def longer(prompts, responses):\n    return [float(len(r)) for r in responses]\n"
JUDGE = "def short(row, response, ended):\n    return {'gold': -float(len(response))}\n"


def sft_of(place: Workplace) -> str:
    return f"policy.checkpoint={place.stage('sft')}/final"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def ranked(pipeline: Workplace) -> Path:
    """Responses of PPO's policy to the training prompts, ranked by their length."""
    (pipeline.folder / "data" / "reward.py").write_text(REWARD)
    (pipeline.folder / "data" / "length_judge.py").write_text(JUDGE)
    before = tree(pipeline.stage("ppo"))
    outcome = pipeline.mini(
        "stage=rank", "run=ranked", f"rank.policy={pipeline.stage('ppo')}/final",
        "reward=function", "reward.path=data/reward.py:longer",
        "data.judge=data/length_judge.py:short",
        "rank.samples_per_prompt=4", "rank.batch_size=8", "rank.max_prompts=6",
        "rank.accept_above=10", "rank.stop_strings=[e,a,o]", sft_of(pipeline),
    )  # fmt: skip
    assert outcome.succeeded.out.count("written: ") == 4
    assert tree(pipeline.stage("ppo")) == before
    return pipeline.stage("rank", "ranked") / "final"


def test_rows_are_those_of_the_scores(ranked: Path) -> None:
    samples = read(ranked / "samples.jsonl")
    assert len(samples) == 6 * 4
    assert len({s["index"] for s in samples}) == 6
    assert all(s["score"] == len(s["response"]) for s in samples)
    ended = [s for s in samples if s["ended"] and s["response"].strip()]
    for row in read(ranked / "demonstrations.jsonl"):
        of_prompt = [s["score"] for s in ended if s["prompt"] == row["prompt"]]
        assert row["score"] == len(row["response"]) == max(of_prompt)
    pairs = read(ranked / "preferences.jsonl")
    assert pairs
    assert all(p["margin"] == len(p["chosen"]) - len(p["rejected"]) > 0 for p in pairs)
    accepted = {row["response"] for row in read(ranked / "accepted.jsonl")}
    assert accepted == {s["response"] for s in ended if s["score"] >= 10}


def test_numbers_and_provenance(ranked: Path, pipeline: Workplace) -> None:
    found, samples = json.loads((ranked / "rank.json").read_text()), read(ranked / "samples.jsonl")
    metrics = found["metrics"]
    assert metrics["rank/reward_mean"] == pytest.approx(fmean(s["score"] for s in samples))
    best = [max(s["score"] for s in samples[i : i + 4]) for i in range(0, 24, 4)]
    assert metrics["rank/best_reward"] == pytest.approx(fmean(best))
    assert metrics["rank/best_judge/gold"] == pytest.approx(-fmean(best))
    assert 0 <= metrics["rank/best_kl"] <= metrics["rank/best_kl_bound"]
    assert metrics["rank/pairs"] == len(read(ranked / "preferences.jsonl"))
    policy = pipeline.stage("ppo") / "final"
    assert found["policy"] == {str(policy): str(policy)}
    assert set(found["parents"]) == {"sft", "policy"}
    assert found["config"]["rank"]["samples_per_prompt"] == 4


def test_sft_and_rm_read_them(ranked: Path, pipeline: Workplace) -> None:
    for stage, kind in (("sft", "demonstrations"), ("rm", "preferences")):
        words = [f"data.{kind}.{part}={ranked}/{kind}.jsonl" for part in ("train", "val")]
        words += [] if stage == "sft" else [sft_of(pipeline)]
        pipeline.mini(f"stage={stage}", "run=fed", f"{stage}.epochs=1", *words).succeeded  # noqa: B018
        assert (pipeline.stage(stage, "fed") / "final").is_dir()


def test_the_sft_model_responds_by_default(ranked: Path, pipeline: Workplace) -> None:
    pipeline.mini(  # noqa: B018
        "stage=rank", "run=once", "reward=function", "reward.path=data/reward.py:longer",
        "rank.samples_per_prompt=2", "rank.prompts=val", "rank.stop_strings=[e,a,o]",
        sft_of(pipeline),
    ).succeeded  # fmt: skip
    final = pipeline.stage("rank", "once") / "final"
    assert all(abs(s["kl"]) < 1e-4 for s in read(final / "samples.jsonl"))
    assert not (final / "accepted.jsonl").exists()
