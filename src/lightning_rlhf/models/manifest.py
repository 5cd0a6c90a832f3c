"""The manifest of a `final/` folder: the origin of the model and its final metrics."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.validation import Text, fits
from lightning_rlhf.io.reading import is_number
from lightning_rlhf.models.verdict import Verdict
from lightning_rlhf.models.weights import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
            kind = dict if typing.get_origin(kind) is dict else kind
            if not isinstance(getattr(self, key), kind):
                raise TypeError(f"{key} is {getattr(self, key)!r}")
        if not 0 <= self.base_seed < 2**32:
            raise TypeError(f"base_seed is {self.base_seed!r}")
        for name, value in self.metrics.items():
            if not is_number(value):
                raise TypeError(f"metrics.{name} is {value!r:.60}")
        texts = {f"parents.{role}": source for role, source in self.parents.items()}
        for key, text in {"stage": self.stage, "base": self.base, **texts}.items():
            if not fits(text, Text):
                raise TypeError(f"{key} is {text!r:.60}")
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
