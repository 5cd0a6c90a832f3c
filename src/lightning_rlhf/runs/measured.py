"""The contents of a run's folder, for its report and for comparisons, with 95% intervals."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlhf.callbacks.files import SAMPLES, eval_samples, read_rows
from lightning_rlhf.core.errors import CheckpointError, first_line
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.io.storage import is_number, json_lines, read_text
from lightning_rlhf.models.checkpoint import MANIFEST, Manifest, find, json_object, read_manifest
from lightning_rlhf.report import comparison, run_page
from lightning_rlhf.report.curves import Curves
from lightning_rlhf.report.estimates import Ends, Interval, mean_interval, rate_interval, single
from lightning_rlhf.runs import folders
from lightning_rlhf.runs.stage import Stage, find_stage


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's folder."""

    folder: Path
    tree: Mapping[str, Any]
    """Configuration of the run."""
    definition: Stage | None
    """Stage of the run; None for one that is not in the package."""
    curves: Curves
    manifest: Manifest | None
    """Manifest of `final/`; None where the run has not finished, or its stage writes no model."""

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
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics at the end: the last of each, or those of the manifest."""
        last = {name: values[-1] for name, (_, values) in self.curves.items()}
        return last if self.manifest is None else last | dict(self.manifest.metrics)


def read_run(folder: Path, definition: Stage | None = None) -> RunFiles:
    """Return what the folder of a run holds.

    definition: stage of the run; None for that of the package with its name, if there is one: code
        of the user's own is not loaded.
    Raises CheckpointError where a file is damaged.
    """
    file = folder / folders.CONFIG
    tree = folders.read_config(file, "a report cannot be written")
    match tree:
        case {"stage": str() as stage, "model": {"name": str()}}:
            definition = definition or find_stage(stage)
        case _:
            raise CheckpointError(f"{file} is damaged: it names no stage and no model")
    file = folder / folders.FINAL / MANIFEST
    manifest = read_manifest(file) if file.is_file() else None
    return RunFiles(folder, tree, definition, read_metrics(folder), manifest)


def read_metrics(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return metric -> (steps, values) of a run's metrics.csv, without steps that lack it.

    Raises CheckpointError where the file is damaged.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in read_rows(folder / folders.METRICS).items():
        for name, x in row.items():
            steps, values = curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(x)
    return curves


def optional_json(path: Path) -> Any:
    """Return the content of a JSON file; None without it. To be called within `damage_named`."""
    return json.loads(read_text(path)) if path.is_file() else None


@contextmanager
def damage_named(path: Path) -> Iterator[Path]:
    """Yield the path; raise CheckpointError that names it where its content is not as written."""
    try:
        yield path
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        found = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{path} is damaged: {found}; delete it to leave it out") from error


ACCURACY, LOWEST, HIGHEST = "eval/accuracy", "fitness/accuracy_low", "fitness/accuracy_high"
"""Accuracy of a reward model, and the ends of its interval, of the same pairs, in metrics.csv."""
NUMBERS = {HELD_OUT: comparison.REWARD, "eval/response_tokens": "tokens"}
"""Metric that is a mean over evaluation samples -> its number, where it is not named after it."""
SEED = 0
"""Seed of the bootstrap, so that the same run has the same intervals."""

Samples = list[dict[str, Any]]


def with_intervals(
    metrics: Mapping[str, float], folder: Path | None
) -> dict[str, run_page.Evaluated]:
    """Return the metrics of a run with 95% intervals, and their gains over the stage, by name.

    An interval is known where the folder has rows of the metric, of two prompts or more; that of a
    gain is of the differences between responses to the same prompt. For an evaluation of policies
    they are the sampled responses of the first policy, with the SFT model's as those before.

    metrics: those in `final/`, with values before the stage as start/NAME.
    folder: folder of the run; None knows no interval.
    Raises CheckpointError for a damaged file.
    """
    first: Samples = []
    last: Samples = []
    intervals: dict[str, Interval] = {}
    if folder is not None and (folder / folders.FINAL / comparison.NUMBERS).is_file():
        with damage_named(folder / folders.FINAL / comparison.NUMBERS) as file:
            content = json_object(file)
            policies = content["policies"]
            sft, policy, *_ = policies
            intervals = content.get("pass_intervals", {}).get(policy, {})
            numbers = policies[sft]["sampled"].items()
            metrics = {f"start/{name}": x for name, x in numbers if x is not None} | {**metrics}
        with damage_named(folder / folders.FINAL / comparison.SAMPLES) as file:
            rows = [row for _, row in json_lines(file) if row["decoding"] == "sampled"]
            first, last = (
                [{"index": row["index"], **row["responses"][name]} for row in rows]
                for name in (sft, policy)
            )
    elif folder is not None:
        files = evaluation_files(folder) or ()
        first, last = [[x for _, x in json_lines(file)] for file in files] or ([], [])
        curves = read_metrics(folder)
        metrics = {n: curves[n][1][-1] for n in (LOWEST, HIGHEST) if n in curves} | {**metrics}
    found = {}
    for name in (name for name in metrics if not name.startswith("start/")):
        start = metrics.get(f"start/{name}")
        before, after = (by_prompt(samples, name) for samples in (first, last))
        known = after[~np.isnan(after)]
        are_rates = known.size > 0 and known.min() >= 0 and known.max() <= 1
        interval = interval_of(after, rate_interval if are_rates else mean_interval)
        interval = intervals.get(name, interval)
        if name == ACCURACY and {LOWEST, HIGHEST} <= metrics.keys():
            interval = metrics[LOWEST], metrics[HIGHEST]
        gain = None if start is None else metrics[name] - start
        has_interval = start is not None and len(before) == len(after)
        ends = interval_of(after - before) if has_interval else None
        found[name] = run_page.Evaluated(name, metrics[name], interval, start, gain, ends)
    return found


def evaluation_files(folder: Path) -> tuple[Path, Path] | None:
    """Return the files of the samples of the first evaluation and of the one that became `final/`.

    That is the last one where the run has no ending.json. None for a stage without samples.
    Raises CheckpointError for a damaged ending.json.
    """
    files = sorted((folder / SAMPLES).glob("eval_*.jsonl"))
    ending = folders.read_ending(folder)
    if ending is None:
        return (files[0], files[-1]) if files else None
    chosen = eval_samples(folder, ending.step)
    return (files[0], chosen) if chosen in files else None


def unequal(runs: Sequence[RunFiles]) -> list[str]:
    """Return what the runs were evaluated with that is not the same in all of them.

    Held-out data are the prompts of the samples, else the keys of the data; a reward is its keys
    and the digests of the models that it reads.
    """
    found: dict[str, set[str]] = {"held-out data": set(), "rewards": set()}
    for run in runs:
        flat, files = folders.flatten(run.tree), evaluation_files(run.folder)
        kind = f"data.{run.definition.data if run.definition else 'prompts'}."
        without = f"{kind}train" if flat.get(f"{kind}val") else ""
        seen = [x for x in flat.items() if x[0].startswith(kind) and x[0] != without]
        if files is not None:
            seen = [row["prompt"] for _, row in json_lines(files[0])]
        found["held-out data"].add(json.dumps(seen))
        with damage_named(run.folder / folders.PARENTS) as path:
            parts = sorted({**flat, **(optional_json(path) or {})}.items())
        own = [x for x in parts if x[0].startswith("reward") and not x[0].endswith(".checkpoint")]
        found["rewards"].add(json.dumps(own if HELD_OUT in run.metrics else []))
    return [name for name, values in found.items() if len(values) > 1]


def by_prompt(samples: Samples, name: str) -> np.ndarray:
    """Return a metric's mean over the samples of each prompt, in the order of the prompts.

    It is NaN for a prompt without the metric in any sample.
    """
    values = comparison.number_column(samples, NUMBERS.get(name, name.removeprefix("eval/")))
    _, prompts = np.unique([sample["index"] for sample in samples], return_inverse=True)
    known = ~np.isnan(values)
    size = len(set(prompts))
    sums = np.bincount(prompts[known], values[known], size)
    counts = np.bincount(prompts[known], None, size)
    with np.errstate(invalid="ignore"):
        return sums / counts


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
