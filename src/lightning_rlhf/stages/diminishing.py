"""The point of diminishing returns of a run: files in its folder, one line on the console."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter

from lightning_rlhf.callbacks.evaluation import SAMPLES
from lightning_rlhf.callbacks.loggers import read_rows
from lightning_rlhf.core.errors import CheckpointError, counted
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import json_lines, read_text, written_whole
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.report.curves import BLUE, ORANGE
from lightning_rlhf.report.diminishing import (
    FEWEST_POINTS,
    FLOPS,
    GOLD,
    NAMES,
    REWARD,
    Diminishing,
    GoldStop,
    find_gold_stop,
    measure,
)
from lightning_rlhf.report.figures import DPI, GREY, LEGEND, ROW_IN, STYLE, WIDTH_IN, head
from lightning_rlhf.stages.folder.changes import read_config
from lightning_rlhf.stages.folder.folders import CONFIG, METRICS, check_kinds
from lightning_rlhf.stages.measured import by_prompt, damage_named

NUMBERS, PICTURE = "diminishing.json", "diminishing.png"
ALLOWED = "allowed: a run of stage=ppo, as outputs/<run>/<model>/ppo"
"""Folders that have a point of diminishing returns, for errors."""


def print_diminishing(folder: Path, title: str) -> bool:
    """Write diminishing.json and diminishing.png into a run's folder, and print the conclusion.

    Return False, with nothing written or printed, where the run has fewer than FEWEST_POINTS
    iterations.

    title: name of the run.
    Raises CheckpointError where the folder or its metrics.csv is damaged.
    """
    check_kinds(folder)
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in read_rows(folder / METRICS).items():
        for name, cell in row.items():
            steps, values = curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(cell))
    if REWARD not in curves or len(curves[REWARD][0]) < FEWEST_POINTS:
        return False
    found = measure(curves, paired_stop(folder))
    with written_whole(folder / NUMBERS) as beside:
        text = json.dumps(found.as_json(), indent=1, allow_nan=False)
        beside.write_text(text + "\n", encoding="utf-8")
    with written_whole(folder / PICTURE) as beside, mpl.rc_context(STYLE):
        draw(found, title).savefig(beside, dpi=DPI, format="png")
    print_line(f"diminishing returns: {found.sentence} ({folder / PICTURE})")
    return True


def draw(found: Diminishing, title: str) -> Figure:
    """Return the figure: reward, and gold where there is one, against compute, with their fits."""
    figure = Figure(figsize=(WIDTH_IN, ROW_IN + 1.4), layout=ConstrainedLayoutEngine())
    head(figure, f"{title}. {found.sentence[:1].upper()}{found.sentence[1:]}")
    axes = figure.subplots()
    axes.set_ylabel("score")
    axes.set_xlabel("iterations of training")
    if found.reward.unit == FLOPS:
        axes.set_xlabel("floating-point operations")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for curve, color in ((found.reward, BLUE), (found.gold, ORANGE)):
        if curve is None:
            continue
        name = NAMES[curve.metric]
        axes.plot(curve.x, curve.y, "o", color=color, markersize=4, alpha=0.45, label=name)
        if curve.fit is None:
            continue
        shares, span = np.linspace(0.0, 1.0, 400), curve.x[-1] - curve.x[0]
        axes.plot(curve.x[0] + shares * span, curve.fit.value(shares), color=color,
                  label=f"fit of {name}")  # fmt: skip
        if curve is found.decisive:
            low, high = (curve.x[0] + min(end, 1.0) * span for end in curve.fit.interval)
            label = f"knee of {name}: iteration {curve.knee}"
            axes.axvspan(low, high, color=GREY, alpha=0.15, linewidth=0, label=label)
            if (at := curve.at(curve.fit.knee)) is not None:
                axes.axvline(at, color=GREY, linewidth=1, linestyle="--")
    if (stop := found.gold_stop) is not None and found.gold is not None:
        at = found.gold.after == stop.step
        axes.plot(found.gold.x[at], found.gold.y[at], "o", color=GREY, markersize=9,
                  fillstyle="none", label=f"stop: iteration {stop.step}")  # fmt: skip
    axes.legend(ncols=6, handlelength=1.4, **LEGEND)
    return figure


def paired_stop(folder: Path) -> GoldStop | None:
    """Return where to stop by the gold scores of the evaluations; None where they are not known.

    Evaluations of other prompts than those of the last one are left out.
    Raises CheckpointError where a file of samples is damaged.
    """
    gold: dict[int, np.ndarray] = {}
    reward: dict[int, np.ndarray] = {}
    prompts: list[int] | None = None
    for path in sorted((folder / SAMPLES).glob("eval_*.jsonl"), reverse=True):
        samples = [sample for _, sample in json_lines(path)]
        with damage_named(path):
            found = [sample["index"] for sample in samples]
            prompts = prompts or found
            if found == prompts:
                step = int(path.stem.removeprefix("eval_"))
                gold[step], reward[step] = (by_prompt(samples, name) for name in (GOLD, HELD_OUT))
    return find_gold_stop(gold, reward)


def repeat_conclusion(folder: Path) -> None:
    """Print the conclusion that a run left in diminishing.json, if it left one.

    Raises CheckpointError where the file is damaged.
    """
    if (file := folder / NUMBERS).is_file():
        try:
            sentence = json.loads(read_text(file))["sentence"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{file} is damaged: it holds no sentence. `lightning-rlhf diminishing {folder}` "
                "writes it again"
            ) from error
        print_line(f"diminishing returns: {sentence} ({folder / PICTURE})")


def again(folder: Path) -> None:
    """Do the same for a finished run. Raises CheckpointError where it has too few iterations."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist{nearest_path(str(folder))}; {ALLOWED}")
    if print_diminishing(folder, "/".join(folder.resolve().parts[-4:])):
        return
    count = sum(REWARD in row for row in read_rows(folder / METRICS).values())
    if not count and (folder / CONFIG).is_file():
        stage = read_config(folder / CONFIG, ALLOWED).get("stage")
        raise CheckpointError(f"{folder} is a run of stage={stage}; {ALLOWED}")
    raise CheckpointError(
        f"{folder / METRICS} has {counted(count, 'iteration')} of stage=ppo; allowed: at least "
        f"{FEWEST_POINTS}"
    )
