"""PPO with each critic and without one, through the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.core.records import Experience, Rollout
from lightning_rlhf.modules.ppo import PPOModule

from .conftest import Workplace, given, rows, weights

VARIANTS = {
    "adapter": ["ppo.critic=adapter", "ppo.critic_init=reward", "ppo.critic_warmup=1",
                "ppo.kl_control=adaptive", "ppo.kl_horizon=80", "ppo.kl_target=0.01",
                "ppo.score_normalization=running"],
    "model": ["ppo.critic=model", "ppo.rollout=hf", "ppo.kl_control=linear",
              "ppo.score_normalization=running_scale"],
    "grpo": ["advantage=grpo", "ppo.samples_per_prompt=2", "ppo.stop_strings=[e,the]",
             "ppo.target_kl=1e-6", "ppo.kl_estimator=full"],
}  # fmt: skip


def checkpoint(folder: Path) -> dict[str, Any]:
    """What a run goes on from, of what training changes."""
    found = torch.load(folder / "checkpoints" / "000003.ckpt", weights_only=True)
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "iteration", "kl_coef", "moments")
    return {key: found[key] for key in kept}


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_is_the_unbroken_one(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch, cut: Callable[[str, int], None],
    variant: str,
) -> None:  # fmt: skip
    command = ["stage=ppo", *VARIANTS[variant], *given(finished)]
    finished.mini(*command, "run=whole").succeeded  # noqa: B018
    cut("middle", 1)  # between two evaluations
    assert "PowerCut" in finished.mini(*command, "run=cut").err
    monkeypatch.undo()
    finished.mini(*command, "run=cut", "resume=true").succeeded  # noqa: B018
    whole, resumed = finished.stage("ppo", "whole"), finished.stage("ppo", "cut")
    assert weights(resumed) == weights(whole)
    assert rows(resumed) == rows(whole)
    assert same(checkpoint(resumed), checkpoint(whole))
    trained = checkpoint(whole)["state_dict"]
    assert any(".policy." in name for name in trained)
    assert any("heads.value" in name for name in trained) == (variant in ("adapter", "model"))
    assert any(".critic." in name for name in trained) == (variant == "adapter")
    assert any(name.startswith("critic_roles.model") for name in trained) == (variant == "model")
    assert not (whole / "final" / "roles/value_head.safetensors").exists()
    assert len({row["update/kl_coef"] for row in rows(whole) if "update/kl_coef" in row}) == (
        3 if variant in ("adapter", "model") else 1
    )


def scores(place: Workplace, run: str) -> list[float]:
    """Of the responses before training, which are the same in every run."""
    with (place.stage("ppo", run) / "samples" / "eval_000000.jsonl").open() as file:
        return [json.loads(line)["score"] for line in file]


def test_stored_moments_are_taken_off_exactly_once(finished: Workplace) -> None:
    manifest = json.loads((finished.stage("rm") / "final" / "manifest.json").read_text())
    mean, std = manifest["reward_mean"], manifest["reward_std"]
    for rule in ("stored", "none", "running"):
        command = ["stage=ppo", "ppo.iterations=1", f"reward.normalization={rule}"]
        finished.mini(*command, f"run=score_{rule}", *given(finished)).succeeded  # noqa: B018
    raw = scores(finished, "score_none")
    assert scores(finished, "score_running") == raw
    expected = [(score - mean) / std for score in raw]
    assert scores(finished, "score_stored") == pytest.approx(expected, abs=1e-5)
    assert raw != pytest.approx(expected, abs=1e-2)


def test_critics_that_do_not_fit_are_refused(finished: Workplace) -> None:
    """A reward whose scale is not known yet, and an adapter from a whole reward model."""
    words = ["stage=ppo", "run=next", "ppo.critic=adapter", "ppo.critic_init=reward"]
    error = finished.mini(*words, "reward.normalization=running", *given(finished)).error
    assert "ppo.critic_init is 'reward'" in error
    assert "with normalization none or stored" in error
    finished.mini("stage=rm", "rm.finetune=full", "overwrite=true").succeeded  # noqa: B018
    error = finished.mini(*words, *given(finished)).error
    assert "ppo.critic is 'adapter'" in error
    assert "ppo.critic=model" in error
    assert not finished.stage("ppo", "next").exists()


@pytest.mark.parametrize(("advantage", "samples"), [("grpo", 8), ("reinforce++", 1)])
def test_an_iteration_is_of_as_many_responses_as_it_says(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch, advantage: str, samples: int
) -> None:
    seen, make = [], PPOModule.make_experience

    def spy(self: PPOModule, rollout: Rollout) -> Experience:
        seen.append(rollout.index.view(-1, samples))
        return make(self, rollout)

    monkeypatch.setattr(PPOModule, "make_experience", spy)
    command = ["stage=ppo", f"advantage={advantage}", "ppo.iterations=1", "run=next"]
    finished.mini(*command, *given(finished)).succeeded  # noqa: B018
    (groups,) = seen
    assert groups.shape == (8 // samples, samples)
    assert (groups == groups[:, :1]).all()
    assert len({*groups[:, 0].tolist()}) == 8 // samples


def test_texts_end_responses(finished: Workplace) -> None:
    """A text that any model of English letters says soon; the rest of its token may follow."""
    command = ["stage=ppo", "ppo.stop_strings=[e]", "ppo.iterations=1", "run=next"]
    finished.mini(*command, "ppo.max_response_tokens=48", *given(finished)).succeeded  # noqa: B018
    with (finished.stage("ppo", "next") / "samples" / "eval_000000.jsonl").open() as file:
        stopped = [sample for sample in map(json.loads, file) if "e" in sample["response"]]
    assert stopped
    for sample in stopped:
        assert sample["ended"]
        assert len(sample["response"]) - sample["response"].index("e") < 20
