from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from lightning_rlhf.callbacks.names import METRICS, check_names
from lightning_rlhf.report.curves import Stage, panels
from lightning_rlhf.report.figures import draw_curves, read_curves

STAGES: tuple[Stage, ...] = ("sft", "rm", "ppo")


@pytest.mark.parametrize("stage", STAGES)
def test_panels_show_metrics_of_their_stage(stage: Stage) -> None:
    for judged in ([], ["eval/judge/gold"]):
        shown = [metric for panel in panels(stage, judged) for metric in panel.metrics]
        check_names(shown)
        assert all(stage in METRICS[metric].stages for metric in shown if metric in METRICS)


def test_the_judge_has_a_panel_where_there_was_a_judge() -> None:
    assert len(panels("ppo", [])) == len(panels("ppo", ["eval/judge/gold"])) == 6
    assert "Judge" in panels("ppo", ["eval/judge/gold"])[-1].title
    assert "Judge" not in panels("ppo", ["reward_mean"])[-1].title


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_run_of_any_length_has_a_legible_figure(stage: Stage, rows: int, tmp_path: Path) -> None:
    names = [metric for panel in panels(stage, []) for metric in panel.metrics]
    lines = [",".join(["step", *names])]
    lines += [",".join([str(k), *(["0.5"] * len(names))]) for k in range(rows)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    path = draw_curves(tmp_path, stage)
    assert path == tmp_path / "curves.png"
    assert imread(path).shape[1] >= 1600


def test_a_curve_has_the_steps_at_which_it_was_measured(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,reward_mean,eval/kl\n1,0.5,\n2,nan,3.0\n")
    curves = read_curves(tmp_path / "metrics.csv")
    assert curves["eval/kl"] == ([2], [3.0])
    assert curves["reward_mean"][0] == [1, 2]
