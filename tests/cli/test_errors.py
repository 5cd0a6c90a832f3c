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

from .conftest import MODULE, PRESETS, TRAIN_PY, Workplace, tree


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded fails the command with a traceback."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lightning_rlhf.models.build_roles.load_causal_lm", load)


def test_a_loaded_model_would_be_seen(workplace: Workplace, no_model: None) -> None:
    """The fixture above bites: this command is right and would go on to load the model."""
    outcome = workplace.mini("stage=sft")
    assert outcome.status == 1
    assert "a model was loaded" in outcome.err


@pytest.mark.usefixtures("no_model")
class TestBeforeAModelLoads:
    """Everything that can be known without the model is said without it."""

    @pytest.mark.parametrize(
        ("overrides", "named"),
        [
            ([], ["no stage", "sft|rm|ppo", "recipe="]),
            (["stage=ppo"], ["stage=ppo", "stage=sft", "policy.checkpoint=", "=base"]),
            (["stage=rm"], ["stage=rm", "stage=sft", "policy.checkpoint=", "=base"]),
            (
                ["stage=ppo", "policy.checkpoint=base"],
                ["stage=ppo needs a reward", "stage=rm", "reward.checkpoint=", "reward=random"],
            ),
            (
                ["stage=eval_reward", "policy.checkpoint=base"],
                ["stage=eval_reward needs a reward", "stage=rm", "reward.checkpoint=",
                 "reward=random"],
            ),
            (
                ["stage=ppo", "ppo.minibatch_size=7"],
                ["ppo.minibatch_size = 7", "ppo.rollout_batch_size is 8"],
            ),
            (
                ["stage=ppo", "ppo.microbatch_size=3"],
                ["ppo.microbatch_size = 3", "ppo.minibatch_size is 4"],
            ),
            (
                ["stage=sft", "sft.microbatch_size=3"],
                ["sft.microbatch_size = 3", "sft.batch_size is 4"],
            ),
            (["stage=sft", "advantage=grpo"], ["ppo.advantage", "stage=sft"]),
            (["stage=rm", "advantage=gae"], ["ppo.advantage", "stage=rm"]),
            (["stage=ppo", "advantage=grpo", "ppo.samples_per_prompt=3"],
             ["ppo.samples_per_prompt = 3", "ppo.rollout_batch_size is 8"]),
            (["stage=ppo", "ppo.critic_init=reward"], ["ppo.critic ", "'head'", "adapter, model"]),
            (["stage=ppo", "ppo.stop_strings=end"], ["ppo.stop_strings", "'end'"]),
            (["stage=ppo", "ppo.gamma=1.5"], ["ppo.gamma", "1.5", "<= 1"]),
            (["stage=sft", "sft.finetune=half"], ["sft.finetune", "'half'", "lora, full"]),
            (["stage=sft", "++sft.epoch=1"], ["sft.epoch ", "did you mean sft.epochs?"]),
            (["stage=sft", "++sed=1"], ["sed ", "did you mean seed?"]),
            (["stage=sft", "resume=true"], ["outputs/default/mini/sft", "resume=true"]),
            (["stage=sft", "resume=true", "overwrite=true"], ["resume=true", "overwrite=true"]),
            (
                ["stage=sft", "policy.checkpoint=somewhere"],
                ["policy.checkpoint", "somewhere", "model.name_or_path"],
            ),
            (["stage=sft", "policy.checkpoint=./x"], ["policy.checkpoint", "./x"]),
            (["stage=rm", "policy.checkpoint=./x"], ["policy.checkpoint=./x", "no such folder"]),
            (
                ["stage=ppo", "policy.checkpoint=base", "reward.checkpoint=data"],
                ["reward.checkpoint=data", "config.json", "adapter_config.json"],
            ),
            (
                ["stage=sft", "data.demonstrations.train=data/none.jsonl"],
                ["data/none.jsonl", "does not exist"],
            ),
            (["stage=sft", "data.demonstrations.train=null"], ["data.demonstrations.train"]),
            (["stage=sft", "data.demonstrations.train=data"], ["'data'", ".jsonl"]),
            (["stage=ppo", "reward=random", "data.judge=none.py:f",
              "policy.checkpoint=base"], ["data.judge", "none.py"]),
            (["stage=sft", "model.tokenizer=./none"], ["model.tokenizer", "./none"]),
            (["stage=sft", "run=ppo"], ["run ", "'ppo'"]),
            (["stage=ppo", "job=sft"], ["job ", "'sft'"]),
            (["stage=sft", "model.name=rm"], ["model.name ", "'rm'"]),
            (["stage=sft", "run=a/b"], ["run ", "'a/b'", "slash"]),
            (["stage=sft", "job=a/b"], ["job ", "'a/b'", "slash"]),
            (["stage=sft", "model.name=a/b"], ["model.name ", "'a/b'", "slash"]),
            (["stage=sft", "run=.."], ["run ", "'..'"]),
            (["recipe=quikstart"], ["recipe=quikstart", "quickstart"]),
            (
                ["stage=ppo", "policy.checkpoint=base", "reward=http", "reward.retries=0",
                 "reward.url=http://127.0.0.1:9/score"],
                ["reward: the server http://127.0.0.1:9/score is away: "],
            ),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )  # fmt: skip
    def test_message(self, workplace: Workplace, overrides: list[str], named: list[str]) -> None:
        error = workplace.mini(*overrides).error
        assert [text for text in named if text not in error] == [], error
        assert not workplace.outputs.exists()

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"prompt": "a", "response": ', "JSON"),
            ('{"prompt": "a"}', "response"),
            ('{"prompt": "a", "response": ""}', "empty"),
            ('{"prompt": "a", "response": 3}', "text"),
        ],
    )
    def test_a_bad_line_is_named(self, workplace: Workplace, line: str, reason: str) -> None:
        file = workplace.folder / "data" / "sft_train.jsonl"
        lines = file.read_text().splitlines()
        lines[6] = line
        file.write_text("\n".join(lines))
        error = workplace.mini("stage=sft").error
        assert "sft_train.jsonl" in error
        assert "line 7" in error
        assert reason in error
        assert not workplace.outputs.exists()

    def test_identical_sides_of_a_pair_are_named(self, workplace: Workplace) -> None:
        file = workplace.folder / "data" / "preferences_val.jsonl"
        with file.open("a") as end:
            end.write('{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
        error = workplace.mini("stage=rm", "policy.checkpoint=base").error
        assert "preferences_val.jsonl" in error
        assert "line 5" in error
        assert not workplace.outputs.exists()

    def test_a_used_folder_is_refused(self, finished: Workplace) -> None:
        before = tree(finished.outputs)
        error = finished.mini("stage=rm").error
        assert "outputs/default/mini/rm" in error
        assert "finished" in error
        assert "overwrite=true" in error
        assert "job=NAME to keep both" in error
        assert tree(finished.outputs) == before

    def test_a_finished_run_is_not_resumed(self, finished: Workplace) -> None:
        before = tree(finished.outputs)
        error = finished.mini("stage=rm", "resume=true").error
        assert "finished" in error
        assert tree(finished.outputs) == before

    def test_outputs_that_cannot_be_written_are_named(self, workplace: Workplace) -> None:
        (workplace.folder / "taken").write_text("a file")
        error = workplace.mini("stage=sft", "outputs=taken").error
        assert "outputs=taken" in error

    def test_overwriting_waits_until_the_inputs_are_known_to_be_good(
        self, finished: Workplace
    ) -> None:
        before = tree(finished.outputs)
        error = finished.mini("stage=sft", "overwrite=true",
                              "data.demonstrations.val=data/none.jsonl").error  # fmt: skip
        assert "data/none.jsonl" in error
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

    def test_a_reward_model_without_a_head(self, finished: Workplace) -> None:
        copy = edited_reward(finished)
        (copy / "roles/reward_head.safetensors").unlink()
        error = self.refused(finished, "stage=ppo", f"reward.checkpoint={copy}",
                             f"policy.checkpoint={finished.stage('sft') / 'final'}")  # fmt: skip
        assert "reward_head.safetensors" in error

    def test_a_reward_model_with_another_tokenizer(self, finished: Workplace) -> None:
        copy = edited_reward(finished, tokenizer_hash="0123456789abcdef")
        error = self.refused(finished, "stage=ppo", f"reward.checkpoint={copy}",
                             f"policy.checkpoint={finished.stage('sft') / 'final'}")  # fmt: skip
        assert "tokenizer" in error
        assert "0123456789abcdef" in error

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

    def test_a_reward_model_that_is_none(self, finished: Workplace) -> None:
        sft = finished.stage("sft") / "final"
        error = self.refused(
            finished, "stage=ppo", f"policy.checkpoint={sft}", f"reward.checkpoint={sft}"
        )
        assert "stage=sft" in error
        assert "stage=rm" in error

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


def test_a_choice_of_nothing_is_called_null(workplace: Workplace) -> None:
    command = ["stage=ppo", "reward=model", "reward.name_or_path=x/y", "reward.dtype=a"]
    error = workplace.mini(*command).error
    assert error == "reward.dtype is 'a'; allowed: float32, bfloat16, or null"


def test_the_random_reward_warns_and_runs(finished: Workplace) -> None:
    shutil.rmtree(finished.stage("rm"))
    outcome = finished.mini("stage=ppo", "reward=random", "overwrite=true", "ppo.iterations=1")
    assert "reward=random" in outcome.succeeded.out
    assert "means nothing" in outcome.out
    manifest = json.loads((finished.stage("ppo") / "final" / "manifest.json").read_text())
    assert set(manifest["parents"]) == {"sft"}


def test_a_random_reward_has_no_checkpoint(finished: Workplace) -> None:
    """Else the checkpoint that was asked for would be passed over in silence."""
    error = finished.mini(
        "stage=ppo", "run=next", "reward=random", "+reward.checkpoint=x",
        f"policy.checkpoint={finished.stage('sft') / 'final'}",
    ).error  # fmt: skip
    assert "reward.checkpoint is not a known key" in error


def test_debug_shows_where_it_happened(workplace: Workplace) -> None:
    outcome = workplace.mini("stage=rm", "debug=true")
    assert outcome.status == 1
    assert "Traceback" in outcome.err
    assert "find_sft" in outcome.err


def test_a_refused_value_can_be_mended_and_the_same_command_given_again(
    finished: Workplace,
) -> None:
    """A user's second try must not meet what the first one left."""
    sft = f"policy.checkpoint={finished.stage('sft') / 'final'}"
    assert finished.mini("stage=rm", "run=next", sft, "model.lora.target_modules=[c_attn]").error
    finished.mini("stage=rm", "run=next", sft).succeeded  # noqa: B018


class TestAsAProcess:
    """Through the interpreter, as a shell sees it."""

    def test_exit_status_and_streams(self, workplace: Workplace) -> None:
        outcome = workplace.process(TRAIN_PY, "stage=rm")
        assert "stage=sft" in outcome.error
        assert outcome.out == ""

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


@pytest.mark.parametrize("overrides", [["stage=sff"], ["stage=sft", "sft.epoch=1"], ["model=big"]])
def test_what_hydra_refuses_has_no_traceback(workplace: Workplace, overrides: list[str]) -> None:
    outcome = workplace.call(*overrides)
    assert outcome.status == 1
    assert "Traceback" not in outcome.err
    assert overrides[-1].split("=")[0].split(".")[-1] in outcome.err


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
