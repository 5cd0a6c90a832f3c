"""The quickstart in one picture: python recipes/quickstart/picture.py FOLDER_OF_PPO FILE."""

import sys
import textwrap
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from lightning_rlhf.core.metrics import GOLD, KL, REWARD
from lightning_rlhf.report import curves, figures
from lightning_rlhf.report.tables import paired_samples
from lightning_rlhf.runs.measured import read_metrics

COLORS = {"": figures.GREY, "SFT  ": curves.ORANGE, "PPO  ": curves.GREEN}


def draw(run: Path, path: Path) -> None:
    """Draw three curves of a run of PPO beside three held-out prompts and their responses."""
    measured = read_metrics(run)
    panels = [one for one in curves.ppo_panels(measured) if one.metrics & {REWARD, KL, GOLD}]
    files = sorted((run / "samples").glob("eval_*.jsonl"))
    if len(files) < 2:
        raise SystemExit(f"{run} has {len(files)} evaluations with samples; two are needed")
    first, *_, last = files
    pairs = paired_samples(first, last, len(panels))
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(12.8, 7.2), layout="constrained")
        rows = figure.subplots(len(panels), 2, width_ratios=(1, 1.2))
        for (axes, texts), panel, (before, after) in zip(rows, panels, pairs, strict=True):
            axes.set_title(panel.title, loc="left")
            axes.legend(handles=figures.draw(axes, panel.measured(measured, "iteration")))
            texts.axis("off")
            shown = (before["prompt"], before["response"], after["response"])
            for line, ((name, color), text) in enumerate(zip(COLORS.items(), shown, strict=True)):
                at = 0, 0.9 - 0.3 * line, textwrap.fill(name + text, 56)
                texts.text(*at, color=color, size=14, va="top")
        figure.savefig(path, dpi=100)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
