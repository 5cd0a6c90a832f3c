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
    from bandit import Step

PANELS = {
    "expected_reward": "Expected reward",
    "kl": "KL to the initial policy, nats",
    "update_size": "KL of one update, nats",
}


def draw(steps: Sequence[Step], kl_coef: float, optimal_kl: float, path: Path) -> None:
    """Plot one line per run: colour by clip range, solid with the KL penalty, dotted without it.

    optimal_kl: KL of policy* to the reference, nats.
    """
    colours = dict(zip(sorted({s.clip_range for s in steps}), (BLUE, ORANGE, GREEN), strict=True))
    with mpl.rc_context(STYLE | {"lines.linewidth": 1.3}):
        figure = Figure(figsize=(12.8, 4.2), layout="constrained")
        plots = figure.subplots(1, len(PANELS))
        for axes, (name, title) in zip(plots, PANELS.items(), strict=True):
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlabel("iteration")
            for clip, coef in ((clip, coef) for clip in colours for coef in (0.0, kl_coef)):
                run = [s for s in steps if (s.clip_range, s.kl_coef) == (clip, coef)]
                x, y = [s.iteration for s in run], [getattr(s, name) for s in run]
                label, style = f"clip_range {clip:g}, kl_coef {coef:g}", "-" if coef else ":"
                axes.plot(x, y, color=colours[clip], linestyle=style, label=label)
        plots[1].axhline(optimal_kl, color=GREY, linestyle="--", label="policy* in theory")
        plots[2].set_yscale("log")
        place = {"loc": "outside lower center", "ncols": 4, "frameon": False}
        figure.legend(*plots[1].get_legend_handles_labels(), **place)
        figure.savefig(path, dpi=DPI)
