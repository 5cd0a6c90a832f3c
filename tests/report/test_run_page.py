"""report.html: well-formed, self-contained, and any text is only text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.report.conclusion import Evaluated, Verdict
from lightning_rlhf.report.curves import BLUE, Axis, Line, Panel
from lightning_rlhf.report.plots import (
    MOST_POINTS,
    Mark,
    Plot,
    Series,
    draw,
    place_text,
    thinned,
    tick_text,
)
from lightning_rlhf.report.run_page import (
    PairedSample,
    PromiseRow,
    StageReport,
    TextTable,
    Token,
    TokenSample,
    change,
    clauses,
    write_page,
)
from lightning_rlhf.report.run_plots import FAN, curve_plots, fan_plot, frontier_plots, kl_note

from .pages import Page, check

HOSTILE = (
    "</title></style><script>alert(1)</script>\"'><img src=http://x onerror=y>&amp;\x1b[31m\u202e"
)


def plot(**changes: Any) -> Plot:
    fields: dict[str, Any] = {
        "title": "t", "x_label": "step", "unit": "score",
        "series": [Series(label="a", color=BLUE, points=[(0, 1.0), (10, 3.0)])],
    }  # fmt: skip
    return Plot(**fields | changes)


def attribute(figure: str, kind: str, name: str) -> list[str]:
    page = Page(figure)
    return [str(given[name]) for _, given in page.elements if given.get("class") == kind]


def everywhere(text: str) -> StageReport:
    """A report with the same text in every place that shows one."""
    shown = plot(
        title=text,
        x_label=text,
        unit=text,
        series=[Series(label=text, color=BLUE, points=[(0, 1.0)], dots=True)],
        meaning=text,
        healthy=(0.0, None),
        reference=(2.0, text),
        mark=Mark(x=0, interval=None, label=text),
    )
    return StageReport(
        name=text,
        title=text,
        verdict=Verdict("good", text),
        curves=[shown],
        fan=shown,
        frontiers=[shown],
        frontier_note=text,
        evaluated=[Evaluated(metric=text, value=1.0)],
        tables=[TextTable(title=text, heading=[text], rows=[[text]], note=text)],
        pairs=[
            PairedSample(
                prompt=text, before=text, before_numbers=text, after=text, after_numbers=text
            )
        ],
        samples=[
            TokenSample(
                heading=text, prompt=text, tokens=[Token(text=text, kl=0.1, advantage=-2.0)]
            )
        ],
        findings=[
            {"rule": text, "iteration": text, "symptom": text, "cause": text, "remedy": text}
        ],
        phases=[(text, 1.0)],
        totals=[(text, text)],
        config=[(text, text)],
        data=[(text, text)],
        versions=[(text, text)],
    )


def written(folder: Path, stages: Sequence[StageReport]) -> str:
    promise = PromiseRow(stage="a", metric=HOSTILE, promised="b", measured="c", verdict="broken")
    write_page(folder / "page.html", HOSTILE, stages, [promise])
    return (folder / "page.html").read_text()


def test_hostile_text_stays_text_in_a_page_of_two_stages(tmp_path: Path) -> None:
    html = written(tmp_path, [everywhere(HOSTILE), everywhere(HOSTILE)])
    page = check(html)
    assert page.text.count("<script>alert(1)</script>") > 40
    assert r"\x1b[31m\u202e" in page.text
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_the_verdict_comes_before_everything_else(tmp_path: Path) -> None:
    text = check(written(tmp_path, [everywhere("words")])).text
    places = [
        *("words", "Promises", "Curves", "Distribution", "Frontiers", "Evaluation", "Held-out"),
        *("token by token", "Diagnosis", "Time", "Configuration", "Data", "Versions"),
    ]
    found = [text.index(place) for place in places]
    assert found == sorted(found)


def test_a_report_without_anything_is_a_page(tmp_path: Path) -> None:
    bare = StageReport(name="n", title="t", verdict=Verdict("unknown", "w"), findings=[])
    assert "No rule found a symptom" in check(written(tmp_path, [bare])).text


def test_a_token_shows_its_numbers_on_hover(tmp_path: Path) -> None:
    titles = check(written(tmp_path, [everywhere("w")])).values("title")
    assert "token 'w'\nadvantage -2.000\nKL +0.1000" in titles


def test_a_line_runs_from_corner_to_corner() -> None:
    """x from 0 to 10 fills 54..406; y with a margin of 5% of 2: 0.9..3.1 fills 194..10."""
    (line,) = attribute(str(draw(plot())), "line c0", "d")
    top, bottom = (194 - 184 * (y - 0.9) / 2.2 for y in (3.0, 1.0))
    assert line == f"M54.0 {bottom:.1f}L406.0 {top:.1f}"


def test_the_healthy_band_ends_where_the_axis_ends() -> None:
    """Healthy up to 2, half of 0.9..3.1: from 2 at y = 102 down to the bottom at 194."""
    figure = str(draw(plot(healthy=(None, 2.0))))
    assert attribute(figure, "healthy", "y") == ["102.0"]
    assert attribute(figure, "healthy", "height") == ["92.0"]
    assert attribute(str(draw(plot(healthy=(50.0, None)))), "healthy", "y") == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_left_out(bad: float) -> None:
    points = [(0, 1.0), (5, bad), (10, 3.0)]
    series = [Series(label="a", color=BLUE, points=points, dots=True)]
    figure = str(draw(plot(series=series)))
    assert "nan" not in figure
    assert "inf" not in figure
    assert figure.count("<circle") == 2


def test_nothing_measured_is_said() -> None:
    empty = [Series(label="a", color=BLUE, points=[(0, math.nan)])]
    assert "not measured" in draw(plot(series=empty))


def test_a_long_line_keeps_its_extremes() -> None:
    points = [(float(i), 100.0 if i == 77_777 else float(i % 7)) for i in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert (77_777.0, 100.0) in kept
    assert kept == sorted(kept)


def test_a_banded_metric_without_a_panel_gets_a_plot() -> None:
    curves = {name: ([1, 2], [1.0, 2.0]) for name in ("shown", "banded", "other")}
    healthy = {"banded": ("below 3", (None, 3.0)), "other": ("-", None)}
    panels = [Panel("Shown", Axis("u", (Line("shown", "a", BLUE),)))]
    first, second = curve_plots(curves, lambda _: panels, "step", healthy)
    assert (first.title, first.healthy) == ("Shown", None)
    assert (second.title, second.healthy, second.meaning) == ("banded", (None, 3.0), "below 3")


def test_what_was_measured_once_is_no_curve() -> None:
    curves = {"once": ([3], [1.0]), "twice": ([1, 2], [1.0, 2.0])}
    assert [plot.title for plot in curve_plots(curves, None, "step", {})] == ["twice"]


def test_two_axes_of_a_panel_are_two_plots_with_names() -> None:
    left, right = (
        Axis("u", (Line(m, label, BLUE),)) for m, label in (("a", "x"), ("b", "y (right)"))
    )
    curves = {name: ([1, 2], [1.0, 2.0]) for name in "ab"}
    found = curve_plots(curves, lambda _: [Panel("P: x and y", left, right)], "step", {})
    assert [plot.title for plot in found] == ["P: x", "P: y"]


def test_ticks_are_short_and_inside_the_picture() -> None:
    """1500 at the right end is four digits of 7.2 wide: it is centred 14.4 before the edge."""
    assert [tick_text(x) for x in (0.25, 1500.0, 5e11, 1.5e12)] == ["0.25", "1500", "500G", "1.5T"]
    assert [place_text(x) for x in (12345.0, 4.4171, 2.09249e12)] == ["12345", "4.42", "2.09T"]
    wide = plot(series=[Series(label="a", color=BLUE, points=[(0, 1.0), (1500, 3.0)])])
    assert '<text x="405.6" y="209" text-anchor="middle">1500</text>' in str(draw(wide))


def test_numbers_have_the_digits_that_their_interval_leaves() -> None:
    """Half of [14.467, 15.723] is 0.63, of [0.0041, 0.0341] 0.015: two digits of each are shown."""
    tokens = Evaluated(metric="a", value=14.992, interval=(14.467, 15.723), before=10.789,
                       gain=4.203, gain_interval=(3.433, 4.954))  # fmt: skip
    assert change(tokens) == ["10.79", "14.99 [14.47, 15.72]", "+4.20 [3.43, 4.95]"]
    share = Evaluated(metric="a", value=0.0123, interval=(0.0041, 0.0341))
    assert change(share) == ["-", "0.012 [0.004, 0.034]", "-"]
    assert change(Evaluated(metric="a", value=1.618, before=1.45, gain=0.168)) == [
        "1.45", "1.62", "+0.17",
    ]  # fmt: skip
    assert change(Evaluated(metric="a", value=0.0))[1] == "0.000"


def test_a_verdict_is_a_list_with_its_level_in_words(tmp_path: Path) -> None:
    stage = StageReport(name="n", title="PPO", verdict=Verdict("doubtful", "One fell; two; three."))
    page = check(written(tmp_path, [stage]))
    assert "! PPO: doubtful." in page.text
    assert clauses("One fell; two; three.") == ["One fell.", "Two.", "Three."]
    assert [tag for tag, _ in page.elements].count("li") == 2


def test_the_fan_takes_all_five_quantiles() -> None:
    curves = {name: ([1, 2], [float(k), k + 1.0]) for k, name in enumerate(FAN)}
    found = fan_plot(curves, "iteration")
    assert found is not None
    assert [(list(a.low), list(a.high)) for a in found.areas] == [
        ([0.0, 1.0], [4.0, 5.0]), ([1.0, 2.0], [3.0, 4.0]),
    ]  # fmt: skip
    del curves[FAN[0]]
    assert fan_plot(curves, "iteration") is None


@pytest.mark.parametrize(
    ("at", "ends", "words"),
    [
        (3.14159, [2.0, None], "the knee of reward against KL is at 3.14 [2.00-end] nats"),
        (
            None,
            [2.0, None],
            "no knee of reward against KL within this run (one below 2.00 nats is unlikely)",
        ),
        (None, [None, None], "no knee of reward against KL within this run"),
    ],
)
def test_the_knee_over_kl_in_words(at: float | None, ends: list[float | None], words: str) -> None:
    knee = {"at": at, "at_interval": ends}
    curve = {"metric": "reward_mean", "unit": "kl_divergence", "knee": knee}
    assert kl_note({"curves": [curve]}) == words
    assert kl_note({"curves": [curve | {"knee": None}]}) == ""


def test_reward_of_an_iteration_is_that_of_the_policy_before_it() -> None:
    """Compute 10 and 30 after iterations 1 and 2: their rewards stand at 0 and 10, the
    evaluations of steps 0 and 2 at 0 and 30."""
    curves = {
        "reward_mean": ([1, 2], [0.5, 0.7]), "kl_divergence": ([1, 2], [0.0, 3.0]),
        "compute/flops": ([1, 2], [10.0, 30.0]),
        "eval/reward_mean": ([0, 2], [0.4, 0.8]), "eval/kl": ([0, 2], [0.0, 4.0]),
    }  # fmt: skip
    knee = {"iteration": 1, "interval": [1, None], "at": 10.0, "at_interval": [5.0, None]}
    found = {"curves": [{"metric": "reward_mean", "unit": "compute/flops", "knee": knee}]}
    by_kl, by_compute = frontier_plots(curves, found)
    assert [list(s.points) for s in by_kl.series] == [
        [(0.0, 0.5), (3.0, 0.7)], [(0.0, 0.4), (4.0, 0.8)],
    ]  # fmt: skip
    assert [list(s.points) for s in by_compute.series] == [
        [(0.0, 0.5), (10.0, 0.7)], [(0.0, 0.4), (30.0, 0.8)],
    ]  # fmt: skip
    assert by_kl.mark is None
    assert by_compute.mark == Mark(x=10.0, interval=(5.0, math.inf), label="knee at iteration 1")
