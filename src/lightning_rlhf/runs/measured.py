"""The contents of a run's folder, for its report and for comparisons, with 95% intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlhf.callbacks.evaluation import SAMPLES, eval_samples
from lightning_rlhf.callbacks.loggers import read_rows
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.io.storage import is_number, json_lines, read_text
from lightning_rlhf.models.checkpoint import MANIFEST, Manifest, find, json_object, read_manifest
from lightning_rlhf.report import evaluation_page
from lightning_rlhf.report.comparison import REWARD, number_column
from lightning_rlhf.report.curves import Curves
from lightning_rlhf.report.estimates import Ends, Interval, mean_interval, rate_interval, single
from lightning_rlhf.runs.changes import read_config, read_ending
from lightning_rlhf.runs.folders import CONFIG, FINAL, METRICS
from lightning_rlhf.runs.stage import Stage


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
    def seed(self) -> str:
        return str(self.tree.get("seed"))

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics at the end: the last of each, or those of the manifest."""
        last = {name: values[-1] for name, (_, values) in self.curves.items()}
        return last if self.manifest is None else last | dict(self.manifest.metrics)

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
    manifest = folder / FINAL / MANIFEST
    return RunFiles(
        folder=folder,
        tree=tree,
        definition=definition,
        curves=read_metrics(folder),
        manifest=read_manifest(manifest) if manifest.is_file() else None,
    )


def read_metrics(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return metric -> (steps, values) of a run's metrics.csv, without steps that lack it.

    Raises CheckpointError where the file is damaged.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in read_rows(folder / METRICS).items():
        for name, cell in row.items():
            steps, values = curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(cell))
    return curves


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


ACCURACY, LOWEST, HIGHEST = "eval/accuracy", "fitness/accuracy_low", "fitness/accuracy_high"
"""Accuracy of a reward model, and the ends of its interval, of the same pairs, in metrics.csv."""
NUMBERS = {HELD_OUT: REWARD, "eval/response_tokens": "tokens"}
"""Metric that is a mean over evaluation samples -> its number, where it is not named after it."""
SEED = 0
"""Seed of the bootstrap, so that the same run has the same intervals."""

Samples = list[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """A metric, or its gain over the value before the stage, with what is known of its error."""

    value: float
    interval: Interval | None
    """95% interval by a bootstrap over prompts; None where the stage keeps no rows of
    the metric, or has a single prompt."""

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.3f}"
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True)
class StageResult:
    """Metrics of a finished stage, and the rows from which their intervals are computed."""

    metrics: Mapping[str, float]
    """Metrics in the manifest of `final/`."""
    first: Samples
    """Samples of the first evaluation; empty where the stage keeps none."""
    last: Samples
    """Samples of the evaluation of the step that became `final/`, of the same prompts; empty where
    the stage keeps none."""

    @classmethod
    def read(cls, metrics: Mapping[str, float], folder: Path) -> StageResult:
        """Read samples and metrics.csv of a stage. Raises CheckpointError for a damaged file."""
        if (folder / FINAL / evaluation_page.NUMBERS).is_file():
            return cls.of_policies(metrics, folder / FINAL)
        files = evaluation_files(folder) or ()
        read = [[sample for _, sample in json_lines(file)] for file in files]
        first, last = read or ([], [])
        rows = read_rows(folder / METRICS).values()
        fitness = {
            name: float(cell)
            for row in rows
            for name, cell in row.items()
            if name in (LOWEST, HIGHEST)
        }
        return cls({**fitness, **metrics}, first, last)

    @classmethod
    def of_policies(cls, metrics: Mapping[str, float], final: Path) -> StageResult:
        """Read an evaluation of policies: the first policy, with the SFT model as what was before.

        Sampled responses count. Raises CheckpointError for a damaged file.
        """
        file, responses = final / evaluation_page.NUMBERS, final / evaluation_page.SAMPLES
        with damage_named(file):
            policies = json_object(file)["policies"]
            sft, policy, *_ = policies
            numbers = policies[sft]["sampled"].items()
            start = {f"start/{name}": x for name, x in numbers if x is not None}
        with damage_named(responses):
            rows = [row for _, row in json_lines(responses) if row["decoding"] == "sampled"]
            first, last = (
                [{"index": row["index"], **row["responses"][name]} for row in rows]
                for name in (sft, policy)
            )
        return cls({**start, **metrics}, first, last)

    def metric(self, name: str) -> Measured | None:
        """Return a metric; None where it was not measured."""
        if name not in self.metrics:
            return None
        return Measured(self.metrics[name], self._interval(name))

    def gain(self, name: str) -> Measured | None:
        """Return the increase of a metric over the stage; None where it was not measured.

        The interval is that of the differences between responses to the same prompt.
        """
        start = f"start/{name}"
        if not {name, start} <= self.metrics.keys():
            return None
        before, after = (by_prompt(samples, name) for samples in (self.first, self.last))
        paired = len(before) == len(after)
        interval = interval_of(after - before) if paired else None
        return Measured(self.metrics[name] - self.metrics[start], interval)

    def _interval(self, name: str) -> Interval | None:
        if name == ACCURACY and {LOWEST, HIGHEST} <= self.metrics.keys():
            return self.metrics[LOWEST], self.metrics[HIGHEST]
        values = by_prompt(self.last, name)
        known = values[~np.isnan(values)]
        are_rates = known.size > 0 and known.min() >= 0 and known.max() <= 1
        return interval_of(values, rate_interval if are_rates else mean_interval)


def evaluation_files(folder: Path) -> tuple[Path, Path] | None:
    """Return the files of the samples of the first evaluation and of the one that became `final/`.

    That is the last one where the run has no ending.json. None for a stage without samples.
    Raises CheckpointError for a damaged ending.json.
    """
    files = sorted((folder / SAMPLES).glob("eval_*.jsonl"))
    ending = read_ending(folder)
    if ending is None:
        return (files[0], files[-1]) if files else None
    chosen = eval_samples(folder, ending.step)
    return (files[0], chosen) if chosen in files else None


def by_prompt(samples: Samples, name: str) -> np.ndarray:
    """Return a metric's mean over the samples of each prompt, in the order of the prompts.

    It is NaN for a prompt without the metric in any sample.
    """
    values = number_column(samples, NUMBERS.get(name, name.removeprefix("eval/")))
    _, prompts = np.unique([sample["index"] for sample in samples], return_inverse=True)
    known = ~np.isnan(values)
    sums, counts = (
        np.bincount(prompts[known], weights, len(set(prompts))) for weights in (values[known], None)
    )
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def interval_of(
    values: np.ndarray, estimate: Callable[[np.ndarray, int], Ends] = mean_interval
) -> Interval | None:
    """Return the 95% interval of the mean over prompts, of those that are not NaN.

    None with fewer than two of them.
    estimate: function from values and a seed to the ends of the interval of their mean.
    """
    known = values[~np.isnan(values)]
    return single(estimate(known, SEED)) if len(known) > 1 else None


def metrics_of(final: Path, stage: Stage) -> Mapping[str, float]:
    """Return the final metrics of a run of the stage by name.

    final: `final/` folder of the run.
    Raises CheckpointError where it is missing or damaged.
    """
    if not final.is_dir():
        raise CheckpointError(f"{final} is missing")
    if stage.hands_over == "report":
        file = final / stage.numbers
        found = json_object(file).get("metrics")
        if not isinstance(found, dict) or not all(map(is_number, found.values())):
            raise CheckpointError(f"{file} is damaged: it holds no metrics")
        return found
    return find(str(final), "final").require_manifest(stage.name).metrics
