"""report.html of a run, from the files in its folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.ticker import EngFormatter

from lightning_rlhf.callbacks.files import HELD_OUT, SAMPLES, read_rows, train_samples
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.core.metrics import BEFORE_AFTER, label_of
from lightning_rlhf.core.metrics import FITNESS as FITNESS_METRICS
from lightning_rlhf.core.metrics import HELD_OUT as REWARD
from lightning_rlhf.core.metrics import HELD_OUT_KL as KL
from lightning_rlhf.core.metrics import METRICS as DEFINITIONS
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import delete, json_lines, written_whole
from lightning_rlhf.models.checkpoint import PAGE as FITNESS_PAGE
from lightning_rlhf.models.checkpoint import Verdict as Judgement
from lightning_rlhf.report.comparison import NUMBERS as EVALUATION
from lightning_rlhf.report.comparison import SAMPLES as RESPONSES
from lightning_rlhf.report.comparison import evaluation_tables
from lightning_rlhf.report.curves import curve_plots, fan_plot, frontier_plots, kl_note
from lightning_rlhf.report.fitness_page import MIN_COUNT, read_judgement
from lightning_rlhf.report.fitness_page import NUMBERS as FITNESS
from lightning_rlhf.report.run_page import (
    Evaluated,
    Level,
    PromiseRow,
    StageReport,
    Verdict,
    clauses,
    conclude,
    duration,
    evaluated_table,
    part,
    plots,
    token_part,
    write_page,
)
from lightning_rlhf.report.tables import Table, paired_samples, score_text, with_sign
from lightning_rlhf.runs.folders import CONFIG, FAILED, FINAL, METRICS, PAGE, flatten
from lightning_rlhf.runs.measured import (
    LOWEST,
    RunFiles,
    damage_named,
    evaluation_files,
    optional_json,
    read_run,
    with_intervals,
)
from lightning_rlhf.runs.stage import Stage

PROMISES = "promises.json"
DIMINISHING, DIAGNOSIS = "diminishing.json", "diagnosis.json"
PAIRS = 6
"""Number of held-out prompts whose responses are shown."""
MOST_TOKENS = 400
"""Largest number of tokens that are shown of a response."""
PHASES = {
    "time/rollout_s": "sampling",
    "time/score_s": "scoring",
    "time/update_s": "updates",
    "time/other_s": "evaluation, logs, checkpoints",
}
NO_FINDING = Markup("<p>No rule found a symptom.</p>")
Pair = Mapping[str, str]
"""A prompt with its responses `before` and `after`, and the numbers of each."""


def leave_report(folder: Path, definition: Stage) -> None:
    """Write report.html of a run that ends, and print its path; a failure to do so is a warning.

    Nothing is written where the run has no metrics. A failed.txt goes, which another command for
    the same folder may have left meanwhile.
    """
    try:
        delete(folder / FAILED)
        if (folder / CONFIG).is_file() and read_rows(folder / METRICS):
            print_line(f"report: {write([read_run(folder, definition)], folder)}")
    except (RLHFError, OSError) as error:
        print_line(f"warning: {folder / PAGE} was not written: {error}", "yellow")


def write(runs: Sequence[RunFiles], folder: Path) -> Path:
    """Write report.html about the runs into a folder, with the promises in it; return its path."""
    with damage_named(folder / PROMISES) as path:
        promises = [PromiseRow(**row) for row in optional_json(path) or ()]
    name = runs[0].name if len(runs) == 1 else runs[0].name.rpartition("/")[0]
    stages = [stage_report(run, number) for number, run in enumerate(runs, start=1)]
    with written_whole(folder / PAGE, kind="page") as beside:
        write_page(beside, name, stages, promises)
    return folder / PAGE


def stage_report(run: RunFiles, number: int = 1) -> StageReport:
    """Return what the page says about a run, which is the `number`th one of the page."""
    curves, stage = run.curves, run.definition
    unit, panels = ("step", None) if stage is None else (stage.unit, stage.panels)
    final, samples = run.folder / FINAL, run.folder / SAMPLES
    with damage_named(run.folder / DIMINISHING) as path:
        diminishing = optional_json(path)
        frontiers = frontier_plots(curves, diminishing)
        sentence = None if diminishing is None else str(diminishing["sentence"])
        diverges = diminishing is not None and diminishing["divergence"] is not None
        note = "" if diminishing is None else f"{sentence}; {kl_note(diminishing)}"
    with damage_named(run.folder / DIAGNOSIS) as path:
        findings = optional_json(path)
        found = [
            {key: str(one[key]) for key in ("rule", "iteration", "symptom", "cause", "remedy")}
            for one in findings or ()
        ]
    policies = policy_evaluated(final / EVALUATION)
    evaluated = policies or evaluations(run)
    verdict = conclude(
        evaluated,
        (stage.goal if stage else ()) or ((REWARD, "max"),),
        is_finished=run.is_finished,
        findings=len(found),
        sentence=sentence or results(run, evaluated) or None,
        diverges=diverges,
        rewards=reward_verdicts(run),
    )
    tables = [] if policies or not evaluated else [evaluated_table(evaluated)]
    tables += [*policy_tables(final / EVALUATION), *fitness_tables(run)]
    tables += [] if policies else single_numbers(run, evaluated)
    pairs = changed(run.folder) or policy_pairs(final, PAIRS) or demonstrated(samples / HELD_OUT)
    seconds = {PHASES[name]: sum(curves[name][1]) for name in PHASES if name in curves}
    total = sum(seconds.values()) or 1.0
    fan = fan_plot(curves, unit)
    flat = {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(run.tree).items()}
    data = [(key, value) for key, value in flat.items() if key.startswith("data.")]
    others = [(key, value) for key, value in flat.items() if not key.startswith("data.")]
    return StageReport(
        name=run.name,
        title=run.title,
        verdict=verdict,
        sections=[
            ("Curves", plots(curve_plots(curves, panels, unit))),
            ("Distribution of the reward", plots([] if fan is None else [fan])),
            (
                "Frontiers and the point of diminishing returns",
                plots(frontiers, " ".join(clauses(note))),
            ),
            *(("", table.html()) for table in tables),
            ("Held-out prompts, side by side", part("pairs", pairs)),
            (
                "Training samples, token by token",
                token_part(token_samples(train_samples(run.folder)), str(number)),
            ),
            ("Diagnosis", part("findings", found) or ("" if findings is None else NO_FINDING)),
            ("Time", part("time", [(phase, s, s / total) for phase, s in seconds.items()])),
            ("", part("table", totals(run))),
            ("", part("folded", others, "Configuration")),
            ("", part("folded", data, "Data")),
            ("", part("folded", origins(run), "Versions")),
        ],
    )


def fitness_tables(run: RunFiles) -> list[Table]:
    """Return the numbers of a fitness report, and where the report is; nothing without one."""
    found = {
        name.removeprefix(FITNESS_METRICS).replace("_", " "): f"{values[-1]:z.3g}"
        for name, (_, values) in run.curves.items()
        if name.startswith(FITNESS_METRICS)
    }
    if not found:
        return []
    low, high = found.pop("accuracy low", None), found.pop("accuracy high", None)
    if "accuracy" in found and low is not None:
        found["accuracy"] += f" [{low}, {high}]"
    return [
        Table(
            title="Fitness of the reward",
            columns=["", "value [95%]"],
            rows=list(map(list, found.items())),
            note=f"All numbers with their definitions, checks and pictures: {FINAL}/{FITNESS_PAGE}",
        )
    ]


def results(run: RunFiles, evaluated: Sequence[Evaluated]) -> str:
    """Return what a stage without a goal ends with, as `rank`; "" where the page says it."""
    stage = run.definition
    if stage is None or stage.goal or (run.folder / FINAL / EVALUATION).is_file():
        return ""
    shown = {one.metric for one in evaluated}
    ends = [name for name in stage.summary if name in run.curves and name not in shown]
    ends = [name for name in ends if not name.startswith(FITNESS_METRICS)]
    return "; ".join(
        f"{label_of(name)} is {plain_number(run.curves[name][1][-1])}" for name in ends
    )


def single_numbers(run: RunFiles, evaluated: Sequence[Evaluated]) -> list[Table]:
    """Return the metrics that were measured once, and are shown nowhere else, as a table."""
    shown = {one.metric for one in evaluated}
    others = (FITNESS_METRICS, "time/", "compute/")
    rows = [
        [name, plain_number(values[0]), DEFINITIONS[name].unit if name in DEFINITIONS else ""]
        for name, (_, values) in run.curves.items()
        if len(values) == 1 and name not in shown and not name.startswith(others)
    ]
    return [Table(title="Numbers", columns=["metric", "value", "unit"], rows=rows)] if rows else []


def totals(run: RunFiles) -> list[tuple[str, str]]:
    """Return the totals of compute of a run, with their units."""
    found = [
        (name, amount(run.curves[name][1][-1], DEFINITIONS[name].unit))
        for name in run.curves
        if name.startswith("compute/") and name in DEFINITIONS
    ]
    if run.manifest is not None and "time/stage_s" in run.manifest.metrics:
        found.append(("the whole stage", duration(run.manifest.metrics["time/stage_s"])))
    return found


def plain_number(value: float) -> str:
    """Return a number with three digits; a whole one with all."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:z.3g}"


def amount(value: float, unit: str) -> str:
    """Return an amount of compute: "139,600 tokens", "2.15 TFLOP", "805.90 MB" or "4.5 min"."""
    if unit == "s":
        return duration(value)
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    return EngFormatter("B" if unit == "bytes" else unit, places=2)(value)


def evaluations(run: RunFiles) -> list[Evaluated]:
    """Return the metrics in `final/`, else of the last evaluation, with gains and intervals."""
    ends = {name: run.curves[name][1] for name in run.curves if name.startswith("eval/")}
    metrics = {name: values[-1] for name, values in ends.items()}
    metrics |= {f"start/{name}": values[0] for name, values in ends.items() if len(values) > 1}
    metrics |= {} if run.manifest is None else dict(run.manifest.metrics)
    with damage_named(run.folder / SAMPLES):
        found = with_intervals(metrics, run.folder).values()
    rank = list(BEFORE_AFTER)
    return sorted(
        (one for one in found if one.metric.startswith("eval/")),
        key=lambda one: rank.index(one.metric) if one.metric in rank else len(rank),
    )


def reward_verdicts(run: RunFiles) -> list[Verdict]:
    """Return verdicts of fitness reports: on the run's own reward model, or on what it is paid."""
    final = run.folder / FINAL
    with damage_named(final / FITNESS):
        own = read_judgement(final)
    found: dict[str, Any] = {} if own is None else {run.stage: vars(own)}
    if run.manifest is not None:
        found |= run.manifest.verdicts
    elif run.definition is not None:
        with damage_named(numbers := final / run.definition.numbers):
            told = (optional_json(numbers) or {}).get("verdicts", {})
            found |= {name: vars(Judgement(**fields)) for name, fields in told.items()}
    _, pairs = run.curves.get(f"{FITNESS_METRICS}pairs", ((), (0,)))
    is_measured = pairs[-1] >= MIN_COUNT and LOWEST in run.curves
    good: Level = "good" if is_measured else "unknown"
    flat = flatten(run.tree)
    verdicts = []
    for name, judged in ((name, Judgement(**fields)) for name, fields in found.items()):
        level: Level = "bad" if judged.is_unfit else "doubtful" if judged.reasons else good
        of = "" if name == run.stage else f"reward {name}: "
        weight = flat.get(f"reward.components.{name}.weight", flat.get("reward.weight"))
        verdicts.append(Verdict(level if weight != 0 else "unknown", f"{of}{judged.words}"))
    return verdicts


def policy_tables(path: Path) -> list[Table]:
    """Return the tables of evaluation.json; none without the file."""
    if (found := optional_json(path)) is None:
        return []
    with damage_named(path):
        return [table for table in evaluation_tables(found).values() if table.rows]


def policy_evaluated(path: Path) -> list[Evaluated]:
    """Return the metrics of the first policy, with its gain over the SFT model; [] without a file.

    path: evaluation.json.
    """
    if (found := optional_json(path)) is None:
        return []
    with damage_named(path):
        metrics: dict[str, float] = found["metrics"]
        gain = metrics.get("eval/reward_gain")
        low, high = (metrics.get(f"eval/reward_gain_{end}") for end in ("low", "high"))
        reward = Evaluated(
            metric=REWARD,
            value=metrics[REWARD],
            before=None if gain is None else metrics[REWARD] - gain,
            gain=gain,
            gain_interval=None if low is None or high is None else (low, high),
        )
        kl = [Evaluated(metric=KL, value=metrics[KL])] if KL in metrics else []
        return [reward, *kl]


def policy_pairs(final: Path, count: int) -> list[Pair]:
    """Return greedy responses of the SFT model and of the first policy to the same prompts.

    final: `final/` folder of an evaluation of policies; [] for one of another stage.
    """
    path = final / RESPONSES
    if not (final / EVALUATION).is_file() or not path.is_file():
        return []
    with damage_named(path):
        rows = [row for _, row in json_lines(path) if row["decoding"] == "greedy"][:count]
        responses = [list(row["responses"].items())[:2] for row in rows]
        return [
            pair_of(row["prompt"], *before, *after)
            for row, (before, after) in zip(rows, responses, strict=True)
        ]


def pair_of(
    prompt: str, name: str, before: Mapping[str, Any], other: str, after: Mapping[str, Any]
) -> Pair:
    """Return two samples of a prompt beside each other, with their scores and names."""
    return {
        "prompt": prompt, "before": before["response"], "after": after["response"],
        "before_numbers": f"{name}: {score_text(before)}",
        "after_numbers": f"{other}: {score_text(after)}",
    }  # fmt: skip


def changed(folder: Path) -> list[Pair]:
    """Return responses of the first evaluation and of the one in `final/` to the same prompts."""
    files = evaluation_files(folder)
    if files is None or files[0] == files[1]:
        return []
    return [
        pair_of(before["prompt"], "first", before, "last", after)
        for before, after in paired_samples(*files, PAIRS)
    ]


def demonstrated(path: Path) -> list[Pair]:
    """Return the responses sampled after SFT beside the demonstrations; none without the file."""
    rows = [row for _, row in json_lines(path)] if path.is_file() else []
    kinds = {"before_numbers": "demonstration", "after_numbers": "sampled from the trained model"}
    with damage_named(path):
        return [
            {"prompt": row["prompt"], "before": row["demonstration"], "after": row["response"]}
            | kinds
            for row in rows
        ]


def token_samples(path: Path) -> list[dict[str, Any]]:
    """Return the training samples of the last iteration that has any, for `token_part`.

    Samples without numbers of their tokens are left out.
    """
    samples = [sample for _, sample in json_lines(path)] if path.is_file() else []
    found = []
    with damage_named(path):
        for sample in samples:
            if sample["iteration"] != samples[-1]["iteration"] or "per_token" not in sample:
                continue
            numbers = sample["per_token"]
            text = [str(token) for token in numbers["text"][:MOST_TOKENS]]
            kl, advantage = (
                [float(x) for x in numbers[key][:MOST_TOKENS]] for key in ("kl", "advantage")
            )
            cells = (map(repr, text), map(with_sign, advantage), (f"{x:+z.4f}" for x in kl))
            found.append({
                "heading": f"iteration {sample['iteration']}: score {sample['score']:+z.2f}, "
                f"KL {sample['kl']:+z.2f} nats, {'ended' if sample['ended'] else 'cut off'}",
                "prompt": str(sample["prompt"]), "text": text, "advantage": advantage, "kl": kl,
                "names": ("token", "advantage", "KL, nats"), "rows": list(zip(*cells, strict=True)),
            })  # fmt: skip
    return found


def origins(run: RunFiles) -> list[tuple[str, str]]:
    """Return the versions of packages, and the models that a run started from."""
    if run.manifest is None:
        return []
    parents = [(f"from: {role}", source) for role, source in run.manifest.parents.items()]
    return [*run.manifest.versions.items(), ("base", run.manifest.base), *parents]
