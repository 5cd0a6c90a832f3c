from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightning_rlhf.core.metrics import FAN, GOLD, METRICS, check_names
from lightning_rlhf.report.curves import panel_for_each, ppo_panels
from lightning_rlhf.report.figures import draw, draw_curves
from lightning_rlhf.runs.stage import STAGES, Stage, find_stage

TRAINED = [stage for stage in map(find_stage, STAGES) if stage is not None and stage.trains]


@pytest.mark.parametrize("stage", TRAINED, ids=lambda stage: stage.name)
def test_panels_show_metrics_of_their_stage(stage: Stage) -> None:
    for judged in ([], ["eval/judge/gold"]):
        assert stage.panels is not None
        shown = [metric for panel in stage.panels(judged) for metric in panel.metrics]
        check_names(shown)
        assert all(stage.name in METRICS[metric].stages for metric in shown if metric in METRICS)


def test_the_judge_has_panels_where_there_was_a_judge() -> None:
    assert len(ppo_panels([])) == len(ppo_panels([GOLD, "eval/judge/correct"])) == 9
    assert ppo_panels([GOLD])[-1].title == "Judge, on held-out prompts: gold"
    assert "Judge" not in ppo_panels(["reward_mean"])[-1].title


def test_the_quantiles_of_the_score_are_a_median_on_two_bands() -> None:
    (panel,) = ppo_panels(FAN)[9:]
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


def test_components_have_a_panel_where_there_are_several(tmp_path: Path) -> None:
    names = ["liked", "short"]
    measured = [f"{where}/reward/{name}" for name in names for where in ("rollout", "eval")]
    (panel,) = ppo_panels(measured)[9:]
    assert panel.metrics == set(measured)
    assert [one.label for one in panel.series] == [*names, "", ""]
    assert len(ppo_panels(measured[:2])) == 9  # one component is the whole
    colors = [one.color for one in panel.series]
    assert colors[:2] == colors[2:]
    assert colors[0] != colors[1]
    curves = {name: ([1], [0.5]) for name in measured}
    path = draw_curves(tmp_path, curves, "PPO", "iteration", ppo_panels)
    rows = imread(path).shape[0] / 150 / 3.4
    assert 4 < rows < 4.5  # ten panels in rows of three


def test_metrics_of_a_stage_without_panels_have_one_each(tmp_path: Path) -> None:
    """Training and validation share one, and times have none."""
    names = ["update/dpo_loss", "eval/dpo_loss", "time/step_s", "margin"]
    assert [panel.title for panel in panel_for_each(names)] == ["dpo_loss", "margin"]
    curves = {name: ([1], [0.7]) for name in names}
    assert draw_curves(tmp_path, curves, "Mine", "optimizer step").is_file()
