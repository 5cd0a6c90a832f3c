"""What a user does wrong: one message that says what to change, and nothing left half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from .conftest import Workplace, given, tree


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
        read off the layer itself."""
        key = "model.lora.target_modules"
        assert "c_attn" in self.refused(finished, "stage=rm", given(finished)[0], f"{key}=[c_attn]")
        error = self.refused(finished, "stage=ppo", "reward=random", given(finished)[0],
                             f"{key}=[q_proj,lm_head]")  # fmt: skip
        assert f"{key} " in error
        assert "output layer" in error

    def test_overwriting_waits_until_the_checkpoints_fit(self, finished: Workplace) -> None:
        """A wrong reward.checkpoint must not cost the finished run that would be replaced."""
        copy = edited_reward(finished, tokenizer_hash="0123456789abcdef")
        before = tree(finished.outputs)
        error = finished.mini("stage=ppo", "overwrite=true", f"reward.checkpoint={copy}").error
        assert "tokenizer" in error
        assert tree(finished.outputs) == before


def test_a_pair_without_the_margin_that_is_priced(finished: Workplace) -> None:
    file = finished.folder / "data" / "preferences_train.jsonl"
    lines = file.read_text().splitlines()
    with_margin = [json.dumps(json.loads(line) | {"margin": 1.0}) for line in lines]
    file.write_text("\n".join([*with_margin[:4], lines[4], *with_margin[5:]]) + "\n")
    error = finished.mini("stage=rm", "job=margins", "rm.margin_coef=0.5").error
    assert "rm.margin_coef is above 0, but 1 of 32 pairs of" in error
    assert "no field 'margin' (the first is pair 5)" in error
    assert not (finished.outputs / "default" / "mini" / "margins").exists()


def test_a_checkpoint_on_a_hub_that_cannot_be_reached(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = tree(finished.outputs)
    checkpoint = "reward.checkpoint=nobody/no-such-model"
    error = finished.mini("stage=ppo", "overwrite=true", checkpoint).error
    assert "reward.checkpoint=FOLDER" in error
    base = ["model.name_or_path=nobody/no-such-model", "model.from_config=null"]
    error = finished.mini("stage=sft", "run=next", *base).error
    assert "hf download nobody/no-such-model --local-dir FOLDER" in error
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
