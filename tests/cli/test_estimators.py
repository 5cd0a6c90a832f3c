"""PPO with each critic and without one, and with demonstrations, through the command."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ..matrix import matrix
from .conftest import Workplace, given, rows, tree, weights
from .others import until_called

VARIANTS = {
    "adapter": ["ppo.critic=adapter", "ppo.critic_init=reward", "ppo.critic_warmup=1",
                "ppo.kl_control=adaptive", "ppo.kl_horizon=80", "ppo.kl_target=0.01",
                "ppo.score_normalization=running", "ppo.ptx_coef=0.5", "ppo.ptx_batch_size=4",
                "record=true"],
    "model": ["ppo.critic=model", "ppo.rollout=hf", "ppo.kl_control=linear",
              "ppo.score_normalization=running_scale"],
    "grpo": ["advantage=grpo", "ppo.samples_per_prompt=4", "ppo.stop_strings=[e,the]",
             "ppo.target_kl=1e-6", "ppo.kl_estimator=full"],
}  # fmt: skip


def checkpoint(folder: Path) -> dict[str, Any]:
    """What a run goes on from, of what training changes."""
    found = torch.load(folder / "checkpoints" / "000002.ckpt", weights_only=True)
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "iteration", "kl_coef", "moments")
    return {key: found[key] for key in kept}


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def check_ends(folder: Path) -> None:
    """Check that a text which any model of English letters says soon ends the responses.

    The rest of its token may follow.
    """
    with (folder / "samples" / "eval_000000.jsonl").open() as file:
        stopped = [sample for sample in map(json.loads, file) if "e" in sample["response"]]
    assert stopped
    for sample in stopped:
        assert sample["ended"]
        assert len(sample["response"]) - sample["response"].index("e") < 20


@pytest.mark.parametrize("variant", matrix(VARIANTS, "grpo"))
def test_a_resumed_run_is_the_unbroken_one(finished: Workplace, variant: str) -> None:
    """Resumed after iteration 1, between two evaluations."""
    command = ["stage=ppo", "run=whole", *VARIANTS[variant], *given(finished)]
    command.append("ppo.iterations=2")
    finished.mini(*command).succeeded  # noqa: B018
    whole = finished.stage("ppo", "whole")
    if variant == "grpo":
        check_ends(whole)
    before, ending = (weights(whole), rows(whole), tree(whole / "rollouts")), checkpoint(whole)
    shutil.rmtree(whole / "final")
    (whole / "checkpoints" / "000002.ckpt").unlink()
    finished.mini(*command, "resume=1").succeeded  # noqa: B018
    assert (weights(whole), rows(whole), tree(whole / "rollouts")) == before
    assert same(checkpoint(whole), ending)
    trained = ending["state_dict"]
    assert any(".policy." in name for name in trained)
    assert any("heads.value" in name for name in trained) == (variant in ("adapter", "model"))
    assert any(".critic." in name for name in trained) == (variant == "adapter")
    assert any(name.startswith("critic_roles.model") for name in trained) == (variant == "model")
    assert not (whole / "final" / "roles/value_head.safetensors").exists()
    losses = [float(row["update/ptx_loss"]) for row in rows(whole) if "update/ptx_loss" in row]
    assert [loss > 0 for loss in losses] == [False, variant == "adapter"]  # not while it warms up
    assert len({row["update/kl_coef"] for row in rows(whole) if "update/kl_coef" in row}) == (
        2 if variant in ("adapter", "model") else 1
    )


def scores(place: Workplace, run: str) -> list[float]:
    """Of the responses before training, which are the same in every run."""
    with (place.stage("ppo", run) / "samples" / "eval_000000.jsonl").open() as file:
        return [json.loads(line)["score"] for line in file]


def test_stored_moments_are_taken_off_exactly_once(finished: Workplace) -> None:
    manifest = json.loads((finished.stage("rm") / "final" / "manifest.json").read_text())
    mean, std = manifest["reward_mean"], manifest["reward_std"]
    for rule in ("none", "running"):
        words = ["stage=ppo", f"run=score_{rule}", f"reward.normalization={rule}"]
        step = "lightning_rlhf.modules.ppo.PPOModule.training_step"
        until_called(finished, *words, *given(finished), name=step)
    raw = scores(finished, "score_none")
    assert scores(finished, "score_running") == raw
    expected = [(score - mean) / std for score in raw]
    assert scores(finished, "default") == pytest.approx(expected, abs=1e-5)
    assert raw != pytest.approx(expected, abs=1e-2)


def test_critics_that_do_not_fit_are_refused(finished: Workplace) -> None:
    """A reward whose scale is not known yet, and an adapter from a whole reward model."""
    words = ["stage=ppo", "run=next", "ppo.critic=adapter", "ppo.critic_init=reward"]
    error = finished.mini(*words, "reward.normalization=running", *given(finished)).error
    assert "ppo.critic_init is 'reward'" in error
    assert "with normalization none or stored" in error
    full = ("rm.finetune=full", "rm.epochs=0.125", "overwrite=true")
    finished.mini("stage=rm", *full).succeeded  # noqa: B018
    error = finished.mini(*words, *given(finished)).error
    assert "ppo.critic is 'adapter'" in error
    assert "ppo.critic=model" in error
    assert not finished.stage("ppo", "next").exists()
