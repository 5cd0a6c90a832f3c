"""bandit.png: expected reward, KL and update size over the iterations, for each clip range."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from lightning_rlhf.report.curves import BLUE, GREEN, ORANGE
from lightning_rlhf.report.figures import DPI, GREY, STYLE

if TYPE_CHECKING:
    from step import Step

PANELS = {
    "expected_reward": "Expected reward",
    "kl": "KL to the initial policy, nats",
    "update_size": "KL of one update, nats",
}


def draw(steps: Sequence[Step], *, kl_coef: float, optimal_kl: float, path: Path) -> None:
    """Plot one line per run: colour by clip range, solid with the KL penalty, dotted without it.

    optimal_kl: KL of policy* to the reference, nats.
    """
    colours = dict(zip(sorted({s.clip_range for s in steps}), (BLUE, ORANGE, GREEN), strict=True))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.8, 4.2), layout="constrained")
        plots = figure.subplots(1, len(PANELS))
        for axes, (name, title) in zip(plots, PANELS.items(), strict=True):
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlabel("iteration")
            for (clip_range, colour), coef in (
                (c, k) for c in colours.items() for k in (0.0, kl_coef)
            ):
                run = [s for s in steps if (s.clip_range, s.kl_coef) == (clip_range, coef)]
                axes.plot(
                    [s.iteration for s in run],
                    [getattr(s, name) for s in run],
                    color=colour,
                    linestyle="-" if coef else ":",
                    linewidth=1.3,
                    label=f"clip_range {clip_range:g}, kl_coef {coef:g}",
                )
        plots[1].axhline(
            optimal_kl, color=GREY, linestyle="--", linewidth=1, label="policy* in theory"
        )
        plots[2].set_yscale("log")
        handles, labels = plots[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=DPI)
