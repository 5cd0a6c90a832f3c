"""report.html of a run, from the files in its folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.ticker import EngFormatter
from rich import get_console

from lightning_rlhf.callbacks import files
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.core.metrics import BEFORE_AFTER, FITNESS, HELD_OUT, HELD_OUT_KL, label_of
from lightning_rlhf.core.metrics import METRICS as DEFINITIONS
from lightning_rlhf.io import console, storage
from lightning_rlhf.models.checkpoint import PAGE as FITNESS_PAGE
from lightning_rlhf.models.checkpoint import Verdict as Judgement
from lightning_rlhf.report import comparison, fitness_page, run_page
from lightning_rlhf.report.curves import FAN_PANEL, curve_plots, frontier_plots, kl_note
from lightning_rlhf.report.tables import Table, paired_samples, samples_shown, score_text, with_sign
from lightning_rlhf.rewards import format_check
from lightning_rlhf.runs import measured
from lightning_rlhf.runs.folders import CONFIG, FAILED, FINAL, METRICS, PAGE, flatten
from lightning_rlhf.runs.stage import Stage

PROMISES = "promises.json"
PAIRS, SHOWN, MOST_TOKENS = 6, 5, 400
"""Number of held-out prompts whose responses a page shows, and the terminal, and largest number of
tokens of one."""
STYLES = {"good": "green", "doubtful": "yellow", "bad": "red", "unknown": ""}
"""Colour of each level of a verdict on the terminal."""
PHASES = {
    "time/rollout_s": "sampling",
    "time/score_s": "scoring",
    "time/update_s": "updates",
    "time/other_s": "evaluation, logs, checkpoints",
}
FINDING = ("rule", "iteration", "symptom", "cause", "remedy")
NO_FINDING = Markup("<p>No rule found a symptom.</p>")
Pair = Mapping[str, str]
"""A prompt with its responses `before` and `after`, and the numbers of each."""


def leave_report(folder: Path, definition: Stage) -> None:
    """Write report.html of a run that ends, and print its path, and of a finished run samples and
    the verdict; a failure to do so is a warning.

    Nothing is written where the run has no metrics. A failed.txt goes, which another command for
    the same folder may have left meanwhile.
    """
    try:
        storage.delete(folder / FAILED)
        if not ((folder / CONFIG).is_file() and files.read_rows(folder / METRICS)):
            return
        run = measured.read_run(folder, definition)
        (page,) = write([run], folder)
        if (folder / FINAL).is_dir() and page.verdict is not None:
            if run.tree["samples"] and (samples := pairs(folder)[:SHOWN]):
                console.print_line("held-out prompts:")
                get_console().print(samples_shown(samples, get_console().width))
            words = " ".join(run_page.clauses(page.verdict.words))
            level = page.verdict.level
            console.print_line(f"verdict: {run_page.WORDS[level]}. {words}", STYLES[level])
        console.print_line(f"report: {folder / PAGE}")
    except (RLHFError, OSError) as error:
        console.print_line(f"warning: {folder / PAGE} was not written: {error}", "yellow")


def write(runs: Sequence[measured.RunFiles], folder: Path) -> list[run_page.StageReport]:
    """Write report.html about the runs into a folder, with the promises in it; return its parts."""
    with measured.damage_named(folder / PROMISES) as path:
        promises = [run_page.PromiseRow(**row) for row in measured.optional_json(path) or ()]
    name = runs[0].name if len(runs) == 1 else runs[0].name.rpartition("/")[0]
    stages = [stage_report(run, number, folder) for number, run in enumerate(runs, start=1)]
    with storage.written_whole(folder / PAGE, kind="page") as temporary:
        run_page.write_page(temporary, name, stages, promises)
    return stages


def stage_report(
    run: measured.RunFiles, number: int = 1, shown_in: Path | None = None
) -> run_page.StageReport:
    """Return what the page says about a run, which is the `number`th one of the page."""
    curves, stage, folder = run.curves, run.definition, run.folder
    unit, panels = ("step", None) if stage is None else (stage.unit, stage.panels)
    with measured.damage_named(folder / "diminishing.json") as path:
        returns: dict[str, Any] = measured.optional_json(path) or {}
        frontiers = frontier_plots(curves, returns or None)
        note = f"{returns['sentence']}; {kl_note(returns)}" if returns else ""
        diverges = bool(returns) and returns["divergence"] is not None
    with measured.damage_named(folder / "diagnosis.json") as path:
        findings = measured.optional_json(path)
        found = [{key: str(one[key]) for key in FINDING} for one in findings or ()]
    of_policies, tables = policies_evaluated(folder / FINAL)
    evaluated = of_policies or evaluations(run)
    verdict = run_page.conclude(
        evaluated,
        (stage.goal if stage else ()) or ((HELD_OUT, "max"),),
        is_finished=(folder / FINAL).is_dir(),
        findings=len(found),
        sentence=returns.get("sentence") or results(run, evaluated) or None,
        diverges=diverges,
        rewards=reward_verdicts(run),
    )
    if evaluated and not of_policies:
        tables = [run_page.evaluated_table(evaluated)]
    tables += fitness_tables(run)
    tables += [] if of_policies else single_numbers(run, evaluated)
    seconds = {PHASES[name]: sum(curves[name][1]) for name in PHASES if name in curves}
    phases = [(phase, s, s / (sum(seconds.values()) or 1.0)) for phase, s in seconds.items()]
    fan = [FAN_PANEL.measured(curves, unit)] if FAN_PANEL.metrics <= curves.keys() else []
    flat = {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(run.tree).items()}
    data = [one for one in flat.items() if one[0].startswith("data.")]
    others = [one for one in flat.items() if not one[0].startswith("data.")]
    tokens = token_samples(folder / files.TRAIN_SAMPLES)
    versions: list[tuple[str, str]] = []
    if run.manifest is not None:
        parents = [(f"from: {role}", source) for role, source in run.manifest.parents.items()]
        versions = [*run.manifest.versions.items(), ("base", run.manifest.base), *parents]
    diagnosis = run_page.part("findings", found) or ("" if findings is None else NO_FINDING)
    returned = run_page.part("plots", frontiers, " ".join(run_page.clauses(note)))
    return run_page.StageReport(
        name=run.name,
        title=run.title,
        verdict=verdict,
        sections=[
            ("", run_page.part("links", other_pages(run.folder, shown_in or run.folder))),
            ("Curves", run_page.part("plots", curve_plots(curves, panels, unit))),
            ("Distribution of the reward", run_page.part("plots", fan)),
            ("Frontiers and the point of diminishing returns", returned),
            *(("", table.html()) for table in tables),
            ("Held-out prompts, side by side", run_page.part("pairs", pairs(folder))),
            ("Training samples, token by token", run_page.token_part(tokens, str(number))),
            ("Diagnosis", diagnosis),
            ("Time", run_page.part("time", phases)),
            ("", run_page.part("table", totals(run))),
            ("", run_page.part("folded", others, "Configuration")),
            ("", run_page.part("folded", data, "Data")),
            ("", run_page.part("folded", versions, "Versions")),
        ],
    )


def other_pages(folder: Path, shown_in: Path) -> list[tuple[str, str]]:
    """Return texts and addresses of the pages that belong to a run, but for that in `shown_in`.

    They are those of the stages beside it, that of all stages, and comparisons in the folders above
    that link to the run. Addresses are relative to `shown_in`.
    """
    found = [(page.parent.name, page) for page in sorted(folder.parent.glob(f"*/{PAGE}"))]
    found += [("all stages", page) for page in folder.parent.glob(PAGE)]
    encoded, own = run_page.environment().filters["urlencode"], (folder / PAGE).resolve()
    for place in own.parents[1:]:
        other, address = place / "compare.html", encoded(str(own.relative_to(place)))
        if other.is_file() and f'"{address}"' in other.read_text():
            found.append(("comparison", other))
    return [(text, storage.relative(x, shown_in)) for text, x in found if x.parent != shown_in]


def fitness_tables(run: measured.RunFiles) -> list[Table]:
    """Return the numbers of a fitness report, and where the report is; nothing without one."""
    found = {
        name.removeprefix(FITNESS).replace("_", " "): f"{values[-1]:z.3g}"
        for name, (_, values) in run.curves.items()
        if name.startswith(FITNESS)
    }
    low, high = found.pop("accuracy low", None), found.pop("accuracy high", None)
    if "accuracy" in found and low is not None:
        found["accuracy"] += f" [{low}, {high}]"
    note = f"All numbers with their definitions, checks and pictures: {FINAL}/{FITNESS_PAGE}"
    columns, rows = ["", "value [95%]"], list(map(list, found.items()))
    table = Table(title="Fitness of the reward", columns=columns, rows=rows, note=note)
    return [table] if rows else []


def results(run: measured.RunFiles, evaluated: Sequence[run_page.Evaluated]) -> str:
    """Return what a stage without a goal ends with, as `rank`; "" where the page says it."""
    stage = run.definition
    if stage is None or stage.goal or (run.folder / FINAL / comparison.NUMBERS).is_file():
        return ""
    left = run.curves.keys() - {one.metric for one in evaluated}
    names = [name for name in stage.summary if name in left and not name.startswith(FITNESS)]
    last = {name: plain_number(run.curves[name][1][-1]) for name in names}
    return "; ".join(f"{label_of(name)} is {number}" for name, number in last.items())


def single_numbers(run: measured.RunFiles, evaluated: Sequence[run_page.Evaluated]) -> list[Table]:
    """Return the metrics that were measured once, and are shown nowhere else, as a table."""
    shown, elsewhere = {one.metric for one in evaluated}, (FITNESS, "time/", "compute/")
    rows = [
        [name, plain_number(values[0]), DEFINITIONS[name].unit if name in DEFINITIONS else ""]
        for name, (_, values) in run.curves.items()
        if len(values) == 1 and name not in shown and not name.startswith(elsewhere)
    ]
    return [Table(title="Numbers", columns=["metric", "value", "unit"], rows=rows)] if rows else []


def totals(run: measured.RunFiles) -> list[tuple[str, str]]:
    """Return the totals of compute of a run, with their units."""
    names = [name for name in run.curves if name.startswith("compute/") and name in DEFINITIONS]
    found = [(name, amount(run.curves[name][1][-1], DEFINITIONS[name].unit)) for name in names]
    if run.manifest is not None and "time/stage_s" in run.manifest.metrics:
        found.append(("the whole stage", run_page.duration(run.manifest.metrics["time/stage_s"])))
    return found


def plain_number(value: float) -> str:
    """Return a number with three digits; a whole one with all."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:z.3g}"


def amount(value: float, unit: str) -> str:
    """Return an amount of compute: "139,600 tokens", "2.15 TFLOP", "805.90 MB" or "4.5 min"."""
    if unit == "s":
        return run_page.duration(value)
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    return EngFormatter("B" if unit == "bytes" else unit, places=2)(value)


def evaluations(run: measured.RunFiles) -> list[run_page.Evaluated]:
    """Return the metrics in `final/`, else of the last evaluation, with gains and intervals."""
    ends = {name: values for name, (_, values) in run.curves.items() if name.startswith("eval/")}
    metrics = {name: values[-1] for name, values in ends.items()}
    metrics |= {f"start/{name}": values[0] for name, values in ends.items() if len(values) > 1}
    metrics |= {} if run.manifest is None else dict(run.manifest.metrics)
    with measured.damage_named(run.folder / files.SAMPLES):
        found = measured.with_intervals(metrics, run.folder)
    names = [name for name in (*BEFORE_AFTER, *found) if name in found]
    return [found[name] for name in dict.fromkeys(names) if name.startswith("eval/")]


def reward_verdicts(run: measured.RunFiles) -> list[run_page.Verdict]:
    """Return verdicts of fitness reports: on the run's own reward model, or on its reward."""
    final = run.folder / FINAL
    with measured.damage_named(final / fitness_page.NUMBERS):
        own = fitness_page.read_judgement(final)
    found: dict[str, Judgement] = {} if own is None else {run.stage: own}
    if run.manifest is not None:
        found |= run.manifest.verdicts
    elif run.definition is not None:
        with measured.damage_named(final / run.definition.numbers) as path:
            stored = (measured.optional_json(path) or {}).get("verdicts", {})
            found |= {name: Judgement(**fields) for name, fields in stored.items()}
    _, count = run.curves.get(f"{FITNESS}pairs", ((), (0,)))
    is_measured = count[-1] >= fitness_page.MIN_COUNT and measured.LOWEST in run.curves
    flat, verdicts = flatten(run.tree), []
    for name, judged in found.items():
        level: run_page.Level = "good" if is_measured else "unknown"
        if judged.is_unfit or judged.reasons:
            level = "bad" if judged.is_unfit else "doubtful"
        if flat.get(f"reward.components.{name}.weight", flat.get("reward.weight")) == 0:
            level = "unknown"
        of = "" if name == run.stage else f"reward {name}: "
        verdicts.append(run_page.Verdict(level, f"{of}{judged.words}"))
    return verdicts


def policies_evaluated(final: Path) -> tuple[list[run_page.Evaluated], list[Table]]:
    """Return the reward of the first policy, with its gain over the SFT model, and its KL; tables.

    They are those of evaluation.json in `final/`; none without the file.
    """
    with measured.damage_named(final / comparison.NUMBERS) as path:
        if (found := measured.optional_json(path)) is None:
            return [], []
        tables = [table for table in comparison.evaluation_tables(found).values() if table.rows]
        metrics: dict[str, float] = found["metrics"]
        value, gain = metrics[HELD_OUT], metrics["eval/reward_gain"]
        low, high = (metrics.get(f"eval/reward_gain_{end}") for end in ("low", "high"))
        ends = None if low is None or high is None else (low, high)
        evaluated = [run_page.Evaluated(HELD_OUT, value, None, value - gain, gain, ends)]
        if HELD_OUT_KL in metrics:
            evaluated.append(run_page.Evaluated(HELD_OUT_KL, metrics[HELD_OUT_KL]))
        return evaluated, tables


def pairs(folder: Path) -> list[Pair]:
    """Return two responses beside each other to each of some held-out prompts.

    They are those of the first evaluation and of the one in `final/`; of an evaluation of policies
    the greedy ones of the SFT model and of the first policy; after SFT and DPO those of the data,
    and samples of the trained model; of a reward model the chosen and the rejected response. [] for
    a run without such files.
    """
    found = measured.evaluation_files(folder)
    if found is not None and found[0] != found[1]:
        samples = paired_samples(*found, PAIRS)
        return [pair_of(a["prompt"], ("before", a), ("after", b)) for a, b in samples]
    final, shown = folder / FINAL, folder / files.SAMPLES / files.HELD_OUT
    path = final / comparison.SAMPLES
    if (final / comparison.NUMBERS).is_file() and path.is_file():
        with measured.damage_named(path):
            rows = [row for _, row in storage.json_lines(path) if row["decoding"] == "greedy"][
                :PAIRS
            ]
            return [pair_of(row["prompt"], *list(row["responses"].items())[:2]) for row in rows]
    known = format_check.read_pairs(final) if not shown.is_file() else []
    if known:
        return [{"prompt": str(one.row["prompt"]), "before": one.chosen, "after": one.rejected,
                 "before_numbers": f"chosen: score {one.chosen_score:+z.2f}",
                 "after_numbers": f"rejected: score {one.rejected_score:+z.2f}"}
                for one in known[:PAIRS]]  # fmt: skip
    kinds = {"before_numbers": "in the data", "after_numbers": "trained model"}
    with measured.damage_named(shown):
        rows = [row for _, row in storage.json_lines(shown)] if shown.is_file() else []
        names = {"prompt": "prompt", "before": "demonstration", "after": "response"}
        return [{key: row[name] for key, name in names.items()} | kinds for row in rows]


def pair_of(
    prompt: str, before: tuple[str, Mapping[str, Any]], after: tuple[str, Mapping[str, Any]]
) -> Pair:
    """Return two samples of a prompt beside each other, with their names and scores."""
    found = {"prompt": prompt}
    for side, (name, sample) in {"before": before, "after": after}.items():
        found |= {side: sample["response"], f"{side}_numbers": f"{name}: {score_text(sample)}"}
    return found


def token_samples(path: Path) -> list[dict[str, Any]]:
    """Return the training samples of the last iteration that has any, for `token_part`.

    Samples without numbers of their tokens are left out.
    """
    samples = [sample for _, sample in storage.json_lines(path)] if path.is_file() else []
    found = []
    with measured.damage_named(path):
        for sample in samples:
            if sample["iteration"] != samples[-1]["iteration"] or "per_token" not in sample:
                continue
            numbers = {key: of[:MOST_TOKENS] for key, of in sample["per_token"].items()}
            text = list(map(str, numbers["text"]))
            kl, advantage = ([float(x) for x in numbers[key]] for key in ("kl", "advantage"))
            cells = (map(repr, text), map(with_sign, advantage), (f"{x:+z.4f}" for x in kl))
            heading = f"iteration {sample['iteration']}: score {sample['score']:+z.2f}, KL "
            heading += f"{sample['kl']:+z.2f} nats, {'ended' if sample['ended'] else 'cut off'}"
            found.append({
                "heading": heading, "prompt": str(sample["prompt"]), "text": text,
                "advantage": advantage, "kl": kl, "rows": list(zip(*cells, strict=True)),
                "names": ("token", "advantage", "KL, nats"),
            })  # fmt: skip
    return found
