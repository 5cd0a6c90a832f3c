"""The `final/` folder that one stage leaves for the next, and for everybody else.

adapter_model.safetensors, adapter_config.json   or   model.safetensors, config.json
tokenizer.json, tokenizer_config.json, chat_template.jinja
reward_head.safetensors | value_head.safetensors
fingerprint.safetensors      logits of a fixed probe: of this model, and of what it stands on
manifest.json                where it comes from and what it reached
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Float
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.storage import written_whole
from lightning_rlhf.models.heads import RewardHeads
from lightning_rlhf.models.loading import is_folder, naming, refuse_missing_folder
from lightning_rlhf.models.roles import BASE, REFERENCE, SFT, Roles, rounding, same_logits
from lightning_rlhf.models.weights import ADAPTER, PICKLES, json_object

MANIFEST = "manifest.json"
FROM_CONFIG = "from_config"
"""Base of what was trained from random weights."""
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
    reward_mean: float | None
    """Of the reward on SFT samples; None unless this is a reward model."""
    reward_std: float | None
    metrics: dict[str, float]
    config: dict[str, Any]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        """Raise TypeError where a value is of another type, as in a file of another program."""
        kinds: tuple[tuple[Any, tuple[str, ...]], ...] = (
            (str, ("stage", "base", "tokenizer_hash", "chat_template")),
            (dict, ("parents", "metrics", "config", "versions")),
            (int, ("base_seed",)),
            (int | float | None, ("reward_mean", "reward_std")),
        )
        for kind, keys in kinds:
            for key in keys:
                if not isinstance(getattr(self, key), kind):
                    raise TypeError(f"{key} is {getattr(self, key)!r}")
        for role, source in self.parents.items():
            if not isinstance(source, str):
                raise TypeError(f"parents.{role} is {source!r}")


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
        file = self.path / ADAPTER
        config = json_object(file)
        for key in ("base_model_name_or_path", "peft_type"):
            if key not in config or not isinstance(config[key], str | None):
                raise CheckpointError(f"{file} does not describe an adapter: it lacks {key}")
        base: str | None = config["base_model_name_or_path"]
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

    def reward_moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the reward on SFT samples, as stage=rm measured them."""
        manifest = self.require_manifest("rm")
        mean, std = manifest.reward_mean, manifest.reward_std
        for key, value, allowed in (
            ("reward_mean", mean, mean is not None and math.isfinite(mean)),
            ("reward_std", std, std is not None and math.isfinite(std) and std > 0),
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
        with naming(source, key):
            path = Path(snapshot_download(source, ignore_patterns=[f"*{p}" for p in PICKLES]))
    file = path / MANIFEST
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


def write_final(
    folder: Path,
    roles: Roles,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    manifest: Manifest,
    head: str | None,
    below: Float[Tensor, " V"] | None = None,
    more: Path | None = None,
) -> None:
    """Write `role` of `roles`, whole or not at all.

    head: the name of the scalar head to save with it.
    below: fingerprint of what it was trained from, where training has changed that.
    more: a folder of other files that belong to it.

    Raises StorageError where the disk holds no more.
    """
    with written_whole(folder, _size(roles, role)) as beside:
        beside.mkdir(parents=True)
        if more is not None:
            shutil.copytree(more, beside, dirs_exist_ok=True)
        stands_on = BASE if manifest.stage == "sft" else REFERENCE
        if isinstance(roles.model, PeftModel) and role in roles.model.peft_config:
            with roles.exported(role) as name:
                is_whole = name != role
                state = get_peft_model_state_dict(
                    roles.model, adapter_name=name, save_embedding_layers=False
                )
                save_file(_on_cpu(state), beside / "adapter_model.safetensors")
                inference = dataclasses.replace(roles.model.peft_config[name], inference_mode=True)
            stands_on = BASE if is_whole else stands_on
            inference.base_model_name_or_path = _base_of(manifest, is_whole)
            inference.save_pretrained(str(beside))
        else:
            roles.causal_lm.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        if head is not None:
            save_file(_on_cpu(roles.heads[head].state_dict()), beside / f"{head}_head.safetensors")
        below = roles.probe(stands_on) if below is None else below
        fingerprints = {"self": roles.probe(role), "below": below}
        save_file(fingerprints, beside / "fingerprint.safetensors")
        (beside / MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n")


def _size(roles: Roles, role: str) -> int:
    """Bytes of the adapter of `role`, or of the whole weights where it has none."""
    is_adapter = isinstance(roles.model, PeftModel) and role in roles.model.peft_config
    parts = roles.model.named_parameters()
    return sum(part.nbytes for name, part in parts if not is_adapter or f".{role}." in name)


def stands_on_random_weights(folder: Path) -> bool:
    """Whether an adapter's base is nowhere but in a configuration and a seed."""
    file = folder / ADAPTER
    return file.is_file() and json.loads(file.read_text())["base_model_name_or_path"] == FROM_CONFIG


def _base_of(manifest: Manifest, is_whole: bool) -> str:
    """What the adapter stands on; one that holds SFT too stands on the base itself."""
    return manifest.base if is_whole or SFT not in manifest.parents else manifest.parents[SFT]


def digest(folder: Path) -> str:
    """Tells whether the checkpoint in `folder` is still the same.

    Of its manifest, which is another one each time that a stage is run; of a folder that another
    program wrote, the names, sizes and times of its files.
    """
    file = folder / MANIFEST
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir())]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]


def _on_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def load_head(final: Final, name: str, hidden_size: int) -> RewardHeads:
    """The heads in `final`, which must fit `hidden_size`; mostly one. Never random ones."""
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


def fingerprint(final: Final, of: str) -> torch.Tensor | None:
    """Stored probe logits of the model itself ("self") or of what it stands on ("below")."""
    file = final.path / "fingerprint.safetensors"
    if not file.is_file():
        return None
    try:
        return load_file(file)[of]
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def has_fingerprint(roles: Roles, role: str, final: Final, of: str) -> bool:
    """Whether `role` gives the logits that `final` was written with, where it says which."""
    expected = fingerprint(final, of)
    if expected is None:
        return True
    found = roles.probe(role)
    # A quantised model may stand for a checkpoint of full precision; another one is further away.
    quantised = getattr(roles.causal_lm, "is_quantized", False)
    tolerance = 0.5 if quantised else rounding(roles.causal_lm)
    return found.shape == expected.shape and same_logits(found, expected, tolerance)


def check_fingerprint(roles: Roles, role: str, final: Final, of: str) -> None:
    """Raise CheckpointError unless `role` gives the logits that `final` was written with."""
    if not has_fingerprint(roles, role, final, of):
        raise CheckpointError(
            f"{final.path} does not fit: the {role} model here gives other logits than "
            f"{'it gave' if of == 'self' else 'the model that it was trained on gave'}. Train it "
            "again from this model, or point to the checkpoint that belongs to it"
        )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the vocabulary: equal means that a token id is the same text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of the packages that decide what a checkpoint means."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}
