"""Pages: well-formed, self-contained, text stays text, and the verdict follows from facts."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.report import curves, run_page
from lightning_rlhf.report.curves import BLUE, Plot, Series
from lightning_rlhf.report.figures import MOST_POINTS, dots, svg
from lightning_rlhf.report.run_page import Evaluated, PromiseRow, change, part
from lightning_rlhf.report.tables import Table

from .pages import Page, check

HOSTILE = (
    "</title></style><script>alert(1)</script>\"'><img src=http://x onerror=y>&amp;\x1b[31m\u202e"
)


def plot(**changes: Any) -> Plot:
    series = [Series(label="a", color=BLUE, points=[(0, 1.0), (10, 3.0)])]
    fields = {"title": "t", "x_label": "step", "unit": "score", "series": series}
    return Plot(**fields | changes)


def paths(figure: str, color: str) -> list[list[float]]:
    """Return the numbers of the paths of a colour."""
    found = [given for tag, given in Page(figure).elements if tag == "path"]
    drawn = [str(given["d"]) for given in found if color in str(given.get("style"))]
    return [[float(x) for x in re.findall(r"-?[\d.]+", d)] for d in drawn]


def everywhere(text: str, number: int = 1) -> run_page.StageReport:
    """A report with the same text in every place that shows one."""
    x = float(number)
    drawn = plot(
        **dict.fromkeys(("title", "x_label", "unit", "meaning"), text),
        series=[Series(label=text, color=BLUE, points=[(x, 1.0)], dots=True)], healthy=(0.0, None),
        reference=(2.0, text), mark=(x, (x, math.inf), text),
    )  # fmt: skip
    keys = ("prompt", "before", "before_numbers", "after", "after_numbers")
    tokens = {"heading": text, "prompt": text, "text": [text], "kl": [0.1], "advantage": [-2.0]}
    tokens |= {"names": ("token", "KL"), "rows": [(text, "+0.1000")]}
    parts = {
        "pairs": [dict.fromkeys(keys, text)],
        "findings": [dict.fromkeys(("rule", "iteration", "symptom", "cause", "remedy"), text)],
        "time": [(text, 1.0, 1.0)], "table": [(text, text)], "list": [text],
    }  # fmt: skip
    sections = [
        (text, run_page.part("plots", [drawn], text)),
        ("", run_page.evaluated_table([Evaluated(metric=text, value=1.0)]).html()),
        ("", Table(title=text, columns=[text], rows=[[text]], note=text).html()),
        ("", run_page.token_part([tokens], str(number))),
        ("", part("folded", [(text, text)], text)),
        *(("", part(kind, content)) for kind, content in parts.items()),
        ("left out", part("list", [])),
    ]
    verdict = run_page.Verdict("good", text)
    return run_page.StageReport(name=text, title=text, verdict=verdict, sections=sections)


def written(folder: Path, stages: Sequence[run_page.StageReport]) -> str:
    promise = PromiseRow(stage="a", metric=HOSTILE, promised="b", measured="c", verdict="broken")
    run_page.write_page(folder / "page.html", HOSTILE, stages, [promise])
    return (folder / "page.html").read_text()


def test_hostile_text_stays_text_in_a_page_of_two_stages(tmp_path: Path) -> None:
    html = written(tmp_path, [everywhere(HOSTILE), everywhere(HOSTILE, 2)])
    page = check(html)
    assert page.text.count("<script>alert(1)</script>") > 40
    assert r"\x1b[31m\u202e" in page.text
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_a_line_reaches_within_a_twentieth_of_the_edges() -> None:
    """54..406 and 194..10 show 0..10 and 1..3 with a margin of 5%: 1.1 of their length in all."""
    (line,) = paths(svg(plot()), "var(--c0)")
    left, right = 54 + 352 * 0.05 / 1.1, 406 - 352 * 0.05 / 1.1
    bottom, top = 194 - 184 * 0.05 / 1.1, 10 + 184 * 0.05 / 1.1
    assert line == pytest.approx([left, bottom, right, top], abs=0.06)


def test_the_healthy_band_ends_where_the_axis_ends() -> None:
    """Healthy up to 2, half of 0.9..3.1: from 2 at y = 102 down to the bottom at 194."""
    (band,) = paths(svg(plot(healthy=(None, 2.0))), "var(--good)")
    assert (min(band[1::2]), max(band[1::2])) == (102.0, 194.0)
    (none,) = paths(svg(plot(healthy=(50.0, None))), "var(--good)")
    assert len({*none[1::2]}) == 1


def test_numbers_that_are_not_finite_are_left_out() -> None:
    points = [(0, 1.0), (4, math.nan), (6, math.inf), (10, 3.0)]
    series = [Series(label="a", color=BLUE, points=points, dots=True)]
    figure = svg(plot(series=series))
    assert not re.search("nan|inf", figure)
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
    measured = {name: ([1, 2], [1.0, 2.0]) for name in names}
    panels = [Plot(title="Shown", series=[Series(label="a", color=BLUE, metric="entropy")])]
    first, second = curves.curve_plots(measured, lambda _: panels, "step")
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
    gained = Evaluated(metric="a", value=1.618, before=1.45, gain=0.168)
    assert change(gained) == ["1.45", "1.62", "+0.17"]
    assert change(Evaluated(metric="a", value=0.0))[1] == "0.000"


def test_reward_of_an_iteration_is_that_of_the_policy_before_it() -> None:
    """Compute 10 and 30 after iterations 1 and 2: their rewards stand at 0 and 10, the
    evaluations of steps 0 and 2 at 0 and 30."""
    measured = {
        "reward_mean": ([1, 2], [0.5, 0.7]), "kl_divergence": ([1, 2], [0.0, 3.0]),
        "compute/flops": ([1, 2], [10.0, 30.0]), "eval/reward_mean": ([0, 2], [0.4, 0.8]),
        "eval/kl": ([0, 2], [0.0, 4.0]),
    }  # fmt: skip
    knee = {"iteration": 1, "interval": [1, None], "at": 10.0, "at_interval": [5.0, None]}
    found = {"curves": [{"metric": "reward_mean", "unit": "compute/flops", "knee": knee}]}
    by_kl, by_compute = curves.frontier_plots(measured, found)
    drawn = [[list(one.points) for one in some.series] for some in (by_kl, by_compute)]
    assert drawn[0] == [[(0.0, 0.5), (3.0, 0.7)], [(0.0, 0.4), (4.0, 0.8)]]
    assert drawn[1] == [[(0.0, 0.5), (10.0, 0.7)], [(0.0, 0.4), (30.0, 0.8)]]
    assert by_kl.mark is None
    assert by_compute.mark == (10.0, (5.0, math.inf), "knee at iteration 1")


REWARD, GOLD, KL = "eval/reward_mean", "eval/judge/gold", "eval/kl"


def gained(metric: str, gain: float, low: float, high: float) -> Evaluated:
    return Evaluated(metric=metric, value=1.0, before=1.0 - gain, gain=gain,
                     gain_interval=(low, high))  # fmt: skip


def of(metric: str, value: float, *interval: float, **more: Any) -> Evaluated:
    return Evaluated(metric=metric, value=value, interval=interval or None, **more)  # type: ignore[arg-type]


def verdict(
    *evaluated: Evaluated, goal: tuple[str, str] = (REWARD, "max"), **facts: Any
) -> run_page.Verdict:
    given: dict[str, Any] = {"is_finished": True, "findings": 0, "sentence": None} | facts
    return run_page.conclude(evaluated, [goal], **given)


GOOD, LOSS = gained(REWARD, 0.5, 0.4, 0.6), ("eval/loss", "min")
ACCURACY = ("eval/accuracy", "max")
FALLEN = gained("eval/loss", -1.0, -1.1, -0.9)
UNIGRAM = of("eval/unigram_perplexity", 400.0)


@pytest.mark.parametrize(
    ("level", "evaluated", "facts"),
    [
        ("good", [GOOD], {}),
        ("doubtful", [GOOD, gained(GOLD, 0.0, -0.1, 0.1)], {}),
        ("bad", [GOOD, gained(GOLD, -0.2, -0.3, -0.1)], {}),
        ("doubtful", [GOOD], {"findings": 2}),
        ("doubtful", [GOOD], {"sentence": "s", "diverges": True}),
        ("doubtful", [GOOD], {"is_finished": False}),
        ("bad", [GOOD], {"rewards": [run_page.Verdict("bad", "Unfit.")]}),
        ("unknown", [], {}),
        # A loss is better when it falls; without an interval it is never bad.
        ("good", [of("eval/loss", 1.0, gain=-0.5)], {"goal": LOSS}),
        ("doubtful", [of("eval/loss", 1.0, gain=0.5)], {"goal": LOSS}),
        # Accuracy is held against guessing, 0.5.
        ("good", [of("eval/accuracy", 0.6, 0.55, 0.65)], {"goal": ACCURACY}),
        ("doubtful", [of("eval/accuracy", 0.6, 0.45, 0.75)], {"goal": ACCURACY}),
        # Of a unigram perplexity of 400, three quarters of the loss are 400^(3/4) = 89. 0 is no
        # perplexity, but a manifest from elsewhere may have it.
        ("doubtful", [FALLEN, of("eval/perplexity", 198.0), UNIGRAM], {"goal": LOSS}),
        ("good", [FALLEN, of("eval/perplexity", 0.0), UNIGRAM], {"goal": LOSS}),
    ],
)  # fmt: skip
def test_the_worst_fact_decides(
    level: run_page.Level, evaluated: list[Evaluated], facts: dict[str, Any]
) -> None:
    assert verdict(*evaluated, **facts).level == level
