import re

import pytest
from wandb_workspaces.reports.v2 import LinePlot, WeavePanelSummaryTable

from lightning_rlhf.cli.commands import SECTIONS, SWEPT, build_workspace, dashboard
from lightning_rlhf.core.metrics import HEADLINES, METRICS

WORKSPACE = build_workspace("team", "project", "name", SWEPT)
PANELS = {section.name: section.panels for section in WORKSPACE.sections}


def metrics_of(panel: object) -> list[str]:
    """Return the rows of METRICS that a line plot shows."""
    assert isinstance(panel, LinePlot)
    assert panel.x == "iteration"
    if panel.metric_regex:
        return [name for name in METRICS if "<" in name and re.match(panel.metric_regex, name)]
    return list(panel.y)


def test_the_headline_is_open_and_has_a_panel_for_each_headline_metric() -> None:
    first = WORKSPACE.sections[0]
    assert first.is_open
    assert [metrics_of(panel) for panel in first.panels] == [[name] for name in HEADLINES]
    assert tuple(HEADLINES) == ("reward_mean", "kl_divergence", "entropy", "ppo_loss")


def test_every_metric_has_one_panel_in_the_sections_of_each_of_its_stages() -> None:
    shown = {
        stage: sorted(
            name
            for title, (its_stage, _) in SECTIONS.items()
            if its_stage == stage
            for panel in PANELS[title]
            for name in metrics_of(panel)
        )
        for stage in sorted({stage for metric in METRICS.values() for stage in metric.stages})
    }
    for stage, names in shown.items():
        expected = {n for n, m in METRICS.items() if stage in m.stages} - set(HEADLINES)
        assert names == sorted(expected)


def test_a_dry_run_prints_the_panels(capsys: pytest.CaptureFixture[str]) -> None:
    dashboard(["team/project", "--dry-run"])
    assert isinstance(PANELS["Samples"][0], WeavePanelSummaryTable)
    assert PANELS["Samples"][0].table_name == "samples"  # the key in test_loggers.py
    printed = capsys.readouterr().out
    assert printed.startswith("team/project: lightning-rlhf")
    assert all(title in printed for title in (*PANELS, "kl_divergence", "runs of a sweep"))
