"""metrics.csv: one row per step, one column per metric, complete on the disk after every call."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlhf.callbacks.names import METRICS
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.io.reading import read_text
from lightning_rlhf.io.storage import flush, full_disk_told, written_whole

STEP = "step"
_ORDER = {name: place for place, name in enumerate(METRICS)}

Row = dict[str, str]


class MetricsFile(Logger):
    """Logger that writes `<run_dir>/metrics.csv`.

    Lightning's CSVLogger deletes an existing file and writes several rows per step. This logger
    writes one row per step, with an empty cell for each metric not measured at that step, and a
    resumed run keeps the rows up to the step that it resumes from (`rewind`).
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.path = run_dir / "metrics.csv"
        self._rows = read_rows(self.path)
        self._columns = _columns(self._rows)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics to the row of `step`. Raises ValueError where `step` is None."""
        if step is None:
            raise ValueError("a row of metrics.csv needs its step")
        cells = {name: repr(float(value)) for name, value in metrics.items()}
        is_new_row = step > max(self._rows, default=-1)
        self._rows.setdefault(step, {}).update(cells)
        if is_new_row and self.path.exists() and cells.keys() <= set(self._columns):
            with full_disk_told(self.path), self.path.open("a", newline="") as file:
                self._writer(file).writerow({STEP: step, **cells})
        else:
            self._rewrite()

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Delete the rows after `step`."""
        self._rows = {s: row for s, row in self._rows.items() if s <= step}
        self._rewrite()

    @rank_zero_only
    def flush(self) -> None:
        """Write all rows to the disk, so that they survive a loss of power."""
        if self.path.exists():
            flush(self.path)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the hyperparameters: the run folder already holds the configuration."""

    def _rewrite(self) -> None:
        self._columns = _columns(self._rows)
        with written_whole(self.path) as beside, beside.open("w", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows({STEP: step, **self._rows[step]} for step in sorted(self._rows))

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, fieldnames=[STEP, *self._columns])


def read_rows(path: Path) -> dict[int, Row]:
    """Return step -> its cells that are not empty; {} where there is no file.

    A last line without line end is ignored: a row that was cut off may show "1" for 12.
    Raises CheckpointError with the line number where a complete line is not a valid row.
    """
    if not os.path.lexists(path):
        return {}
    text = read_text(path)
    try:
        header, *lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[STEP]]
    except csv.Error as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if header[0] != STEP or len({*header}) != len(header) or not all(header):
        raise CheckpointError(
            f"{path}, line 1, is damaged: found {','.join(header)[:60]!r}; allowed: {STEP}, and "
            "names that are all different"
        )
    rows: dict[int, Row] = {}
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(header) or not is_row(cells):
            raise CheckpointError(
                f"{path}, line {number}, is damaged: found {','.join(cells)[:60]!r}; allowed: a "
                f"step and {len(header) - 1} numbers or empty cells. Delete that line, or mend it"
            )
        if rows and int(cells[0]) <= (last := max(rows)):
            raise CheckpointError(
                f"{path}, line {number}, is damaged: step {int(cells[0])} stands behind step {last}"
            )
        rows[int(cells[0])] = {name: x for name, x in zip(header[1:], cells[1:], strict=True) if x}
    return rows


def is_row(cells: Sequence[str]) -> bool:
    """Return True if the first cell is a step >= 0, and the others are numbers or empty."""
    try:
        numbers = [int(cells[0]), *(float(cell) for cell in cells[1:] if cell)]
    except ValueError:
        return False
    return numbers[0] >= 0


def _columns(rows: Mapping[int, Row]) -> list[str]:
    """Return the metric names in the order of METRICS, then all others in alphabetical order."""
    names = {name for row in rows.values() for name in row}
    return sorted(names, key=lambda n: (_ORDER[n] if n in _ORDER else len(_ORDER), n))
