"""The `final/` folder that one stage leaves for the next, and for everybody else.

adapter_model.safetensors, adapter_config.json   or   model.safetensors, config.json
tokenizer.json, tokenizer_config.json, chat_template.jinja
reward_head.safetensors | value_head.safetensors
fingerprint.safetensors      logits of a fixed probe: of this model, and of what it stands on
manifest.json                where it comes from and what it reached
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.reading import is_number
from lightning_rlhf.core.verdict import Verdict
from lightning_rlhf.models.adapter import check_adapter
from lightning_rlhf.models.weights import (
    ADAPTER,
    PICKLES,
    is_folder,
    json_object,
    refuse_missing_folder,
)

# torch and transformers, which take seconds to import, are imported where they are used: what the
# folders alone tell is said before.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_rlhf.models.heads import RewardHeads

MANIFEST = "manifest.json"
FROM_CONFIG = "from_config"
"""Base of what was trained from random weights."""
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
PACKAGES = ("lightning-rlhf", "torch", "transformers", "peft", "lightning")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Where a checkpoint comes from and what it reached. Plain JSON types only."""

    stage: str
    base: str
    """Hub id or folder of the base weights, or "from_config"."""
    base_seed: int
    """Seed of the base's random weights where it is "from_config"."""
    parents: dict[str, str]
    """Role -> the `final/` folder it was started from."""
    tokenizer_hash: str
    chat_template: str
    reward_mean: int | float | None
    """Of the reward on SFT samples; None unless this is a reward model."""
    reward_std: int | float | None
    metrics: dict[str, float]
    config: dict[str, Any]
    versions: dict[str, str]
    verdicts: dict[str, Any] = field(default_factory=dict)
    """Reward -> the verdict of its fitness report: of stage=rm on itself, as "rm"; of the
    components that stage=ppo was paid by, by their names."""

    def __post_init__(self) -> None:
        """Raise TypeError where a value is of another type, as in a file of another program."""
        for key, kind in typing.get_type_hints(type(self)).items():
            kind = dict if typing.get_origin(kind) is dict else kind
            if not isinstance(getattr(self, key), kind):
                raise TypeError(f"{key} is {getattr(self, key)!r}")
        if not 0 <= self.base_seed < 2**32:
            raise TypeError(f"base_seed is {self.base_seed!r}")
        for name, value in self.metrics.items():
            if not is_number(value):
                raise TypeError(f"metrics.{name} is {value!r:.60}")
        for role, source in self.parents.items():
            if not isinstance(source, str):
                raise TypeError(f"parents.{role} is {source!r}")
        for name, verdict in self.verdicts.items():
            if not Verdict.is_json(verdict):
                raise TypeError(f"verdicts.{name} is {verdict!r}")


@dataclass(frozen=True)
class Final:
    """A checkpoint folder on this machine; `manifest` is None where another program wrote it."""

    path: Path
    manifest: Manifest | None

    @property
    def is_adapter(self) -> bool:
        return (self.path / ADAPTER).is_file()

    @property
    def base_folder(self) -> str | None:
        """The folder of the weights that the adapter stands on; None where that is no folder."""
        base: str | None = json_object(self.path / ADAPTER)["base_model_name_or_path"]
        return base if base and os.path.isdir(base) else None

    def require_manifest(self, stage: str) -> Manifest:
        """The manifest, which must be of `stage`."""
        if self.manifest is None:
            raise CheckpointError(
                f"{self.path} has no {MANIFEST}; allowed: the final/ folder of a stage={stage} run"
            )
        if self.manifest.stage != stage:
            raise CheckpointError(
                f"{self.path} was written by stage={self.manifest.stage}; allowed: the final/ "
                f"folder of a stage={stage} run"
            )
        return self.manifest

    @property
    def verdict(self) -> Verdict | None:
        """What stage=rm found when it asked whether this reward model is fit to be maximised.

        None where no report was written, or by another program.
        """
        found = {} if self.manifest is None else self.manifest.verdicts
        return Verdict(**found["rm"]) if "rm" in found else None

    def reward_moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the reward on SFT samples, as stage=rm measured them."""
        manifest = self.require_manifest("rm")
        mean, std = manifest.reward_mean, manifest.reward_std
        for key, value, allowed in (
            ("reward_mean", mean, mean is not None and abs(mean) <= FLOAT32_MAX),
            ("reward_std", std, std is not None and 0 < std <= FLOAT32_MAX),
        ):
            if not allowed:
                raise CheckpointError(
                    f"{self.path / MANIFEST}: {key} is {value}; allowed: the finite number that "
                    "stage=rm measured, above 0 for a deviation. Train the reward model again"
                )
        assert mean is not None
        assert std is not None
        return mean, std


def find(source: str, key: str) -> Final:
    """The checkpoint at a local folder or hub id. Raises CheckpointError or HubError."""
    if is_folder(source):
        path = Path(os.path.expanduser(source))
    else:
        refuse_missing_folder(source, key)
        from huggingface_hub import snapshot_download

        from lightning_rlhf.models.loading import naming

        with naming(source, key):
            path = Path(snapshot_download(source, ignore_patterns=[f"*{p}" for p in PICKLES]))
    if (path / ADAPTER).is_file():
        check_adapter(path)
    file = path / MANIFEST
    if os.path.lexists(file) and not file.is_file():
        raise CheckpointError(f"{file} is not a manifest: it is no file, or a link to none")
    if file.is_file():
        return Final(path, read_manifest(file))
    if not (path / "config.json").is_file() and not (path / ADAPTER).is_file():
        raise CheckpointError(
            f"{key}={source} holds neither config.json nor {ADAPTER}: not a model folder"
        )
    return Final(path, None)


def read_manifest(file: Path) -> Manifest:
    """The manifest in a `final/` folder. Raises CheckpointError."""
    try:
        return Manifest(**json_object(file))
    except (TypeError, CheckpointError) as error:
        reason = str(error).removeprefix("Manifest.__init__() ").removeprefix(f"{file} ")
        raise CheckpointError(f"{file} is not a manifest of this program: {reason}") from error


def load_head(final: Final, name: str, hidden_size: int) -> RewardHeads:
    """The heads in `final`, which must fit `hidden_size`; mostly one. Never random ones."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from lightning_rlhf.models.heads import RewardHeads

    file = final.path / f"{name}_head.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{final.path} has no {file.name}: it is not a {name} model")
    try:
        state = load_file(file)
        count, found = state["linear.weight"].shape
        heads = RewardHeads(found, count)
        heads.load_state_dict(state)
    except (SafetensorError, OSError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file} is not a {name} head: {error}") from error
    if found != hidden_size:
        raise CheckpointError(
            f"{file} was trained on hidden states of size {found}, but this model's have "
            f"{hidden_size}; use the {name} model that belongs to it"
        )
    return heads.requires_grad_(False)


def stands_on_random_weights(folder: Path) -> bool:
    """Whether an adapter's base is nowhere but in a configuration and a seed."""
    file = folder / ADAPTER
    return file.is_file() and json.loads(file.read_text())["base_model_name_or_path"] == FROM_CONFIG


def digest(folder: Path) -> str:
    """Tells whether the checkpoint in `folder` is still the same.

    Of its manifest, which is another one each time that a stage is run; of a folder that another
    program wrote, the names, sizes and times of its files.
    """
    file = folder / MANIFEST
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    stats = [
        (f.name, f.stat().st_size, f.stat().st_mtime_ns)
        for f in sorted(folder.iterdir())
        if f.exists()
    ]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the vocabulary: equal means that a token id is the same text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of the packages that decide what a checkpoint means."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}
