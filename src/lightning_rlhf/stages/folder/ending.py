"""ending.json: how a run ended, and which of its steps became `final/`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.checkpoint_files import Origin
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.validation import STRICT, PositiveInt, build
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models.weights import json_object

ENDING = "ending.json"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Value:
    """A metric at the chosen step and at the last one."""

    mode: Mode
    """Direction in which the metric is better: min or max."""
    chosen: float | None
    """Value at the chosen step; None where it was not measured."""
    last: float | None
    """Value at the last step; None where it was not measured."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ending:
    """The end of a run."""

    final: str
    """Rule that chose the step: last, best or its number."""
    step: PositiveInt
    """Step whose model was chosen."""
    last_step: PositiveInt
    """Last step of the run."""
    metrics: dict[str, Value]
    """Metrics that tell which evaluation is the best, by name."""
    stopped: str | None
    """Why the run ended before the last step of its schedule; None where it did not."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A folder like `final/` that is made from a checkpoint of a run."""

    folder: Path
    """Path of the folder."""
    checkpoint: Path
    """Checkpoint with the weights."""
    origin: Origin
    """Run that wrote the checkpoint."""
    metrics: dict[str, float]
    """Metrics of the evaluation at that step; {} where there was none."""
    ending: Ending
    """Step of the checkpoint, and the metrics there and at the last step."""


def write_ending(folder: Path, ending: Ending) -> None:
    """Write the ending of the run in `folder`."""
    with written_whole(folder / ENDING) as beside:
        beside.write_text(json.dumps(asdict(ending), indent=2) + "\n")


def read_ending(folder: Path) -> Ending | None:
    """Return the ending of the run in `folder`; None of one that was cut off.

    Raises CheckpointError where the file is damaged.
    """
    file = folder / ENDING
    if not file.is_file():
        return None
    tree = json_object(file)
    try:
        metrics = tree["metrics"] if isinstance(tree.get("metrics"), dict) else {}
        values = {name: build(Value, node, f"metrics.{name}") for name, node in metrics.items()}
        return build(Ending, {**tree, "metrics": values}, "ending")
    except ConfigError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
