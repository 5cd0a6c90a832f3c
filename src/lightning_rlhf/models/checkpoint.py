"""The `final/` folder: the model that a stage writes for later stages and for other programs.

adapter_model.safetensors, adapter_config.json   or   model.safetensors, config.json
tokenizer.json, tokenizer_config.json, chat_template.jinja
manifest.json                origin of the model and its final metrics
.lightning-rlhf.files        names of these files and folders
roles/                       what only the stages here read
    reward_head.safetensors | value_head.safetensors
    fingerprint.safetensors  logits on a fixed probe input: of this model, and of its parent model
    adapter_model.safetensors, adapter_config.json   of a reward model: its adapter on the SFT model

Files of a folder are checked before a library reads them. Only safetensors are read, which hold
tensors alone: a pickle can run code of whoever wrote it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from lightning_rlhf.core.errors import CheckpointError, ConfigError, HubError
from lightning_rlhf.core.validation import LARGEST, STRICT, Options, Seed, build, described, nested
from lightning_rlhf.io.storage import is_number
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.models.config import LARGEST_RANK, SFT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST, ROLES, ADAPTER = "manifest.json", "roles", "adapter_config.json"
"""Names in a folder; ROLES holds what other programs must not take for weights of the model."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OF_ADAPTER = "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py", "README.md")
"""Patterns of the files that are downloaded from the hub."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DEEPEST = 1000
"""Largest allowed number of layers; building one takes milliseconds, independent of its size."""
FLAGS = ("inference_mode", "fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias",
         "ensure_weight_tying")  # fmt: skip
"""Keys of adapter_config.json that hold true or false."""
PAGE = "report.md"
"""Name of the file that a fitness report is written to."""
FROM_CONFIG = "from_config"
"""Value of Manifest.base for a model that was trained from random weights."""
PACKAGES = ("lightning-rlhf", "torch", "transformers", "peft", "lightning")
"""Names of the packages whose versions are recorded in a manifest."""


def is_folder(source: str) -> bool:
    """Return True if `source` is a folder of this machine, not a hub id."""
    return os.path.isdir(os.path.expanduser(source))


def refuse_missing_folder(source: str, key: str, *, is_path: bool = False) -> None:
    """Raise CheckpointError where `source` is (`is_path`), or looks like, the path of no folder."""
    looks_like_one = source.startswith(("/", ".", "~")) or source.count("/") > 1
    if not is_folder(source) and (is_path or looks_like_one or os.path.exists(source)):
        raise CheckpointError(
            f"{key}={source}: no such folder{nearest_path(source)}; allowed: a folder with "
            "config.json, weights and tokenizer, or a hub id"
        )


def local_folder(
    source: str, key: str, revision: str | None = None, patterns: Sequence[str] = FILES
) -> Path:
    """Return `source` if it is a folder, else the folder of its snapshot from the hub.

    patterns: those of the files that are downloaded. Raises CheckpointError or HubError.
    """
    if is_folder(source):
        return Path(os.path.expanduser(source))
    refuse_missing_folder(source, key)
    from huggingface_hub import snapshot_download  # slow, and seldom needed

    with naming(source, key):
        return Path(snapshot_download(source, revision=revision, allow_patterns=[*patterns]))


@contextmanager
def naming(source: str, key: str) -> Iterator[None]:
    """Convert any exception of the block into one short CheckpointError or HubError.

    A damaged file makes the libraries raise errors of any type.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        short = text if " " in text else repr(error)  # the text of a KeyError is only its key
        if "trust_remote_code" in str(error):
            own = f"{key.rpartition('.')[0]}.trust_remote_code"
            raise CheckpointError(
                f"{source} asks for Python code that it brings (auto_map in its configuration), "
                f"which is not run unless {own}=true"
            ) from error
        if os.path.exists(os.path.expanduser(source)):
            raise CheckpointError(f"{source} cannot be loaded: {short}") from error
        refuse_missing_folder(source, key, is_path=os.path.isdir(source.partition("/")[0]))
        raise HubError(
            f"{source!r} is neither a local folder nor reachable on the hub ({short}). Download "
            f"it on a machine with access (hf download {source} --local-dir FOLDER) and set "
            f"{key}=FOLDER"
        ) from error


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError where it is missing or damaged."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{file} cannot be loaded: {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object, but a {type(found).__name__}")
    return found


def check_weights(folder: Path) -> None:
    """Raise CheckpointError unless the folder holds its weights as safetensors.

    They are those of a LoRA adapter where it has adapter_config.json, else a whole model's.
    """
    is_adapter = (folder / ADAPTER).is_file()
    names = (OF_ADAPTER,) if is_adapter else (WHOLE, INDEX)
    found = [name for name in names if (folder / name).is_file()]
    if not found:
        pickle = next((f.name for f in sorted(folder.iterdir()) if f.suffix in PICKLES), None)
        has = "no weights" if pickle is None else f"only a pickle, {pickle}, which may run code"
        allowed = " or ".join(names)
        raise CheckpointError(f"{folder} cannot be loaded: it has {has}; allowed: {allowed}")
    shards = json_object(folder / INDEX).get("weight_map") if found == [INDEX] else {}
    files = shards.values() if isinstance(shards, dict) else [None]
    if any(not str(name).endswith(".safetensors") for name in files):
        raise CheckpointError(f"{folder / INDEX} does not name shards that end in .safetensors")
    if is_adapter:
        check_adapter(folder)
    else:
        check_references(folder / "config.json")


def check_references(config: Path) -> None:
    """Raise CheckpointError where a model's configuration asks for what `config_faults` names."""
    for key, value, allowed in config_faults(json_object(config)):
        raise CheckpointError(f"{config}: {key} is {value!r}{allowed}")


def config_faults(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the refused keys of a configuration, nested ones too, with value and what is allowed.

    They refer to weights other than safetensors or to code on the hub (transformers would download
    and run an attention named org/repository), or are numbers of layers beyond 1 to DEEPEST.
    """
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from config_faults(value, f"{name}.")
        elif key in ("attn_implementation", "_attn_implementation") and "/" in str(value):
            own = "eager, sdpa, flash_attention_2, or none and model.attn_implementation"
            yield name, value, f", code on the hub; allowed: {own}"
        elif name == "transformers_weights" and value and not str(value).endswith(".safetensors"):
            yield name, value, "; allowed: *.safetensors"
        elif key in LAYERS and isinstance(value, int) and not 1 <= value <= DEEPEST:
            yield name, value, f"; allowed: 1 to {DEEPEST}"


def check_adapter(folder: Path) -> None:
    """Raise CheckpointError unless the folder's adapter_config.json is that of a LoRA adapter.

    It may not repeat layers of the base model (layer_replication), nor name a Python module to
    load (megatron_config), nor hold values that PEFT would take for others.
    """
    config = json_object(folder / ADAPTER)
    r, alpha = config.get("r", 1), config.get("lora_alpha", 1)
    base = config.get("base_model_name_or_path", 0)
    rules = [
        ("peft_type", config.get("peft_type") == "LORA", "LORA"),
        ("layer_replication", config.get("layer_replication") is None, "null"),
        ("megatron_config", config.get("megatron_config") is None, "null"),
        ("r", is_number(r) and r in range(1, LARGEST_RANK + 1), f"1 to {LARGEST_RANK}"),
        ("lora_alpha", is_number(alpha) and math.isfinite(alpha), "a finite number"),
        ("base_model_name_or_path", base is None or isinstance(base, str), "the adapted model"),
        *((flag, type(config.get(flag, False)) is bool, "true or false") for flag in FLAGS),
    ]
    for key, holds, allowed in rules:
        if not holds:
            raise CheckpointError(
                f"{folder} cannot be loaded: {ADAPTER}: {key} is {config.get(key)!r:.100}; "
                f"allowed: {allowed}"
            )


@validated(frozen=True, config=STRICT)
class Verdict:
    """Verdict on whether a reward is fit to be maximised."""

    is_unfit: bool
    """True if the report advises against PPO on this reward."""
    words: str
    """Text of the verdict, two sentences."""
    reasons: Sequence[str]
    """Flagged checks, each with its number."""

    @property
    def style(self) -> str:
        """Return the verdict's colour on a terminal: red where unfit, yellow with reservations."""
        if self.is_unfit:
            return "bold red"
        return "yellow" if self.reasons else ""


Number = Annotated[int, Field(ge=-LARGEST, le=LARGEST)] | float
Verdicts = dict[str, Annotated[Verdict, nested(Verdict)]]
MOST = (2 - 2**-23) * 2.0**127  # largest number of float32
Finite = Field(ge=-MOST, le=MOST, allow_inf_nan=False, description="a float32 number")
Positive = Field(gt=0, le=MOST, allow_inf_nan=False, description="a float32 number above 0")


@validated(frozen=True, kw_only=True, config=STRICT | {"allow_inf_nan": True})
class Manifest:
    """The origin and the final metrics of a checkpoint, in plain JSON types only."""

    stage: str
    """Name of the stage that wrote the checkpoint."""
    base: str
    """Hub id or folder of the base weights, or "from_config"."""
    base_seed: Seed
    """Seed of the base's random weights where `base` is "from_config"."""
    parents: Annotated[
        dict[str, Annotated[str, Field(min_length=1)]], described("a mapping of roles to folders")
    ]
    """Role -> the `final/` folder that it was initialised from; relative to this folder where both
    are in outputs/, so that these can be moved. `Final.parent` returns the path."""
    tokenizer_hash: str
    """Hash of the tokenizer's vocabulary, as `tokenizer_hash` returns it."""
    chat_template: str
    """Jinja source of the chat template."""
    reward_mean: Annotated[float, Finite] | None
    """Mean reward on SFT samples; None unless this is a reward model."""
    reward_std: Annotated[float, Positive] | None
    """Standard deviation of the reward on SFT samples; None unless this is a reward model."""
    metrics: Annotated[dict[str, Number], described("a mapping of names to numbers")]
    """Metric name -> its value at the end of the stage."""
    config: Options
    """The resolved configuration of the stage."""
    versions: dict[str, str]
    """Package name -> version of the package that wrote the checkpoint."""
    verdicts: Annotated[Verdicts, described("a mapping of names to verdicts")] = field(
        default_factory=dict
    )
    """Reward -> the verdict of its fitness report: under "rm" the verdict of stage=rm on its own
    model; under component names the verdicts on the reward components of stage=ppo."""
    chosen: Options = field(default_factory=dict)
    """Step of the run that this model is, the rule that chose it, and the metrics there and at the
    last step; {} for a model that was saved without them."""


def read_manifest(file: Path) -> Manifest:
    """Return the manifest in a file. Raises CheckpointError where the file is not a manifest."""
    try:
        return build(Manifest, json_object(file), "manifest")
    except (ConfigError, CheckpointError) as error:
        reason = str(error).removeprefix("manifest.").removeprefix(f"{file} ")
        raise CheckpointError(f"{file} is not a manifest of this program: {reason}") from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the vocabulary; where it is equal, token ids stand for the same texts."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return package name -> installed version, for the packages in PACKAGES."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


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

        A reward model's in `path` itself is for sequence classifiers and includes the SFT adapter.
        """
        own = self.path / ROLES
        return own if (own / ADAPTER).is_file() else self.path

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

        adapter_config.json names it by an absolute path; the manifest finds it in a run that was
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
        found = self.manifest
        if found is None or found.stage != stage:
            what = f"has no {MANIFEST}" if found is None else f"was written by stage={found.stage}"
            allowed = f"the final/ folder of a stage={stage} run"
            raise CheckpointError(f"{self.path} {what}; allowed: {allowed}")
        return found

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict of stage=rm on whether this reward model is fit to be maximised.

        None where the manifest has no verdict, or another program wrote the folder.
        """
        return None if self.manifest is None else self.manifest.verdicts.get("rm")

    def reward_moments(self) -> tuple[float, float]:
        """Return mean and standard deviation of the reward on SFT samples, measured by stage=rm.

        Raises CheckpointError where one is missing.
        """
        manifest = self.require_manifest("rm")
        mean, std = manifest.reward_mean, manifest.reward_std
        if mean is None or std is None:
            raise CheckpointError(f"{self.path / MANIFEST} has no reward_mean and reward_std")
        return mean, std


def find(source: str, key: str) -> Final:
    """Return the checkpoint at a local folder or hub id. Raises CheckpointError or HubError.

    key: configuration key that names the source, for error messages.
    """
    path = local_folder(source, key)
    if (path / ADAPTER).is_file():
        check_adapter(path)
    file = path / MANIFEST
    if os.path.lexists(file):
        return Final(path, read_manifest(file))
    if not (path / "config.json").is_file() and not (path / ADAPTER).is_file():
        lacks = f"holds neither config.json nor {ADAPTER}: not a model folder"
        raise CheckpointError(f"{key}={source} {lacks}")
    return Final(path, None)


def digest(folder: Path) -> str:
    """Return a hash that changes whenever the checkpoint in `folder` is replaced.

    It is that of the manifest, which differs for every run of a stage; for a folder that another
    program wrote, that of the names, sizes and modification times of its files.
    """
    file = folder / MANIFEST
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    files = [f for f in sorted(folder.iterdir()) if f.exists()]  # a link may lead nowhere
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
