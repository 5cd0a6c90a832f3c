"""The final/ folder: what one stage writes is what the next reads, or is refused."""

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.models.build_roles import (
    add_policy,
    attach_reward,
    check_fingerprint,
    start_from,
)
from lightning_rlhf.models.checkpoint import Final, find
from lightning_rlhf.models.config import BASE, POLICY, REFERENCE, REWARD, SFT, VALUE
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.stages.final import write_final

from .conftest import PROBE, build_config, build_manifest, build_model, randomise


def copy(final: Final, to: Path) -> Final:
    shutil.copytree(final.path, to)
    return find(str(to), "reward.checkpoint")


def with_manifest(final: Final, **changes: Any) -> Final:
    file = final.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return find(str(final.path), "reward.checkpoint")


def reference(lineage: Any) -> Roles:
    return start(lineage, lineage.sft)


def start(lineage: Any, final: Final) -> Roles:
    return start_from(lineage.config, final, trainable=False, seed=0)


def attach(lineage: Any, final: Final) -> Roles:
    return attach_reward(reference(lineage), REWARD, final, lineage.config, lineage.hash)


@torch.no_grad()
def plain_logits(model: Any) -> torch.Tensor:
    return model.eval()(PROBE).logits[0, -1].float()


# Written and found again


def test_the_fingerprints_are_those_of_the_models(lineage: Any) -> None:
    """Recomputed from the folders with plain libraries."""

    def sft() -> Any:
        if lineage.finetune == "full":
            return AutoModelForCausalLM.from_pretrained(lineage.sft.path)
        base = AutoModelForCausalLM.from_pretrained(lineage.base)
        return PeftModel.from_pretrained(base, lineage.sft.path, adapter_name="sft")

    def reward() -> Any:
        if lineage.finetune == "full":
            return PeftModel.from_pretrained(sft(), lineage.rm.adapter)
        model = sft()
        model.load_adapter(str(lineage.rm.adapter), adapter_name="rm")
        model.base_model.set_adapter(["sft", "rm"])
        return model

    def check(final: Final, name: str, expected: torch.Tensor) -> None:
        stored = load_file(final.path / "roles/fingerprint.safetensors")[name]
        torch.testing.assert_close(stored, expected, atol=1e-5, rtol=0)

    check(lineage.sft, "self", plain_logits(sft()))
    check(lineage.rm, "self", plain_logits(reward()))
    check(lineage.rm, "below", plain_logits(sft()))
    check(lineage.ppo, "self", lineage.policy_logits)
    if lineage.finetune == "lora":
        base = AutoModelForCausalLM.from_pretrained(lineage.base)
        check(lineage.sft, "below", plain_logits(base))


def test_writing_an_adapter_does_not_ask_the_hub(
    adapters: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run must not fail or wait at its very end for want of a network.

    The SFT adapter below names a base that is no folder here, as hub ids are none.
    """
    asked = []

    def unknown_host(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    monkeypatch.setattr(time, "sleep", asked.append)
    roles = reference(adapters)
    assert roles.model.peft_config[SFT].base_model_name_or_path == "from_config"
    roles.add_adapter(POLICY, adapters.config.lora)
    roles.heads[VALUE] = ScalarHeads(roles.hidden_size, 1)
    manifest = build_manifest("ppo", parents={"sft": str(adapters.sft.path)})
    write_final(tmp_path / "final", roles, POLICY, tokenizer, manifest, VALUE)
    assert (tmp_path / "final" / "adapter_model.safetensors").is_file()
    assert asked == []


# Refused as a reward


def test_a_damaged_head_is_refused(adapters: Any, tmp_path: Path) -> None:
    """Of another hidden size, or missing: never a random one."""
    final = copy(adapters.rm, tmp_path / "copy")
    file = final.path / "roles/reward_head.safetensors"
    save_file({"linear.weight": torch.zeros(1, 7), "linear.bias": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"reward_head.*7\].*32"):
        attach(adapters, final)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no reward_head\.safetensors"):
        attach(adapters, final)


def test_a_reward_adapter_trained_on_another_model_is_refused(
    adapters: Any, tmp_path: Path
) -> None:
    build_model("llama", seed=9).save_pretrained(tmp_path / "other")
    config = build_config(name_or_path=str(tmp_path / "other"))
    roles = start_from(config, None, trainable=False, seed=0)
    with pytest.raises(CheckpointError, match="the model that it was trained on"):
        attach_reward(roles, REWARD, adapters.rm, config, adapters.hash)
    # On the base without the SFT adapter that it was trained over, too.
    roles = start_from(adapters.config, None, trainable=False, seed=0)
    with pytest.raises(CheckpointError, match="the model that it was trained on"):
        attach_reward(roles, REWARD, adapters.rm, adapters.config, adapters.hash)


def test_a_reward_adapter_that_was_changed_is_refused(adapters: Any, tmp_path: Path) -> None:
    final = copy(adapters.rm, tmp_path / "copy")
    file = final.adapter / "adapter_model.safetensors"
    state = load_file(file)
    name = next(name for name in state if "lora_B" in name)
    save_file(state | {name: state[name] + 0.3}, file)
    with pytest.raises(CheckpointError, match="gives other logits than it gave"):
        attach(adapters, final)


# Refused as a start


def test_full_weights_that_were_changed_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    roles = Roles(build_model("qwen3"))
    roles.assign(SFT)
    write_final(tmp_path / "final", roles, SFT, tokenizer, build_manifest("sft"), None)
    final = find(str(tmp_path / "final"), "policy.checkpoint")
    config = build_config(name_or_path="unused")
    again = start_from(config, final, trainable=False, seed=0)
    check_fingerprint(again, REFERENCE, final, "self")
    build_model("qwen3", seed=5).save_pretrained(final.path)
    with pytest.raises(CheckpointError, match="gives other logits than it gave"):
        start_from(config, final, trainable=False, seed=0)


def test_an_adapter_on_random_weights_finds_them_by_the_seed_in_its_manifest(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    shape = build_model("qwen3").config.to_diff_dict() | {"model_type": "qwen3"}
    config = build_config(from_config=shape, tokenizer="x")
    roles = start_from(config, None, trainable=False, seed=41)
    roles.add_adapter(SFT, config.lora)
    randomise(roles, SFT, 1)
    manifest = build_manifest("sft", base_seed=41)
    write_final(tmp_path / "final", roles, SFT, tokenizer, manifest, None)
    final = find(str(tmp_path / "final"), "policy.checkpoint")
    again = start_from(config, final, trainable=False, seed=7)
    torch.testing.assert_close(again.probe(REFERENCE), roles.probe(SFT), atol=1e-5, rtol=0)
    with pytest.raises(CheckpointError, match="does not fit"):
        start_from(config, with_manifest(final, base_seed=7), trainable=False, seed=41)


def test_the_policy_must_start_at_the_reference(
    adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were an adapter library to start an adapter elsewhere, PPO would not run."""
    roles, add_adapter = reference(adapters), Roles.add_adapter

    def elsewhere(self: Roles, role: str, settings: Any, seed: int) -> None:
        add_adapter(self, role, settings, seed)
        self._stacks[role] = (role,)  # without the SFT adapter below it
        self.set_role(BASE)

    monkeypatch.setattr(Roles, "add_adapter", elsewhere)
    with pytest.raises(CheckpointError, match="policy does not start as the SFT model"):
        add_policy(roles, adapters.config, 0)
