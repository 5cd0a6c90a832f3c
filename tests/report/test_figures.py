"""Panels, and values far outside: the axis shows the others, the edge says where they are."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_rlhf.core.metrics import FAN, GOLD, METRICS, check_names
from lightning_rlhf.report.curves import panel_for_each, ppo_panels
from lightning_rlhf.report.estimates import inner_range
from lightning_rlhf.report.figures import draw, draw_fitness, draw_plots, view
from lightning_rlhf.runs.stage import STAGES, Stage, find_stage

from .pairs import measure, scored

TRAINED = [stage for stage in map(find_stage, STAGES) if stage is not None and stage.trains]


@pytest.mark.parametrize("stage", TRAINED, ids=lambda stage: stage.name)
def test_panels_show_metrics_of_their_stage(stage: Stage) -> None:
    for judged in ([], ["eval/judge/gold"]):
        assert stage.panels is not None
        shown = [metric for panel in stage.panels(judged) for metric in panel.metrics]
        check_names(shown)
        assert all(stage.name in METRICS[metric].stages for metric in shown if metric in METRICS)


def test_the_quantiles_of_the_score_are_a_median_on_two_bands() -> None:
    (panel,) = ppo_panels(FAN)[9:]
    assert len(ppo_panels([GOLD, "eval/judge/correct"])) == 9  # in place of the size of a step
    assert ppo_panels([GOLD])[-1].title == "Judge, on held-out prompts: gold"
    assert panel.metrics == set(FAN)
    axes = Figure().add_subplot()
    curves = {name: ([1, 2], [float(i), float(i + 1)]) for i, name in enumerate(FAN)}
    draw(axes, panel.measured(curves, "iteration"))
    areas = [area.get_paths()[0].vertices for area in axes.collections]
    # p05 to p95: 0 and 4 in the first iteration, 1 and 5 in the second; p25 to p75: 1, 3; 2, 4.
    assert {tuple(point) for point in areas[0]} == {(1, 0), (1, 4), (2, 1), (2, 5)}
    assert {tuple(point) for point in areas[1]} == {(1, 1), (1, 3), (2, 2), (2, 4)}
    assert list(axes.lines[0].get_ydata()) == [2.0, 3.0]
    assert len(ppo_panels(FAN[:-1])) == 9


def test_components_have_a_panel_where_there_are_several() -> None:
    names = ["liked", "short"]
    measured = [f"{where}/reward/{name}" for name in names for where in ("rollout", "eval")]
    (panel,) = ppo_panels(measured)[9:]
    assert panel.metrics == set(measured)
    assert [one.label for one in panel.series] == [*names, "", ""]
    assert len(ppo_panels(measured[:2])) == 9  # one component is the whole
    colors = [one.color for one in panel.series]
    assert colors[:2] == colors[2:]
    assert colors[0] != colors[1]


def test_metrics_of_a_stage_without_panels_have_one_each() -> None:
    """Training and validation share one, and times have none."""
    names = ["update/dpo_loss", "eval/dpo_loss", "time/step_s", "margin"]
    assert [panel.title for panel in panel_for_each(names)] == ["dpo_loss", "margin"]


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
    lines = [line for line in axes.lines if str(line.get_marker()) in "<>^v"]
    points = [(str(line.get_marker()), at) for line in lines for at in np.array(line.get_xydata())]
    return [(marker, float(x), float(y)) for marker, (x, y) in points]


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


def test_a_spike_of_a_curve_is_marked_at_the_edge(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    losses = [float(k % 5) for k in range(40)]
    losses[20:22] = [1e6, float("inf")]
    plots = [p.measured({"ppo_loss": (range(40), losses)}, "iteration") for p in ppo_panels([])]
    draw_plots(tmp_path / "curves.png", JOB, plots)
    (axes,) = [a for a in drawn["curves.png"].axes if a.get_title(loc="left")[:4] == "Loss"]
    assert axes.get_ylim() == pytest.approx((-0.2, 4.2))  # 0 to 4, and 5% of it
    marks = sorted(triangles(axes))
    assert [(marker, x) for marker, x, _ in marks] == [("^", 20.0), ("^", 21.0)]
    assert [y for *_, y in marks] == pytest.approx([4.2, 4.2])
    assert [text.get_text() for text in axes.texts] == ["inf"]


def test_a_picture_is_headed_by_the_runs_name_as_it_is(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    """Broken over lines where it is long; $ is no mathematics."""
    name = "default/tiny/$a^b$+" + "ppo.kl_coef-0.1+" * 6 + "seed-1/rm"
    draw_fitness(
        tmp_path / "rewards.png", name, measure(scored((1.0, 0.0, 3, 3), (0.0, 1.0, 4, 2)))
    )
    figure = drawn["rewards.png"]
    assert "".join(figure.get_suptitle().split()) == name
    assert max(map(len, figure.get_suptitle().splitlines())) <= 10 * figure.get_figwidth()
    figure.draw_without_rendering()
