"""Model folders that are damaged, foreign, or of another run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import Refusals

PPO = ("stage=ppo", "run=next", "policy.checkpoint=sft", "reward.checkpoint=rm")
Edit = Callable[[Path], Any]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def says(content: str | bytes) -> Edit:
    """The file holds something else."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda file: file.write_bytes(raw)


def sets(**values: Any) -> Edit:
    """The JSON object in the file has other values; one that is ... is not there."""

    def edit(file: Path) -> None:
        changed = json.loads(file.read_text()) | values
        file.write_text(json.dumps({k: v for k, v in changed.items() if v is not ...}))

    return edit


def pickled(file: Path) -> None:
    """The weights are there in the other format alone."""
    file.unlink()
    (file.parent / "pytorch_model.bin").write_bytes(b"pickle")


def linked(target: str) -> Edit:
    """The file is a symbolic link."""

    def edit(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return edit


def pipe(file: Path) -> None:
    """The file is a pipe that nobody writes to."""
    file.unlink()
    os.mkfifo(file)


def of_integers(file: Path) -> None:
    """The tensors hold whole numbers."""
    save_file({name: x.to(torch.int32) for name, x in load_file(file).items()}, file)


WHOLE, HEAD = "model.safetensors", "roles/reward_head.safetensors"
ADAPTER, CONFIG = "roles/adapter_model.safetensors", "roles/adapter_config.json"
EARLY: list[tuple[str, str, Edit, list[str]]] = [
    ("sft", WHOLE, Path.unlink, ["sft cannot be loaded: it has no weights", WHOLE]),
    ("sft", WHOLE, pickled, ["sft cannot be loaded", "pickle, pytorch_model.bin", WHOLE]),
    ("sft", "config.json", Path.unlink, ["sft/config.json cannot be loaded", "No such file"]),
    ("sft", "config.json", cut, ["sft/config.json cannot be loaded"]),
    ("sft", "config.json", says("[]"), ["sft/config.json holds no JSON object", "list"]),
    ("sft", "config.json", sets(hidden_size="x"), ["sft cannot be loaded", "'hidden_size'"]),
    ("sft", "config.json", sets(transformers_weights="x.bin"), ["'x.bin'", "*.safetensors"]),
    ("sft", "config.json", sets(attn_implementation="a/b"), ["'a/b', code on the hub", "eager"]),
    ("sft", "manifest.json", says(""), ["sft/manifest.json is not a manifest"]),
    ("sft", "manifest.json", says(b"\xff\xfe"), ["sft/manifest.json is not a manifest"]),
    ("sft", "manifest.json", linked("nothing"), ["sft/manifest.json is not a manifest"]),
    ("sft", "manifest.json", linked("manifest.json"), ["sft/manifest.json is not a manifest"]),
    ("sft", "manifest.json", pipe, ["sft/manifest.json is not a manifest: it is no file"]),
    ("sft", "manifest.json", says("[]"), ["sft/manifest.json is not a manifest", "list"]),
    ("sft", "manifest.json", says('{"name": "x"}'), ["is not a manifest", "'name'"]),
    ("sft", "manifest.json", sets(stage=...), ["is not a manifest", "'stage'"]),
    ("sft", "manifest.json", sets(stage=5), ["is not a manifest", "stage is 5"]),
    ("sft", "manifest.json", sets(parents={"a": 1}), ["is not a manifest", "parents.a is 1"]),
    ("sft", "tokenizer.json", cut, ["sft cannot be loaded"]),
    ("sft", "tokenizer.json", Path.unlink, ["sft cannot be loaded"]),
    ("sft", "tokenizer.json", says("{}"), ["sft cannot be loaded", "added_tokens"]),
    ("sft", "tokenizer_config.json", says("[]"), ["sft cannot be loaded"]),
    ("sft", "chat_template.jinja", says("{% for"), ["chat template", "sft", "unexpected"]),
    ("sft", "chat_template.jinja", says("{{ 1/0 }}"), ["chat template", "ZeroDivisionError"]),
    ("sft", "chat_template.jinja", says("hello"), ["does not reproduce the user's text"]),
    ("sft", "chat_template.jinja", says(b"\xff"), ["sft cannot be loaded", "utf-8"]),
    (
        "rm",
        ADAPTER,
        Path.unlink,
        ["rm/roles cannot be loaded: it has no weights", ADAPTER.removeprefix("roles/")],
    ),
    (
        "rm",
        ADAPTER,
        pickled,
        ["rm/roles cannot be loaded", "pickle", ADAPTER.removeprefix("roles/")],
    ),
    ("rm", "manifest.json", sets(reward_mean="x"), ["is not a manifest", "reward_mean is 'x'"]),
    ("rm", "manifest.json", sets(base_seed=-1), ["is not a manifest", "base_seed is -1"]),
    ("rm", "adapter_config.json", cut, ["rm/adapter_config.json cannot be loaded"]),
    ("rm", CONFIG, cut, [f"rm/{CONFIG} cannot be loaded"]),
    ("rm", CONFIG, says("[]"), ["adapter_config.json holds no JSON", "list"]),
    ("rm", CONFIG, sets(peft_type="X"), ["rm/roles cannot be loaded", "'X'", "LORA"]),
    ("rm", CONFIG, sets(peft_type=...), ["adapter_config.json", "peft_type"]),
    (
        "sft",
        "config.json",
        sets(text_config={"attn_implementation": "a/b"}),
        ["text_config.attn_implementation is 'a/b', code on the hub"],
    ),
]
"""Seen before a model loads."""
LATE: list[tuple[str, str, Edit, list[str]]] = [
    ("sft", WHOLE, cut, ["sft cannot be loaded", "header"]),
    ("sft", WHOLE, says(b""), ["sft cannot be loaded", "header"]),
    ("sft", WHOLE, says(b"\xff" * 999), ["sft cannot be loaded", "header"]),
    ("sft", "config.json", sets(model_type="none"), ["sft cannot be loaded", "`none`"]),
    ("sft", "config.json", sets(hidden_size=64), ["sft cannot be loaded"]),
    ("sft", "generation_config.json", says("[]"), ["sft cannot be loaded", "mapping"]),
    ("sft", "manifest.json", sets(stage="rm"), ["sft is a reward model", "stage=sft"]),
    (
        "sft",
        "roles/fingerprint.safetensors",
        cut,
        ["sft/roles/fingerprint.safetensors cannot be read"],
    ),
    (
        "sft",
        "roles/fingerprint.safetensors",
        of_integers,
        ["cannot be read: self is of torch.int32"],
    ),
    ("rm", HEAD, cut, [f"rm/{HEAD} is not a reward head"]),
    ("rm", ADAPTER, cut, ["rm/roles cannot be loaded", "header"]),
    ("sft", "config.json", sets(num_hidden_layers=0), ["sft/config.json: num_hidden_layers is 0"]),
    ("sft", "config.json", sets(num_hidden_layers=10**9), ["sft/config.json: ", "1 to 1000"]),
    ("rm", CONFIG, sets(r=3), ["rm/roles cannot be loaded", "size mismatch"]),
    ("rm", CONFIG, sets(target_modules=["x"]), ["rm/roles cannot be loaded", "'x'"]),
    ("rm", "manifest.json", Path.unlink, ["rm has no manifest.json", "stage=rm"]),
    ("rm", "manifest.json", sets(reward_std=0), ["rm/manifest.json: reward_std is 0"]),
    ("rm", "manifest.json", sets(tokenizer_hash="0f"), ["another tokenizer", "0f"]),
]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("folder", "file", "edit", "named"), EARLY, ids=range(len(EARLY)))
def test_a_folder_is_named_before_a_model_loads(
    models: Refusals, folder: str, file: str, edit: Edit, named: list[str]
) -> None:
    edit(models.folder / folder / file)
    models.value("reward.format_check", "off", *PPO, named=named)


@pytest.mark.parametrize(("folder", "file", "edit", "named"), LATE, ids=range(len(LATE)))
def test_a_folder_is_named(
    models: Refusals, folder: str, file: str, edit: Edit, named: list[str]
) -> None:
    edit(models.folder / folder / file)
    models.value("reward.format_check", "off", *PPO, named=named)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("checkpoint", "named"),
    [
        ("sft/config.json", ["policy.checkpoint=sft/config.json: no such folder"]),
        ("./none", ["policy.checkpoint=./none: no such folder"]),
        ("a/b/c", ["policy.checkpoint=a/b/c: no such folder"]),
        ("~nobody-here/x", ["policy.checkpoint=~nobody-here/x: no such folder"]),
        ("data", ["policy.checkpoint=data holds neither config.json"]),
        ("", ["policy.checkpoint is ''"]),
    ],
)
def test_what_is_no_folder(models: Refusals, checkpoint: str, named: list[str]) -> None:
    models.value("policy.checkpoint", checkpoint, *PPO, named=named)


@pytest.mark.parametrize(
    ("file", "edit", "named"),
    [
        ("config.json", Path.unlink, ["sft/config.json cannot be loaded"]),
        (WHOLE, Path.unlink, ["sft cannot be loaded: it has no weights"]),
        (WHOLE, pickled, ["sft cannot be loaded", "pickle, pytorch_model.bin"]),
        ("tokenizer.json", Path.unlink, ["sft cannot be loaded"]),
    ],
)
def test_a_base_folder(models: Refusals, file: str, edit: Edit, named: list[str]) -> None:
    edit(models.folder / "sft" / file)
    models("stage=sft", "model=hub", "model.name=mini", "model.name_or_path=sft", named=named)


def within(**values: Any) -> Edit:
    """The configuration in the manifest has other values; one that is ... is not there."""

    def edit(file: Path) -> None:
        manifest = json.loads(file.read_text())
        config = manifest["config"] | values
        manifest["config"] = {k: v for k, v in config.items() if v is not ...}
        file.write_text(json.dumps(manifest))

    return edit


OWN: list[tuple[Edit, list[str]]] = [
    (within(data=...), ["data is 'missing'"]),
    (within(data=[]), ["data is []"]),
    (within(data={}), ["data.chat_template_kwargs is 'missing'"]),
    (within(data={"chat_template_kwargs": 5}), ["data.chat_template_kwargs is 5"]),
    (within(model=...), ["model is 'missing'"]),
    (within(model="tiny"), ["model is 'tiny'"]),
    (within(model={"lora": 5}), ["model.name is missing"]),
    (within(model={"lora": {}}), ["model.name is missing", "13 more"]),
]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("edit", "named"), OWN, ids=range(len(OWN)))
def test_the_configuration_of_a_reward_model_that_reads_text(
    models: Refusals, edit: Edit, named: list[str]
) -> None:
    edit(models.folder / "rm" / "manifest.json")
    text = (
        "stage=ppo",
        "run=next",
        "policy.checkpoint=sft",
        "reward=model",
        "reward.name_or_path=rm",
    )
    models.value("debug", False, *text, named=["rm/manifest.json: config: ", *named])
