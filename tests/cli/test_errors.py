"""What a user does wrong: one message or finding that says what to change, nothing half-written."""

import json
import shutil

import pytest

from .conftest import Workplace, given, tree


def test_checkpoints_that_do_not_fit(finished: Workplace) -> None:
    """Each is refused; the folder of the run is not there afterwards, so the right command runs.

    An adapter of other random weights: the reward model's does not stand on it. The output layer:
    its log-probabilities are read off the layer itself.
    """
    lora = ["run=other", "seed=1", "sft.finetune=lora", "sft.epochs=0.125"]
    finished.mini("stage=sft", *lora).succeeded  # noqa: B018
    sft = f"policy.checkpoint={finished.stage('sft', 'other') / 'final'}"
    reward, key = finished.stage("rm") / "final", "model.lora.target_modules"
    before = tree(finished.outputs)
    for words, message in (
        (["stage=ppo", sft, f"reward.checkpoint={reward}"], f"{reward} does not fit"),
        (["stage=rm", given(finished)[0], f"{key}=[c_attn]"], "c_attn"),
        (["stage=ppo", "reward=random", given(finished)[0], f"{key}=[q_proj,lm_head]"],
         "output layer"),
    ):  # fmt: skip
        error = finished.mini("run=next", *words).error
        assert message in error, error
        assert tree(finished.outputs) == before, "the refused run left files"


def test_overwriting_waits_until_the_checkpoints_fit(finished: Workplace) -> None:
    """A wrong reward.checkpoint must not cost the finished run that would be replaced."""
    copy = finished.folder / "another"
    shutil.copytree(finished.stage("rm") / "final", copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(
        json.dumps(manifest | {"tokenizer_hash": "0123456789abcdef"})
    )
    before = tree(finished.outputs)
    error = finished.mini("stage=ppo", "overwrite=true", f"reward.checkpoint={copy}").error
    assert "tokenizer" in error
    assert tree(finished.outputs) == before


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
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)  # as on a Mac
    error = workplace.mini("stage=sft", "trainer=gpu").error
    assert "trainer.accelerator" in error
    assert "finds 0 CUDA GPUs" in error
    assert error.endswith("allowed: trainer=cpu")


def test_prompts_that_are_cut_are_the_first_finding(finished: Workplace) -> None:
    prompts = finished.folder / "data" / "prompts_train.jsonl"
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for row in rows[:4]:  # a quarter
        row["prompt"] = "Please tell me. " * 40 + row["prompt"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["stage=ppo", "run=cut", *given(finished), "ppo.iterations=1", "data.long_prompts=cut"]
    finished.mini(*words).succeeded  # noqa: B018
    [cut] = json.loads((finished.stage("ppo", "cut") / "diagnosis.json").read_text())
    assert (cut["rule"], cut["iteration"]) == ("prompts_cut", 0)
    assert "longer than data.max_prompt_tokens (25%)" in cut["symptom"]
