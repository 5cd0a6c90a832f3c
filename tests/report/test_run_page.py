"""report.html: well-formed, self-contained, and any text is only text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.report.curves import (
    BLUE,
    Mark,
    Plot,
    Series,
    curve_plots,
    frontier_plots,
    kl_note,
)
from lightning_rlhf.report.figures import MOST_POINTS, dots, svg
from lightning_rlhf.report.run_page import (
    Evaluated,
    PromiseRow,
    StageReport,
    Verdict,
    change,
    clauses,
    evaluated_table,
    part,
    plots,
    token_part,
    write_page,
)
from lightning_rlhf.report.tables import Table

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


def paths(figure: str, color: str) -> list[list[float]]:
    """Return the numbers of the paths of a colour."""
    found = [given for tag, given in Page(figure).elements if tag == "path"]
    drawn = [str(given["d"]) for given in found if color in str(given.get("style"))]
    return [[float(x) for x in re.findall(r"-?[\d.]+", d)] for d in drawn]


def everywhere(text: str, number: int = 1) -> StageReport:
    """A report with the same text in every place that shows one."""
    x = float(number)
    drawn = plot(
        title=text,
        x_label=text,
        unit=text,
        series=[Series(label=text, color=BLUE, points=[(x, 1.0)], dots=True)],
        meaning=text,
        healthy=(0.0, None),
        reference=(2.0, text),
        mark=Mark(x=x, interval=(x, math.inf), label=text),
    )
    pair = {"prompt": text, "before": text, "before_numbers": text, "after": text,
            "after_numbers": text}  # fmt: skip
    tokens = {"heading": text, "prompt": text, "text": [text], "kl": [0.1], "advantage": [-2.0],
              "names": ("token", "KL"), "rows": [(text, "+0.1000")]}  # fmt: skip
    finding = dict.fromkeys(("rule", "iteration", "symptom", "cause", "remedy"), text)
    return StageReport(
        name=text,
        title=text,
        verdict=Verdict("good", text),
        sections=[
            (text, plots([drawn], text)),
            ("", evaluated_table([Evaluated(metric=text, value=1.0)]).html()),
            ("", Table(title=text, columns=[text], rows=[[text]], note=text).html()),
            ("", part("pairs", [pair])),
            ("", token_part([tokens], str(number))),
            ("", part("findings", [finding])),
            ("", part("time", [(text, 1.0, 1.0)])),
            ("", part("table", [(text, text)])),
            ("", part("folded", [(text, text)], text)),
            ("", part("list", [text])),
            ("left out", part("list", [])),
        ],
    )


def written(folder: Path, stages: Sequence[StageReport]) -> str:
    promise = PromiseRow(stage="a", metric=HOSTILE, promised="b", measured="c", verdict="broken")
    write_page(folder / "page.html", HOSTILE, stages, [promise])
    return (folder / "page.html").read_text()


def test_hostile_text_stays_text_in_a_page_of_two_stages(tmp_path: Path) -> None:
    html = written(tmp_path, [everywhere(HOSTILE), everywhere(HOSTILE, 2)])
    page = check(html)
    assert page.text.count("<script>alert(1)</script>") > 40
    assert r"\x1b[31m\u202e" in page.text
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_the_verdict_comes_first_and_what_is_empty_is_left_out(tmp_path: Path) -> None:
    page = check(written(tmp_path, [everywhere("words")]))
    assert page.text.index("good") < page.text.index("Promises") < page.text.index("Evaluation")
    assert "left out" not in page.text
    assert "token words\nKL +0.1000" in page.values("title")


def test_a_line_reaches_within_a_twentieth_of_the_edges() -> None:
    """54..406 and 194..10 show 0..10 and 1..3 with a margin of 5%: 1.1 of their length in all."""
    (line,) = paths(svg(plot()), "var(--c0)")
    left, right = 54 + 352 * 0.05 / 1.1, 406 - 352 * 0.05 / 1.1
    bottom, top = 194 - 184 * 0.05 / 1.1, 10 + 184 * 0.05 / 1.1
    assert line == pytest.approx([left, bottom, right, top], abs=0.06)


def test_a_plot_has_the_colours_of_the_page_and_is_drawn_the_same_again() -> None:
    """A name that refers to a part of the drawing is that of no other plot."""
    series = [Series(label="a", color=BLUE, points=[(0, 1.0), (10, 3.0)], dots=True)]
    one, other = plot(series=series), plot(series=series, title="u")
    first, again, second = svg(one), svg(one), svg(other)
    assert first == again
    assert not re.findall("#[0-9a-f]{6}|font-family|DejaVu", first)
    ids = [set(Page(text).values("id")) for text in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert re.findall("<title>(.*?)</title>", first) == [
        "a: 3 at 10", "a: 1 at 0", "a: 3 at 10",
    ]  # fmt: skip


def test_the_healthy_band_ends_where_the_axis_ends() -> None:
    """Healthy up to 2, half of 0.9..3.1: from 2 at y = 102 down to the bottom at 194."""
    (band,) = paths(svg(plot(healthy=(None, 2.0))), "var(--good)")
    assert (min(band[1::2]), max(band[1::2])) == (102.0, 194.0)
    (none,) = paths(svg(plot(healthy=(50.0, None))), "var(--good)")
    assert len({*none[1::2]}) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_left_out(bad: float) -> None:
    points = [(0, 1.0), (5, bad), (10, 3.0)]
    series = [Series(label="a", color=BLUE, points=points, dots=True)]
    figure = svg(plot(series=series))
    assert "nan" not in figure
    assert "inf" not in figure
    assert figure.count("<use") == 2


def test_a_long_line_keeps_its_extremes_and_few_dots() -> None:
    points = [(float(i), 9.0 if i == 77_777 else float(i % 7)) for i in range(100_000)]
    series = Series(label="a", color=BLUE, points=points, dots=True)
    assert len(dots(plot(series=[series]), series)) <= MOST_POINTS
    (line,) = paths(svg(plot(series=[Series(label="", color=BLUE, points=points)])), "var(--c0)")
    assert min(line[1::2]) == pytest.approx(10 + 184 * 0.05 / 1.1, abs=0.06)
    assert len(line) < 10_000


def test_a_banded_metric_without_a_panel_gets_a_plot() -> None:
    names = ("entropy", "update/clip_fraction", "update/kl_coef")
    curves = {name: ([1, 2], [1.0, 2.0]) for name in names}
    panels = [Plot(title="Shown", series=[Series(label="a", color=BLUE, metric="entropy")])]
    first, second = curve_plots(curves, lambda _: panels, "step")
    assert (first.title, first.unit, first.healthy) == ("Shown", "nats a token", None)
    assert (second.title, second.healthy) == ("update/clip_fraction", (None, 0.3))
    assert second.meaning == "below 0.3"


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
    verdict = Verdict("doubtful", "One fell; two; three.")
    stage = StageReport(title="PPO", verdict=verdict, sections=[])
    page = check(written(tmp_path, [stage]))
    assert "! PPO: doubtful." in page.text
    assert clauses("One fell; two; three.") == ["One fell.", "Two.", "Three."]
    assert [tag for tag, _ in page.elements].count("li") == 2


def test_the_knee_over_kl_in_words() -> None:
    none = "no knee of reward against KL within this run"
    curve = {"metric": "reward_mean", "unit": "kl_divergence", "knee": None}
    assert kl_note({"curves": [curve]}) == ""
    for at, low, words in (
        (3.14159, 2.0, "the knee of reward against KL is at 3.14 [2.00-end] nats"),
        (None, 2.0, f"{none} (one below 2.00 nats is unlikely)"),
        (None, None, none),
    ):
        knee = {"at": at, "at_interval": [low, None]}
        assert kl_note({"curves": [curve | {"knee": knee}]}) == words


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
