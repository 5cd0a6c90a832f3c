from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightning_rlhf.core.metrics import FAN, GOLD, METRICS, check_names
from lightning_rlhf.report.curves import panel_for_each, plots_of, ppo_panels
from lightning_rlhf.report.figures import draw, draw_curves, read_curves
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
    (plot,) = plots_of([panel], curves, "iteration")
    draw(axes, plot)
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
    assert [label for _, label, _ in panel.lines] == [*names, "", ""]
    assert len(ppo_panels(measured[:2])) == 9  # one component is the whole
    colors = [color for *_, color in panel.lines]
    assert colors[:2] == colors[2:]
    assert colors[0] != colors[1]
    cells = ["1", *["0.5"] * 4]
    (tmp_path / "metrics.csv").write_text(f"{','.join(['step', *measured])}\n{','.join(cells)}\n")
    rows = imread(draw_curves(tmp_path, "PPO", "iteration", ppo_panels)).shape[0] / 150 / 3.4
    assert 4 < rows < 4.5  # ten panels in rows of three


@pytest.mark.parametrize("stage", TRAINED, ids=lambda stage: stage.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_run_of_any_length_has_a_legible_figure(stage: Stage, rows: int, tmp_path: Path) -> None:
    assert stage.panels is not None
    names = [metric for panel in stage.panels([]) for metric in panel.metrics]
    lines = [",".join(["step", *names])]
    lines += [",".join([str(k), *(["0.5"] * len(names))]) for k in range(rows)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    path = draw_curves(tmp_path, stage.title, stage.unit, stage.panels)
    assert path == tmp_path / "curves.png"
    assert imread(path).shape[1] >= 1600


def test_a_curve_has_the_steps_at_which_it_was_measured(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,reward_mean,eval/kl\n1,0.5,\n2,nan,3.0\n")
    curves = read_curves(tmp_path / "metrics.csv")
    assert curves["eval/kl"] == ([2], [3.0])
    assert curves["reward_mean"][0] == [1, 2]


def test_metrics_of_a_stage_without_panels_have_one_each(tmp_path: Path) -> None:
    """Training and validation share one, and times have none."""
    names = ["update/dpo_loss", "eval/dpo_loss", "time/step_s", "margin"]
    (tmp_path / "metrics.csv").write_text(f"step,{','.join(names)}\n1,0.7,0.6,9,2\n")
    found = panel_for_each(read_curves(tmp_path / "metrics.csv"))
    assert [panel.title for panel in found] == ["dpo_loss", "margin"]
    assert draw_curves(tmp_path, "Mine", "optimizer step").is_file()
