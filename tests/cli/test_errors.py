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

from .conftest import MODULE, PRESETS, Workplace, given, tree


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded fails the command with a traceback."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lightning_rlhf.models.loading.load_causal_lm", load)


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
        error = self.refused(finished, "stage=ppo", f"reward.checkpoint={copy}", given(finished)[0])
        assert all(part in error for part in ("roles/reward_head.safetensors", "48", "32"))

    def test_another_sft_model(self, finished: Workplace) -> None:
        """An adapter of other random weights: the reward model's does not stand on it, and it is
        not trained in full."""
        lora = ["run=other", "seed=1", "sft.finetune=lora", "sft.epochs=0.125"]
        finished.mini("stage=sft", *lora).succeeded  # noqa: B018
        sft = f"policy.checkpoint={finished.stage('sft', 'other') / 'final'}"
        reward = finished.stage("rm") / "final"
        error = self.refused(finished, "stage=ppo", sft, f"reward.checkpoint={reward}")
        assert str(reward) in error
        assert "does not fit" in error
        assert "finetune=lora" in self.refused(finished, "stage=rm", "rm.finetune=full", sft)

    def test_adapter_targets(self, finished: Workplace) -> None:
        """Those that the model does not have, and the output layer, whose log-probabilities are
        read off the layer itself. Mended, the same command meets nothing that the first left."""
        key = "model.lora.target_modules"
        command = ["stage=rm", given(finished)[0]]
        assert "c_attn" in self.refused(finished, *command, f"{key}=[c_attn]")
        error = self.refused(finished, "stage=ppo", "reward=random", given(finished)[0],
                             f"{key}=[q_proj,lm_head]")  # fmt: skip
        assert f"{key} " in error
        assert "output layer" in error
        finished.mini("run=next", *command, "rm.epochs=0.125").succeeded  # noqa: B018

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


class TestAsAProcess:
    """Through the interpreter, as a shell sees it."""

    @pytest.mark.slow
    def test_a_hub_that_cannot_be_reached(self, workplace: Workplace) -> None:
        """Port 9 of this machine answers nobody."""
        started = time.monotonic()
        outcome = workplace.process(
            MODULE, "stage=sft", "model=hub", "model.name=x", "data=small",
            "model.name_or_path=nobody/no-such-model", "--config-dir", str(PRESETS),
            environment={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
        )  # fmt: skip
        error = outcome.error
        assert time.monotonic() - started < 45
        assert "'nobody/no-such-model'" in error
        assert "model.name_or_path=FOLDER" in error
        assert "hf download nobody/no-such-model --local-dir FOLDER" in error
        assert len(error) < 600
        assert not workplace.outputs.exists()


def test_a_checkpoint_on_a_hub_that_cannot_be_reached(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = tree(finished.outputs)
    checkpoint = "reward.checkpoint=nobody/no-such-model"
    error = finished.mini("stage=ppo", "overwrite=true", checkpoint).error
    assert "reward.checkpoint=FOLDER" in error
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
    """So small a model goes no farther than 0.05 nats a token, so that the limit is lowered."""
    monkeypatch.setattr("lightning_rlhf.report.tables.FAR", 0.01)
    out = finished.mini("stage=ppo", "overwrite=true", "ppo.lr=100").succeeded.out
    assert out.count("warning: the policy has collapsed: ") == 1
