"""The contents of a run's folder, for its report and for comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.callbacks.metrics_file import read_rows
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.io.reading import read_text
from lightning_rlhf.models.manifest import MANIFEST, Manifest, read_manifest
from lightning_rlhf.report.run_plots import Curves
from lightning_rlhf.stages.folder.changes import read_config
from lightning_rlhf.stages.folder.folders import CONFIG, FINAL, METRICS
from lightning_rlhf.stages.stage import Stage


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run's folder."""

    folder: Path
    tree: Mapping[str, Any]
    """Configuration of the run."""
    definition: Stage | None
    """Stage of the run; None for one that is not in the package."""
    curves: Curves
    manifest: Manifest | None
    """Manifest of `final/`; None where the run has not finished, or hands over no model."""

    @property
    def stage(self) -> str:
        return str(self.tree["stage"])

    @property
    def name(self) -> str:
        """Return run/model/stage, or run/model/job/stage."""
        tree = self.tree
        parts = (tree.get("run"), tree["model"]["name"], tree.get("job"), tree["stage"])
        return "/".join(str(part) for part in parts if part)

    @property
    def title(self) -> str:
        """Return the title of the stage, with the job that it is of."""
        title = self.stage if self.definition is None else self.definition.title
        return f"{title} ({job})" if (job := self.tree.get("job")) else title

    @property
    def is_finished(self) -> bool:
        return (self.folder / FINAL).is_dir()


def read_run(folder: Path, definition: Stage | None) -> RunFiles:
    """Return what the folder of a run holds.

    definition: stage of the run; None for one that is not in the package.
    Raises CheckpointError where a file is damaged.
    """
    file = folder / CONFIG
    tree = read_config(file, "a report cannot be written")
    match tree:
        case {"stage": str(), "model": {"name": str()}}:
            pass
        case _:
            raise CheckpointError(f"{file} is damaged: it names no stage and no model")
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in read_rows(folder / METRICS).items():
        for name, cell in row.items():
            steps, values = curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(cell))
    manifest = folder / FINAL / MANIFEST
    return RunFiles(
        folder=folder,
        tree=tree,
        definition=definition,
        curves=curves,
        manifest=read_manifest(manifest) if manifest.is_file() else None,
    )


def optional_json(path: Path) -> Any:
    """Return the content of a JSON file; None without it."""
    if not path.is_file():
        return None
    with damage_named(path):
        return json.loads(read_text(path))


@contextmanager
def damage_named(path: Path) -> Iterator[Path]:
    """Yield the path; raise CheckpointError that names it where its content is not as written."""
    try:
        yield path
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}; delete it to leave it out"
        ) from error
