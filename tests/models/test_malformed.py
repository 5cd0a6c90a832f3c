"""A malformed manifest.json or adapter_config.json is loaded, or is one CheckpointError."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.models.checkpoint import ADAPTER, MANIFEST, check_weights, find

from .conftest import Lineage

VALUES: list[Any] = [None, True, -1, 10**400, float("nan"), "x", [None], {"x": "y"}]
FILES = [b"", b"[]", b"\xff\xfe", b"{}", b"[" * 9**6, b'{"r": NaN}', b"\xef\xbb\xbf{}"]


@pytest.fixture
def folder(tmp_path: Path, adapters: Lineage) -> Path:
    """A copy of an adapter of stage=rm."""
    shutil.copytree(adapters.rm.path, tmp_path / "rm")
    return tmp_path / "rm"


def malformed(file: Path) -> Iterator[bytes]:
    """The file, each of its values another one or left out; and files that hold something else."""
    tree = json.loads(file.read_text())
    yield from FILES
    for key in tree:
        yield json.dumps({k: v for k, v in tree.items() if k != key}).encode()
        for value in VALUES:
            yield json.dumps(tree | {key: value}).encode()


def test_manifests(folder: Path) -> None:
    file, refused = folder / MANIFEST, list[str]()
    for content in malformed(file):
        file.write_bytes(content)
        try:
            final = find(str(folder), "reward.checkpoint")
            assert final.manifest is not None
            final.reward_moments()
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 60
    assert all(str(folder) in message and "\n" not in message for message in refused)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("peft_type", "PROMPT_TUNING", "LORA"),
        ("layer_replication", [[0, 10**9]], "null"),
        ("use_rslora", "false", "true or false"),
        ("lora_alpha", float("inf"), "a finite number"),
        ("r", 10**6, "1 to 4096"),
    ],
)
def test_a_value_is_refused(folder: Path, key: str, value: Any, allowed: str) -> None:
    file = folder / ADAPTER
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError) as error:
        check_weights(folder)
    caught = str(error.value)
    assert caught.startswith(f"{folder} cannot be loaded: {ADAPTER}: {key} is ")
    assert caught.endswith(f"; allowed: {allowed}")
