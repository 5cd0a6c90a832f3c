"""Curves that are plotted for each stage: panels with axes, axes with lines."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.metrics import EVAL_PART, PART

# Palette of Okabe and Ito, distinguishable with all common kinds of colour blindness.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9", "#F0E442")

SHARE = (0.0, 1.04)
"""Limits of an axis for shares: 0 to 1, with room for a line at 1."""


@dataclass(frozen=True)
class Line:
    """Line of one metric; a sparse one (of evaluations) has a marker at each point."""

    metric: str
    label: str
    """Name in the legend; empty to leave the line out of it."""
    color: str
    sparse: bool = False


@dataclass(frozen=True)
class Band:
    """Area between the lines of two metrics."""

    low: str
    high: str
    label: str
    """Name in the legend."""
    color: str
    opacity: float
    """Opacity of the area, from 0 to 1."""


@dataclass(frozen=True)
class Axis:
    """Axis with lines that share a unit."""

    unit: str
    lines: tuple[Line, ...]
    bands: tuple[Band, ...] = ()
    """Areas behind the lines, each drawn over the ones before it."""
    scale: Literal["linear", "log"] = "linear"
    limits: tuple[float, float] | None = None
    """Limits of the axis; None fits them to the data."""


@dataclass(frozen=True)
class Panel:
    """One plot; `right` is a second axis with a unit of its own."""

    title: str
    left: Axis
    right: Axis | None = None
    reference: tuple[float, str] | None = None
    """Level to compare the lines with, and its name."""

    @property
    def metrics(self) -> Iterable[str]:
        """Return the metrics that the panel shows."""
        for axis in [self.left] if self.right is None else [self.left, self.right]:
            yield from (line.metric for line in axis.lines)
            yield from (metric for band in axis.bands for metric in (band.low, band.high))


def _held_out(
    title: str,
    metric: str,
    unit: str,
    *,
    reference: tuple[float, str] | None = None,
    scale: Literal["linear", "log"] = "linear",
) -> Panel:
    """Return a panel of a metric in training and on validation data."""
    lines = (
        Line(f"update/{metric}", "training", BLUE),
        Line(f"eval/{metric}", "validation", ORANGE, sparse=True),
    )
    return Panel(title, Axis(unit, lines, scale=scale), reference=reference)


def _of_pairs(title: str, metric: str, unit: str) -> Panel:
    """Return a panel of a metric of the chosen and of the rejected responses in training."""
    lines = (
        Line(f"update/{metric}_chosen", "chosen", GREEN),
        Line(f"update/{metric}_rejected", "rejected", PURPLE),
    )
    return Panel(title, Axis(unit, lines))


SFT_PANELS = (
    _held_out("Loss", "loss", "nats a token"),
    _held_out("Perplexity", "perplexity", "tokens", scale="log"),
    Panel("Learning rate", Axis("", (Line("update/lr", "learning rate", BLUE),))),
)

_PAIR_PANELS = (
    _held_out("Accuracy", "accuracy", "share of pairs", reference=(0.5, "guessing")),
    _of_pairs("Rewards in training", "reward", "reward"),
    _held_out(
        "Margin, chosen less rejected", "reward_margin", "reward", reference=(0.0, "no preference")
    ),
)

RM_PANELS = (
    _held_out("Loss", "rm_loss", "nats a pair", reference=(0.6931, "guessing")),
    *_PAIR_PANELS,
)

DPO_PANELS = (
    _held_out("Loss, without the SFT term", "dpo_loss", ""),
    *_PAIR_PANELS,
    _of_pairs("Log-probability under the policy", "logps", "nats a response"),
    _held_out("SFT loss of the chosen responses", "sft_loss", "nats a token"),
)

_PPO_PANELS = (
    Panel(
        "Reward, before the KL penalty",
        Axis(
            "score",
            (
                Line("reward_mean", "training", BLUE),
                Line("eval/reward_mean", "held-out prompts", ORANGE, sparse=True),
            ),
        ),
    ),
    Panel(
        "KL to the reference",
        Axis(
            "nats a response",
            (
                Line("kl_divergence", "training", BLUE),
                Line("eval/kl", "held-out prompts", ORANGE, sparse=True),
            ),
        ),
    ),
    Panel(
        "Policy: entropy and perplexity",
        Axis("nats a token", (Line("entropy", "entropy", BLUE),)),
        Axis(
            "tokens",
            (Line("eval/response_perplexity", "perplexity under SFT (right)", ORANGE, True),),
        ),
    ),
    Panel(
        "Loss (no sign of progress)",
        Axis(
            "",
            (
                Line("ppo_loss", "PPO", BLUE),
                Line("update/policy_loss", "policy", GREEN),
                Line("update/value_loss", "value", PURPLE),
            ),
        ),
    ),
    Panel(
        "Responses",
        Axis("tokens", (Line("rollout/response_tokens", "length", BLUE),)),
        Axis("share", (Line("rollout/ended", "ended (right)", GREEN),), limits=SHARE),
    ),
)

_FAN = Panel(
    "Distribution of the score over the responses of an iteration",
    Axis(
        "score",
        (Line("rollout/score_p50", "median", BLUE),),
        bands=(
            Band("rollout/score_p05", "rollout/score_p95", "5% to 95%", BLUE, 0.15),
            Band("rollout/score_p25", "rollout/score_p75", "25% to 75%", BLUE, 0.25),
        ),
    ),
)

_JUDGE = Panel(
    "Judge, on held-out prompts",
    Axis("score", (Line("eval/judge/gold", "gold", BLUE, sparse=True),)),
    Axis("share", (Line("eval/judge/correct", "correct (right)", GREEN, True),), limits=SHARE),
)

_STEP_SIZE = Panel(
    "Size of an iteration's update",
    Axis("nats a token", (Line("update/approx_kl", "approx. KL", BLUE),)),
    Axis("share of tokens", (Line("update/clip_fraction", "clipped (right)", GREEN),)),
)


def ppo_panels(measured: Collection[str]) -> Sequence[Panel]:
    """Return the panels of PPO: with one for the judge, where there was a judge, one for the
    quantiles of the score, where they are measured, and one for the components of several."""
    judged = set(measured) & set(_JUDGE.metrics)
    fan = [_FAN] if set(_FAN.metrics) <= set(measured) else []
    fixed = (*_PPO_PANELS, _JUDGE if judged else _STEP_SIZE, *fan)
    names = [m.removeprefix(PART) for m in measured if m.startswith(PART)]
    return (*fixed, _components(names)) if len(names) > 1 else fixed


def panel_for_each(measured: Collection[str]) -> Sequence[Panel]:
    """Return one panel for each metric that is not a time; update/x and eval/x share one."""
    names = dict.fromkeys(
        name.removeprefix("update/").removeprefix("eval/")
        for name in measured
        if not name.startswith(("time/", "compute/"))
    )
    return [
        Panel(
            name,
            Axis(
                "",
                (
                    Line(name, "", BLUE),
                    Line(f"update/{name}", "training", BLUE),
                    Line(f"eval/{name}", "validation", ORANGE, sparse=True),
                ),
            ),
        )
        for name in names
    ]


def _components(names: Sequence[str]) -> Panel:
    colors = list(zip(names, itertools.cycle(PALETTE), strict=False))
    lines = [Line(PART + name, name, color) for name, color in colors]
    lines += [Line(EVAL_PART + name, "", color, sparse=True) for name, color in colors]
    title = "Components, unweighted (dots: held-out prompts)"
    return Panel(title, Axis("score", tuple(lines)))
