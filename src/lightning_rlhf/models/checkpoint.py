"""The outcome of a fitness report, as stored in a checkpoint.

The manifest of a `final/` folder: the origin of the model and its final metrics.

The `final/` folder: the model that a stage writes for later stages and for other programs.

adapter_model.safetensors, adapter_config.json   or   model.safetensors, config.json
tokenizer.json, tokenizer_config.json, chat_template.jinja
manifest.json                origin of the model and its final metrics
.lightning-rlhf.files        names of these files and folders
roles/                       what only the stages here read
    reward_head.safetensors | value_head.safetensors
    fingerprint.safetensors  logits on a fixed probe input: of this model, and of its parent model
    adapter_model.safetensors, adapter_config.json   of a reward model: its adapter on the SFT model
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.io.storage import is_number
from lightning_rlhf.models.adapter import (
    ADAPTER,
    PICKLES,
    check_adapter,
    is_folder,
    json_object,
    refuse_missing_folder,
)
from lightning_rlhf.models.config import SFT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PAGE = "report.md"
"""Name of the file that a fitness report is written to."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on whether a reward is fit to be maximised."""

    is_unfit: bool
    """True if the report advises against PPO on this reward."""
    words: str
    """Text of the verdict, two sentences."""
    reasons: Sequence[str]
    """Flagged checks, each with its number."""

    @staticmethod
    def is_json(node: Any) -> bool:
        """Return whether `Verdict(**node)` is a verdict: `node` is one as JSON holds it."""
        match node:
            case {"is_unfit": bool(), "words": str(), "reasons": [*reasons]} if len(node) == 3:
                return all(isinstance(reason, str) for reason in reasons)
        return False

    @property
    def style(self) -> str:
        """Return the verdict's colour on a terminal: red where unfit, yellow with reservations."""
        if self.is_unfit:
            return "bold red"
        return "yellow" if self.reasons else ""


MANIFEST = "manifest.json"
FROM_CONFIG = "from_config"
"""Value of Manifest.base for a model that was trained from random weights."""
PACKAGES = ("lightning-rlhf", "torch", "transformers", "peft", "lightning")
"""Names of the packages whose versions are recorded in a manifest."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The origin and the final metrics of a checkpoint, in plain JSON types only."""

    stage: str
    """Name of the stage that wrote the checkpoint."""
    base: str
    """Hub id or folder of the base weights, or "from_config"."""
    base_seed: int
    """Seed of the base's random weights where `base` is "from_config"."""
    parents: dict[str, str]
    """Role -> the `final/` folder that it was initialised from; relative to this folder where both
    are in outputs/, so that these can be moved. `Final.parent` returns the path."""
    tokenizer_hash: str
    """Hash of the tokenizer's vocabulary, as `tokenizer_hash` returns it."""
    chat_template: str
    """Jinja source of the chat template."""
    reward_mean: int | float | None
    """Mean reward on SFT samples; None unless this is a reward model."""
    reward_std: int | float | None
    """Standard deviation of the reward on SFT samples; None unless this is a reward model."""
    metrics: dict[str, float]
    """Metric name -> its value at the end of the stage."""
    config: dict[str, Any]
    """The resolved configuration of the stage."""
    versions: dict[str, str]
    """Package name -> version of the package that wrote the checkpoint."""
    verdicts: dict[str, Any] = field(default_factory=dict)
    """Reward -> the verdict of its fitness report: under "rm" the verdict of stage=rm on its own
    model; under component names the verdicts on the reward components of stage=ppo."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """Step of the run that this model is, the rule that chose it, and the metrics there and at the
    last step; {} for a model that was saved without them."""

    def __post_init__(self) -> None:
        """Raise TypeError where a value has the wrong type, as in a file of another program."""
        for key, kind in typing.get_type_hints(type(self)).items():
            origin = typing.get_origin(kind)
            kind = dict if origin is dict else kind
            if not isinstance(getattr(self, key), kind):
                raise TypeError(f"{key} is {getattr(self, key)!r}")
        if not 0 <= self.base_seed < 2**32:
            raise TypeError(f"base_seed is {self.base_seed!r}")
        for name, value in self.metrics.items():
            if not is_number(value):
                raise TypeError(f"metrics.{name} is {value!r:.60}")
        for role, source in self.parents.items():
            if not source or not isinstance(source, str):
                raise TypeError(f"parents.{role} is {source!r:.60}")
        for name, verdict in self.verdicts.items():
            if not Verdict.is_json(verdict):
                raise TypeError(f"verdicts.{name} is {verdict!r}")


def read_manifest(file: Path) -> Manifest:
    """Return the manifest in a file. Raises CheckpointError where the file is not a manifest."""
    try:
        return Manifest(**json_object(file))
    except (TypeError, CheckpointError) as error:
        reason = str(error).removeprefix("Manifest.__init__() ").removeprefix(f"{file} ")
        raise CheckpointError(f"{file} is not a manifest of this program: {reason}") from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the vocabulary: equal hashes mean that each token id stands for the same
    text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return package name -> installed version, for the packages in PACKAGES."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


ROLES = "roles"
"""Name of the folder of the files that other programs must not take for weights of the model."""
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""Largest finite float32 number."""


@dataclass(frozen=True)
class Final:
    """A checkpoint folder on this machine."""

    path: Path
    """Path of the folder."""
    manifest: Manifest | None
    """Contents of its manifest; None where another program wrote the folder."""

    @property
    def is_adapter(self) -> bool:
        """Return True if the folder holds an adapter, False if it holds whole weights."""
        return (self.path / ADAPTER).is_file()

    @property
    def adapter(self) -> Path:
        """Return the folder of the adapter on the SFT model, or on the base where there is none.

        The one in `path` itself is complete: that of a reward model includes the SFT adapter, and
        is one for sequence classifiers.
        """
        own = self.path / ROLES
        return own if (own / ADAPTER).is_file() else self.path

    def own_file(self, name: str) -> Path:
        """Return the path of a file that only the stages here read."""
        return self.path / ROLES / name

    def parent(self, role: str) -> Path | None:
        """Return the folder of the model that it was trained from; None where it has none.

        The SFT model of an adapter that was copied without its run is where the adapter names it.
        """
        if self.manifest is None or role not in self.manifest.parents:
            return None
        folder = (self.path / self.manifest.parents[role]).resolve()
        if role == SFT and self.is_adapter and not folder.is_dir():
            named = json_object(self.adapter / ADAPTER)["base_model_name_or_path"]
            if named and named != self.manifest.base and os.path.isdir(named):
                return Path(named)
        return folder

    @property
    def base_folder(self) -> str | None:
        """Return the folder of the adapter's base weights; None where the base is no folder.

        adapter_config.json names it by an absolute path, since PEFT and transformers take a
        relative one to start at the working directory. The manifest finds it in a run that was
        moved. An adapter that was trained on an adapter has the same base as that one.

        """
        sft = self.parent(SFT)
        if sft is not None and (sft / ADAPTER).is_file():
            return find(str(sft), f"the SFT model of {self.path}").base_folder
        if sft is not None and (sft / "config.json").is_file():
            return str(sft)
        base = json_object(self.path / ADAPTER)["base_model_name_or_path"]
        return str(base) if base and os.path.isdir(base) else None

    def require_manifest(self, stage: str) -> Manifest:
        """Return the manifest. Raises CheckpointError unless it was written by `stage`."""
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
        """Return the verdict of stage=rm on whether this reward model is fit to be maximised.

        None where the manifest has no verdict, or another program wrote the folder.
        """
        found = {} if self.manifest is None else self.manifest.verdicts
        return Verdict(**found["rm"]) if "rm" in found else None

    def reward_moments(self) -> tuple[float, float]:
        """Return mean and standard deviation of the reward on SFT samples, measured by stage=rm.

        Raises CheckpointError where one is missing or not finite, or the deviation is 0.
        """
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
    """Return the checkpoint at a local folder or hub id. Raises CheckpointError or HubError.

    key: configuration key that names the source, for error messages.
    """
    if is_folder(source):
        path = Path(os.path.expanduser(source))
    else:
        refuse_missing_folder(source, key)
        from huggingface_hub import snapshot_download

        from lightning_rlhf.models.loading import naming

        with naming(source, key):
            path = Path(snapshot_download(source, ignore_patterns=[f"*{p}" for p in PICKLES]))
    for folder in (path, path / ROLES):
        if (folder / ADAPTER).is_file():
            check_adapter(folder)
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


def stands_on_random_weights(folder: Path) -> bool:
    """Return True if the folder is an adapter whose base has random weights, made from a seed."""
    file = folder / ADAPTER
    return file.is_file() and json.loads(file.read_text())["base_model_name_or_path"] == FROM_CONFIG


def digest(folder: Path) -> str:
    """Return a hash that changes whenever the checkpoint in `folder` is replaced.

    It is computed from the manifest, which differs for every run of a stage; for a folder that
    another program wrote, from the names, sizes and modification times of its files.
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
