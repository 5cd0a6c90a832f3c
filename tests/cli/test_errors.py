"""What a user does wrong: one message that says what to change, and nothing left half-written."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from .conftest import MODULE, PRESETS, Workplace, tree


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded fails the command with a traceback."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lightning_rlhf.models.build_roles.load_causal_lm", load)


@pytest.mark.usefixtures("no_model")
class TestBeforeAModelLoads:
    """Everything that can be known without the model is said without it."""

    def test_a_used_folder_is_refused(self, finished: Workplace) -> None:
        before = tree(finished.outputs)
        error = finished.mini("stage=rm").error
        assert "outputs/default/mini/rm" in error
        assert "finished" in error
        assert "overwrite=true" in error
        assert "job=NAME to keep both" in error
        assert tree(finished.outputs) == before


def edited_reward(place: Workplace, **manifest: Any) -> Path:
    """A copy of the reward model whose manifest says something else."""
    copy = place.folder / "another"
    shutil.copytree(place.stage("rm") / "final", copy)
    file = copy / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | manifest))
    return copy


class TestCheckpointsThatDoNotFit:
    """Each is refused; the folder of the run is not there afterwards, so the right command runs."""

    def refused(self, place: Workplace, *overrides: str) -> str:
        before = tree(place.outputs)
        error = place.mini("run=next", *overrides).error
        assert tree(place.outputs) == before, "the refused run left files"
        return error

    def test_a_reward_head_of_another_size(self, finished: Workplace) -> None:
        copy = edited_reward(finished)
        head = {"linear.weight": torch.zeros(1, 48), "linear.bias": torch.zeros(1)}
        save_file(head, copy / "roles/reward_head.safetensors")
        error = self.refused(finished, "stage=ppo", f"reward.checkpoint={copy}",
                             f"policy.checkpoint={finished.stage('sft') / 'final'}")  # fmt: skip
        assert "48" in error
        assert "32" in error
        assert "reward_head.safetensors" in error

    def test_a_reward_model_of_another_sft_model(self, finished: Workplace) -> None:
        """The adapter of run=default on another base: seed=1 has other random weights."""
        finished.mini("stage=sft", "run=other", "seed=1").succeeded  # noqa: B018
        sft = finished.stage("sft", "other") / "final"
        reward = finished.stage("rm") / "final"
        error = self.refused(
            finished, "stage=ppo", f"policy.checkpoint={sft}", f"reward.checkpoint={reward}"
        )
        assert str(reward) in error
        assert "does not fit" in error

    def test_full_fine_tuning_of_an_adapter(self, finished: Workplace) -> None:
        finished.mini("stage=sft", "run=lora", "sft.finetune=lora").succeeded  # noqa: B018
        sft = finished.stage("sft", "lora") / "final"
        error = self.refused(finished, "stage=rm", "rm.finetune=full", f"policy.checkpoint={sft}")
        assert "finetune=lora" in error

    def test_adapter_targets_that_the_model_does_not_have(self, finished: Workplace) -> None:
        error = self.refused(finished, "stage=rm", "model.lora.target_modules=[c_attn]",
                             f"policy.checkpoint={finished.stage('sft') / 'final'}")  # fmt: skip
        assert "model.lora.target_modules" in error
        assert "c_attn" in error

    def test_an_adapter_on_the_output_layer(self, finished: Workplace) -> None:
        """Log-probabilities are read off the layer itself, from hidden states."""
        error = self.refused(finished, "stage=ppo", "model.lora.target_modules=[q_proj,lm_head]",
                             "reward=random",
                             f"policy.checkpoint={finished.stage('sft') / 'final'}")  # fmt: skip
        assert "model.lora.target_modules" in error
        assert "output layer" in error

    def test_overwriting_waits_until_the_checkpoints_fit(self, finished: Workplace) -> None:
        """A wrong reward.checkpoint must not cost the finished run that would be replaced."""
        copy = edited_reward(finished, tokenizer_hash="0123456789abcdef")
        before = tree(finished.outputs)
        error = finished.mini("stage=ppo", "overwrite=true", f"reward.checkpoint={copy}").error
        assert "tokenizer" in error
        assert tree(finished.outputs) == before


@pytest.mark.usefixtures("no_model")
def test_a_pair_without_the_margin_that_is_priced(finished: Workplace) -> None:
    file = finished.folder / "data" / "preferences_train.jsonl"
    lines = file.read_text().splitlines()
    with_margin = [json.dumps(json.loads(line) | {"margin": 1.0}) for line in lines]
    file.write_text("\n".join([*with_margin[:4], lines[4], *with_margin[5:]]) + "\n")
    error = finished.mini("stage=rm", "job=margins", "rm.margin_coef=0.5").error
    assert "rm.margin_coef is above 0, but 1 of 32 pairs of" in error
    assert "no field 'margin' (the first is pair 5)" in error
    assert not (finished.outputs / "default" / "mini" / "margins").exists()


def test_the_random_reward_warns_and_runs(finished: Workplace) -> None:
    shutil.rmtree(finished.stage("rm"))
    outcome = finished.mini("stage=ppo", "reward=random", "overwrite=true", "ppo.iterations=1")
    assert "reward=random" in outcome.succeeded.out
    assert "means nothing" in outcome.out
    manifest = json.loads((finished.stage("ppo") / "final" / "manifest.json").read_text())
    assert set(manifest["parents"]) == {"sft"}


def test_a_refused_value_can_be_mended_and_the_same_command_given_again(
    finished: Workplace,
) -> None:
    """A user's second try must not meet what the first one left."""
    sft = f"policy.checkpoint={finished.stage('sft') / 'final'}"
    assert finished.mini("stage=rm", "run=next", sft, "model.lora.target_modules=[c_attn]").error
    finished.mini("stage=rm", "run=next", sft).succeeded  # noqa: B018


class TestAsAProcess:
    """Through the interpreter, as a shell sees it."""

    @pytest.mark.slow
    @pytest.mark.parametrize("offline", ["0", "1"])
    def test_a_hub_that_cannot_be_reached(self, workplace: Workplace, offline: str) -> None:
        """Port 9 of this machine answers nobody."""
        started = time.monotonic()
        outcome = workplace.process(
            MODULE, "stage=sft", "model=hub", "model.name=x", "data=small",
            "model.name_or_path=nobody/no-such-model", "--config-dir", str(PRESETS),
            environment={"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9"},
        )  # fmt: skip
        error = outcome.error
        assert time.monotonic() - started < 45
        assert "'nobody/no-such-model'" in error
        assert "model.name_or_path=FOLDER" in error
        assert "hf download nobody/no-such-model --local-dir FOLDER" in error
        assert len(error) < 600
        assert not workplace.outputs.exists()


@pytest.mark.parametrize("key", ["policy.checkpoint", "reward.checkpoint"])
def test_a_checkpoint_on_a_hub_that_cannot_be_reached(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = tree(finished.outputs)
    error = finished.mini("stage=ppo", "overwrite=true", f"{key}=nobody/no-such-model").error
    assert f"{key}=FOLDER" in error
    assert "nobody/no-such-model" in error
    assert tree(finished.outputs) == before


def test_a_gpu_that_is_not_there_is_named(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    error = workplace.mini("stage=sft", "trainer=gpu").error
    assert "trainer.accelerator" in error
    assert "trainer=cpu" in error


def test_a_policy_that_collapsed_is_told_at_the_end(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So small a model goes no farther than 0.05 nats a token, at whatever rate; none by default.

    So the limit is lowered for the second run.
    """
    command = ["stage=ppo", "overwrite=true"]
    told = "warning: the policy has collapsed: "
    assert told not in finished.mini(*command).succeeded.out
    monkeypatch.setattr("lightning_rlhf.report.tables.FAR", 0.01)
    assert finished.mini(*command, "ppo.lr=100").succeeded.out.count(told) == 1
