"""One value far outside: the axis shows the others, and the edge says where it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_rlhf.report.curves import RM_PANELS, ppo_panels
from lightning_rlhf.report.estimates import inner_range
from lightning_rlhf.report.figures import draw_curves, draw_fitness, view

from .pairs import measure, pair, scored

JOB = "default/tiny/ppo.kl_coef-0.1+seed-1/ppo"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """File -> the figure that was saved there."""
    figures: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path, **_: object) -> None:
        figures["curves.png" if path.suffix == ".tmp" else path.name] = figure

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def triangles(axes: Axes) -> list[tuple[str, float, float]]:
    """Marker, x and y of every point at an edge."""
    lines = [line for line in axes.lines if line.get_marker() in ("<", ">", "^", "v")]
    return [
        (str(line.get_marker()), float(x), float(y))
        for line in lines for x, y in np.asarray(line.get_xydata())
    ]  # fmt: skip


def written(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_what_lies_far_outside_by_hand() -> None:
    # Of 0 to 9 and one more the middle are 1 to 9: span 8, so that 9 + 24 = 33 is the last inside.
    values = np.arange(10.0)
    assert inner_range(np.append(values, 33.0)) is None
    assert inner_range(np.append(values, 33.1)) == (0, 9)
    # ... and with a low one 0 to 8: span 8, the first inside is 0 - 24.
    assert inner_range(np.append(values, -24.1)) == (0, 9)
    assert inner_range(np.append(values, [np.nan, np.inf])) is None
    assert inner_range(np.array([0.0] * 6 + [1e9])) is None  # fewer than eight
    assert inner_range(np.array([0.0] * 60 + [1e9])) is None  # no span to compare with
    assert inner_range(np.append(np.arange(100.0), [1e6, -1e6, 2e6])) == (0, 99)


def test_limits_have_a_margin_and_a_logarithmic_axis_is_measured_in_its_own_scale() -> None:
    values = [*np.arange(11.0).tolist(), 1e6]
    assert view(values) == (-0.5, 10.5)  # 5% of 10 on either side
    # Exponents 0 to 10 and 100; linearly 1e10 would be far outside, and -1 is on no such axis.
    powers = [10.0**k for k in range(11)]
    assert view([*powers, -1.0], is_log=True) is None
    assert view([*powers, 1e100, -1.0], is_log=True) == pytest.approx((10**-0.5, 10**10.5))


@pytest.mark.parametrize(("value", "text"), [(1e6, "1e+06"), (float("inf"), "inf")])
def test_a_spike_of_a_curve_is_marked_at_the_edge(
    value: float, text: str, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    losses = [float(k % 5) for k in range(40)]
    losses[20:22] = [1e6, value]
    draw_curves(tmp_path, {"ppo_loss": (range(40), losses)}, JOB, "iteration", ppo_panels)
    (axes,) = [a for a in drawn["curves.png"].axes if a.get_title(loc="left")[:4] == "Loss"]
    assert axes.get_ylim() == pytest.approx((-0.2, 4.2))  # 0 to 4, and 5% of it
    marks = sorted(triangles(axes))
    assert [(marker, x) for marker, x, _ in marks] == [("^", 20.0), ("^", 21.0)]
    assert [y for *_, y in marks] == pytest.approx([4.2, 4.2])
    assert written(axes) == [text]


def test_a_level_to_compare_with_stays_in_view(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    values = [*(0.9 + step % 2 / 100 for step in range(40)), -5.0]
    curves = {"update/accuracy": (range(41), values)}
    draw_curves(tmp_path, curves, JOB, "optimizer step", lambda _: RM_PANELS)
    (axes,) = [a for a in drawn["curves.png"].axes if a.get_title(loc="left") == "Accuracy"]
    low, high = axes.get_ylim()
    assert low == 0.5  # that of guessing
    assert high < 1
    assert written(axes) == ["-5"]


def test_scores_far_outside_squash_neither_histogram_nor_scatter(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    pairs = scored(*[(float(k % 11), float(k % 7), 10 + k % 5, 20) for k in range(60)])
    pairs += [pair(prompt="far", chosen_score=1000.0, rejected_score=3.0, rejected_tokens=5000)]
    samples = [(-800.0, 12), *[(5.0, 12)] * 9]
    fitness = measure(pairs, samples)
    assert fitness.edges[0] == 0
    assert fitness.edges[-1] == 10
    assert sum(fitness.chosen["histogram"]) == 60  # and 1,000 in no bin
    draw_fitness(tmp_path, JOB, fitness)

    (histogram,) = drawn["rewards.png"].axes
    assert histogram.get_xlim() == pytest.approx((-0.5, 10.5))
    assert sorted(mark[:2] for mark in triangles(histogram)) == [("<", -0.5), (">", 10.5)]
    assert sorted(written(histogram)) == ["-800", "1000"]

    (scatter,) = drawn["length.png"].axes
    assert scatter.get_ylim() == pytest.approx((-0.5, 10.5))
    assert scatter.get_xlim() == pytest.approx((4 - 0.8, 20 + 0.8))  # 4 tokens to 20
    assert sorted(mark[0] for mark in triangles(scatter)) == [">", "^", "v"]
    assert sorted(written(scatter)) == ["-800", "1000", "5000"]


def test_every_picture_is_headed_by_the_runs_name_as_it_is(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    """Broken over lines where it is long; $ is no mathematics."""
    name = "default/tiny/$a^b$+" + "ppo.kl_coef-0.1+" * 6 + "seed-1/rm"
    title = f"Supervised fine-tuning: {name}"
    draw_curves(tmp_path, {"update/loss": ([1], [0.5])}, title, "optimizer step")
    draw_fitness(tmp_path, name, measure(scored((1.0, 0.0, 3, 3), (0.0, 1.0, 4, 2))))
    assert sorted(drawn) == [
        "curves.png", "length.png", "rewards.png"
    ]  # fmt: skip
    for file, figure in drawn.items():
        heading = "Supervised fine-tuning: " * (file == "curves.png") + name
        assert "".join(figure.get_suptitle().split()) == "".join(heading.split())
        assert max(map(len, figure.get_suptitle().splitlines())) <= 10 * figure.get_figwidth()
        figure.draw_without_rendering()
