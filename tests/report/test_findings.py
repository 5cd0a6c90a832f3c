"""What a fitness report makes of its measurements: findings, the verdict and advice."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from matplotlib.image import imread

from lightning_rlhf.data.problems import Problems, find_problems
from lightning_rlhf.data.rows import Message, Preference, Rows
from lightning_rlhf.report import fitness_page as checks
from lightning_rlhf.report.fitness import (
    Fitness,
    Numbers,
    ScoredPair,
    ScoredProbe,
    ScoredSample,
    measure_probes,
)
from lightning_rlhf.report.fitness_page import Finding, FitnessCheck, FitnessReport
from lightning_rlhf.report.tables import plain, table
from lightning_rlhf.rewards.format_check import ProbeKind

from .pairs import measure, pair, scored, simulated

SAMPLES = [(score, 20) for score in np.linspace(-1, 1, 40)]
RIGHT, WRONG = (1.0, 0.0, 3, 3), (0.0, 1.0, 3, 3)


def report(
    pairs: Fitness | Sequence[ScoredPair], samples: Sequence[ScoredSample] = (),
    probes: Sequence[Numbers] = (), problems: Problems | None = None,
) -> FitnessReport:  # fmt: skip
    fitness = pairs if isinstance(pairs, Fitness) else measure(pairs, samples)
    return FitnessReport(title="t", fitness=fitness, probes=probes, problems=problems,
                         sampled_from="some prompts", scale="")  # fmt: skip


def finding(check: FitnessCheck, fitness: Fitness, probes: Sequence[Numbers] = ()) -> Finding:
    (found,) = (f for f in report(fitness, probes=probes).findings if f.check is check)
    return found


def test_a_calibrated_model_that_ignores_length_is_clear() -> None:
    for seed in range(3):
        found = report(simulated(500, per_token=0.0, seed=seed), SAMPLES)
        assert [f.outcome for f in found.findings] == ["clear"] * 6
        (words,) = found.words
        assert words == "No check found a fault in it. 0 of 6 checks flagged, 0 not tested."


def test_a_model_that_adds_a_bonus_for_each_token_is_flagged() -> None:
    result = report(simulated(500, per_token=0.08), SAMPLES)
    assert [f.outcome for f in result.findings[2:4]] == ["flag", "flag"]
    assert all(f.value is not None and f.value > f.check.threshold for f in result.findings[2:4])
    assert "prefers the longer" in result.findings[2].words
    assert "length gap, length within pairs" in result.verdict.words
    assert result.verdict.words.startswith("Fit with reservations")
    assert "length may be what is rewarded" in result.advice


# 34 pairs of each: 20 right where chosen is longer, 13 where it is shorter.
LONGER = [(1, 0, 9, 3)] * 20 + [(0, 1, 9, 3)] * 14
SHORTER = [(1, 0, 3, 9)] * 13 + [(0, 1, 3, 9)] * 21
FORTY = [(float(i % 5), 0.0, 3, 3) for i in range(40)]
LENGTH_RIGHT = [(1, 0, 9, 3)] * 98 + [(0, 1, 3, 9)] * 2


@pytest.mark.parametrize(
    ("check", "pairs", "samples", "outcome", "value"),
    [
        # The gap is 0.206, its standard error sqrt(0.588 * 0.412 / 34 + 0.382 * 0.618 / 34) = 0.119
        (checks.LENGTH_GAP, LONGER + SHORTER, [], "clear", 7 / 34),
        (checks.OUTSIDE, FORTY, [(2.0, 3)] * 38 + [(4.5, 3)] * 3, "flag", 3 / 41),
        # Chosen is longer in 98 of 100 pairs, of which all are ranked right.
        (checks.BEATS_LENGTH, LENGTH_RIGHT, [], "flag", 0.0),
        # The shorter one is right in 60; all are ranked right, so that the interval is 1 to 1.
        (checks.BEATS_LENGTH, [(1, 0, 3, 9)] * 60 + [(1, 0, 9, 3)] * 40, [], "clear", 0.4),
    ],
)
def test_a_check_is_flagged_beyond_its_threshold_alone(
    check: FitnessCheck, pairs: Any, samples: Any, outcome: str, value: float
) -> None:
    found = finding(check, measure(scored(*pairs), samples))
    assert found.outcome == outcome
    assert found.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("right", "count", "outcome", "start", "advice"),
    [  # Of 100: standard error 0.049, so that the interval of 0.58 begins at 0.48, of 0.63 at 0.535
        (58, 100, "flag", "Not fit", "Do not run it"),
        (63, 100, "clear", "Fit with reservations", "It may run, with an eye on the flags"),
        (29, 29, "not tested", "Not enough data", "hold out more pairs"),
        (100, 100, "clear", "No check found a fault", "It may run. Read its samples"),
    ],
)
def test_accuracy_whose_interval_holds_a_half_is_unfit(
    right: int, count: int, outcome: str, start: str, advice: str
) -> None:
    found = report(scored(*[RIGHT] * right, *[WRONG] * (count - right)))
    assert found.findings[0].outcome == outcome
    assert found.verdict.words.startswith(start)
    assert advice in found.advice


def test_a_model_that_exaggerates_is_overconfident_and_a_timid_one_is_not() -> None:
    for scale, outcome in ((0.2, "clear"), (1.0, "clear"), (4.0, "flag")):
        fitness = measure(simulated(500, per_token=0.0, scale=scale))
        assert finding(checks.OVERCONFIDENCE, fitness).outcome == outcome
    found = finding(checks.OVERCONFIDENCE, measure(simulated(50, 0.0), logit_scale=None))
    assert (found.outcome, found.value) == ("not tested", None)
    assert "no log-odds" in found.words


def test_nothing_is_flagged_without_data() -> None:
    wrong = [(0.0, 9.0, 1 + 8 * (i % 2), 5) for i in range(29)]
    findings = report(scored(*wrong), [(99.0, 3)] * 29).findings
    assert [f.outcome for f in findings] == ["not tested"] * 6
    more = report(scored(*wrong, *wrong), [(99.0, 3)] * 30)
    flags = [checks.ACCURACY, checks.BEATS_LENGTH, checks.OVERCONFIDENCE, checks.OUTSIDE]
    assert [f.check for f in more.flags] == flags
    same_prompt = measure([pair(chosen_score=float(i)) for i in range(50)])
    assert finding(checks.ACCURACY, same_prompt).outcome == "not tested"


def probe_results(kind: ProbeKind, scores: list[float]) -> list[Numbers]:
    """Good responses score 1, 2, 3, ..., bad ones -1."""
    return measure_probes([
        ScoredProbe(kind=kind, response=f"response {i}", score=score,
                    pair=pair(chosen_score=float(i), rejected_score=-1.0))
        for i, score in enumerate(scores, start=1)
    ])  # fmt: skip


def test_a_probe_beside_the_good_and_bad_responses_to_the_same_prompts() -> None:
    (found,) = probe_results("flattery", [9.0, 2.0, 0.0, 4.5, 1.0])
    middles = [found[key] for key in ("mean", "median", "chosen_median", "rejected_median", "lead")]
    assert middles == [3.3, 2.0, 3.0, -1.0, -1.0]
    # Beats 1 with 9, ties with 2, loses to 3, beats 4, loses to 5.
    assert found["beats_chosen"] == pytest.approx((1 + 0.5 + 0 + 1 + 0) / 5)
    assert found["example"].response == "response 2"


@pytest.mark.parametrize(
    ("scores", "outcome"), [([3.0] * 5, "clear"), ([3.1] * 5, "flag"), ([9.0] * 4, "not tested")]
)
def test_a_probe_above_the_median_good_response_is_a_way_to_cheat(
    scores: list[float], outcome: str
) -> None:
    found = finding(checks.PROBE, measure([pair()]), probe_results("prompt_copied", scores))
    assert (found.outcome, found.subject) == (outcome, "probe prompt copied")
    assert ("a way the policy may cheat" in found.words) is (outcome == "flag")


def test_metrics_leave_out_what_is_undefined() -> None:
    alone = report(measure([pair()], logit_scale=None)).metrics
    assert alone == {
        f"fitness/{name}": x for name, x in (("accuracy", 1), ("pairs", 1), ("flags", 0))
    }
    fitness = measure(simulated(100, per_token=0.05), SAMPLES)
    named = report(fitness, probes=probe_results("empty", [4.0] * 5)).metrics
    assert named["fitness/probe_empty"] == 1.0  # 4 less the median of 1 to 5
    assert named["fitness/length_gap"] == pytest.approx(
        named["fitness/accuracy_chosen_longer"] - named["fitness/accuracy_chosen_shorter"]
    )
    assert named["fitness/flags"] >= 2
    assert "fitness/length_pearson_sft" not in named  # all samples are of one length
    assert len(named) == 15


def pairs_of(*rows: tuple[str, str, str]) -> Rows[Preference]:
    pairs = tuple(Preference((Message("user", p),), c, r) for p, c, r in rows)
    return Rows("v", pairs, Counter(), "line", tuple(range(len(pairs))))


def test_broken_pairs_are_flagged_beside_the_reward() -> None:
    # 40 pairs of equally long responses on 40 prompts; then 2 that stand twice, 1 turned round.
    clean = [(f"q{i}", "yes", "not") for i in range(40)]
    good = simulated(500, per_token=0.0)
    whole = report(good, problems=find_problems(pairs_of(*clean), None)).words[1]
    assert whole.endswith("No check found a fault in them. 0 of 3 checks flagged, 1 not tested.")
    broken = pairs_of(*clean, *clean[:2], ("q5", "not", "yes"), ("l", "longer", "x"))
    result = report(good, problems=find_problems(broken, pairs_of(clean[0])))
    # The training pair comes first.
    assert [one.value for one in result.in_pairs] == [3 / 45, 1 / 45, 1 / 41, None]
    assert [one.outcome for one in result.in_pairs] == ["flag", "flag", "clear", "not tested"]
    assert "2 of 4 checks flagged (duplicate pairs, contradicting pairs)" in result.words[1]
    assert "pairs are flagged (duplicate pairs" in result.advice


@pytest.mark.parametrize(
    ("longer", "of", "outcome"), [(10, 50, "flag"), (27, 50, "clear"), (27, 29, "not tested")]
)
def test_length_that_tells_the_chosen_response_is_flagged_by_the_share(
    longer: int, of: int, outcome: str
) -> None:
    """10 of 50: Wilson's interval is 0.11 to 0.33. 27 of 50: 0.40 to 0.67."""
    rows = [(f"q{i}", "yes!", "no") if i < longer else (f"q{i}", "no", "yes!") for i in range(of)]
    result = report([pair()], problems=find_problems(pairs_of(*rows), None))
    found = result.in_pairs[-1]
    assert found.outcome == outcome
    assert found.value == (None if of < 30 else max(longer, of - longer) / of)
    assert ("Too few to be judged" in result.words[1]) is (of < 30)


HARD = [
    "a | b", "a\\|b", "ends with \\", "`code` ``|``", "two\nlines\r\nand\ttab", "*bold* _it_ ~~s~~",
    "<script>&amp;</script>", "[link](http://x.y) ![i](j)", "# no heading", "$x$ | $y$", "| --- |",
]  # fmt: skip


KINDS: tuple[ProbeKind, ...] = ("repeated", "flattery")


def shown(token: Token) -> str:
    """The text a reader sees; anything but text and our own emphasis fails."""
    kinds = {child.type for child in token.children or []}
    assert kinds <= {"text", "text_special", "strong_open", "strong_close"}
    return "".join(child.content for child in token.children or [])


def tables(markdown: str) -> list[list[list[str]]]:
    found: list[list[list[str]]] = []
    before = ""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and before in ("th_open", "td_open"):
            found[-1][-1].append(shown(token))
        before = token.type
    return found


def hard_report(count: int) -> FitnessReport:
    rows = [Preference((Message("user", text),), text, "bad") for text in HARD] * 2
    probed = [pair(prompt=text, chosen=text, chosen_score=float(i)) for i, text in enumerate(HARD)]
    probes = [
        ScoredProbe(kind=kind, response=one.prompt, score=5.0, pair=one)
        for kind in KINDS
        for one in probed
    ]
    return FitnessReport(
        title="run | *one*", fitness=measure(simulated(count, per_token=0.05), [(0.5, 7)] * 3),
        probes=measure_probes(probes),
        problems=find_problems(Rows("v", tuple(rows), Counter(), "line", (*range(22),)), None),
        sampled_from="some prompts", scale="Raw scores.",
    )  # fmt: skip


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_stay_in_their_cells_and_read_as_they_are(text: str) -> None:
    ((heading, *rows),) = tables(table(("text", "n"), [(plain(text, 80), "1")] * 2, right=[1]))
    assert heading == ["text", "n"]
    assert rows == [[" ".join(text.split()), "1"]] * 2


@pytest.mark.parametrize("count", [1, 200])
def test_the_page_shows_what_was_measured(count: int, tmp_path: Path) -> None:
    hard_report(count).write(tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    (link,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)
    assert imread(tmp_path / link).shape[1] >= 1000
    assert all(len(row) == len(rows[0]) for rows in tables(page) for row in rows)
    cells = {row[0]: row[1:] for rows in tables(page) for row in rows}
    accuracy = f"{measure(simulated(count, 0.05)).accuracy.accuracy:.3f}"
    assert cells[f"Accuracy ({count} pair{'s' * (count > 1)})"][0] == accuracy
    assert cells["length gap"][0] == ("flag" if count > 1 else "not tested")
    assert cells["probe repeated"][0] == "clear"  # median 5, as that of scores 0 to 10
    assert cells["flattery"] == ["a | b", "a | b", "5.000", "0.000"]
    assert "3 SFT samples" in page
    assert "says to some prompts. Raw scores." in page
    assert "duplicates of an earlier pair: 11 of 22 pairs" in page
    assert not re.search(r"\bnan\b|\bNone\b|{", page)
    if count > 1:  # its scores grow with length
        before, _ = page.split("## What this means for PPO")[1].split("Good responses are", 1)
        assert "watch `rollout/response_tokens`" in before
