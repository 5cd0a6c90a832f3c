"""Every malformed manifest.json and adapter_config.json is loaded, or is one CheckpointError."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.models.checkpoint import ADAPTER, MANIFEST, find
from lightning_rlhf.models.config import REWARD
from lightning_rlhf.models.roles import Roles

from .conftest import Lineage

VALUES: list[Any] = [
    None, True, -1, 10**400, float("nan"), "", "x", "\0", [], [None], {}, {"x": "y"},
]  # fmt: skip
FILES = [b"", b"[]", b"\xff\xfe", b"{}", b"[" * 9**6, b'{"r": NaN}', b"\xef\xbb\xbf{}"]


@pytest.fixture
def folder(tmp_path: Path, adapters: Lineage) -> Path:
    """A copy of an adapter of stage=rm."""
    shutil.copytree(adapters.rm.path, tmp_path / "rm")
    return tmp_path / "rm"


def malformed(file: Path, values: Callable[[str], list[Any]]) -> Iterator[bytes]:
    """The file, each of its values another one or left out; and files that hold something else."""
    tree = json.loads(file.read_text())
    yield from FILES
    for key in tree:
        yield json.dumps({k: v for k, v in tree.items() if k != key}).encode()
        for value in values(key):
            yield json.dumps(tree | {key: value}).encode()


def one_line(error: CheckpointError, file: Path) -> None:
    caught = str(error)
    assert str(file.parent) in caught
    assert len(caught.splitlines()) == 1, caught


def test_manifests(folder: Path) -> None:
    file, refused = folder / MANIFEST, 0
    for content in malformed(file, lambda _: VALUES):
        file.write_bytes(content)
        try:
            final = find(str(folder), "reward.checkpoint")
            assert final.manifest is not None
            final.reward_moments()
        except CheckpointError as error:
            one_line(error, file)
            refused += 1
    assert refused > 90


def test_adapters(folder: Path, make_model: Callable[..., PreTrainedModel]) -> None:
    file, refused = folder / ADAPTER, 0
    keys = {"peft_type", "base_model_name_or_path", "lora_alpha", "target_modules", "use_dora"}
    for content in malformed(file, lambda key: VALUES[::3] if key in keys else ["x"]):
        file.write_bytes(content)
        try:
            _ = find(str(folder), "reward.checkpoint").base_folder
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Roles(make_model("llama")).load_adapter(REWARD, folder, trainable=False)
        except CheckpointError as error:
            one_line(error, file)
            refused += 1
    assert refused > 10
