from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from lightning_rlhf.data.problems import find_problems
from lightning_rlhf.data.rows import Message, Preference, Rows
from lightning_rlhf.report.checks import (
    ACCURACY,
    BEATS_LENGTH,
    CONTRADICTIONS,
    DUPLICATES,
    LEAKS,
    LENGTH_CORRELATION,
    LENGTH_GAP,
    ONE_SIDED,
    OUTSIDE,
    OVERCONFIDENCE,
    PAIR_CHECKS,
    PROBE,
    Finding,
    FitnessCheck,
    about_pairs,
    find,
    find_in_pairs,
    fitness_metrics,
    for_ppo,
    judgement,
)
from lightning_rlhf.report.fitness import Fitness, ProbeResult, ScoredProbe, measure_probes
from lightning_rlhf.rewards.format_check import ProbeKind

from .pairs import measure, pair, scored, simulated

SAMPLES = [(score, 20) for score in np.linspace(-1, 1, 40)]


def verdict(findings: Sequence[Finding]) -> str:
    return judgement(findings).words


def finding(check: FitnessCheck, fitness: Fitness, probes: tuple[ProbeResult, ...] = ()) -> Finding:
    (found,) = (f for f in find(fitness, probes) if f.check is check)
    return found


def test_a_calibrated_model_that_ignores_length_is_clear() -> None:
    for seed in range(5):
        findings = find(measure(simulated(500, per_token=0.0, seed=seed), SAMPLES), [])
        assert [f.outcome for f in findings] == ["clear"] * 6
    assert verdict(findings).startswith(
        "No check found a fault in it. 0 of 6 checks flagged, 0 not"
    )


def test_a_model_that_adds_a_bonus_for_each_token_is_flagged() -> None:
    fitness = measure(simulated(500, per_token=0.08), SAMPLES)
    for check in (LENGTH_GAP, LENGTH_CORRELATION):
        found = finding(check, fitness)
        assert found.outcome == "flag"
        assert found.value is not None
        assert found.value > check.threshold
    assert "prefers the longer" in finding(LENGTH_GAP, fitness).words
    assert "length gap, length within pairs" in verdict(find(fitness, []))
    assert verdict(find(fitness, [])).startswith("Fit with reservations")


def test_a_gap_by_chance_is_no_flag() -> None:
    # 34 pairs of each: 20 right where chosen is longer, 13 where it is shorter. The gap is 0.206,
    # but its standard error is sqrt(0.588 * 0.412 / 34 + 0.382 * 0.618 / 34) = 0.119.
    longer, shorter = [(1, 0, 9, 3)] * 20 + [(0, 1, 9, 3)] * 14, [(1, 0, 3, 9)] * 13
    fitness = measure(scored(*longer, *shorter, *[(0, 1, 3, 9)] * 21))
    found = finding(LENGTH_GAP, fitness)
    assert found.value == pytest.approx(7 / 34)
    assert found.outcome == "clear"
    assert fitness.length.gap_interval == pytest.approx((0.206 - 0.233, 0.206 + 0.233), abs=0.04)


@pytest.mark.parametrize(("right", "outcome"), [(50, "flag"), (58, "flag"), (63, "clear")])
def test_accuracy_whose_interval_holds_a_half_is_flagged(right: int, outcome: str) -> None:
    # Of 100: standard error 0.049, so that the interval of 0.58 begins at 0.48, of 0.63 at 0.535.
    rows = [(1, 0, 3, 3)] * right + [(0, 1, 3, 3)] * (100 - right)
    fitness = measure(scored(*rows))
    assert finding(ACCURACY, fitness).outcome == outcome
    assert verdict(find(fitness, [])).startswith("Not fit") is (outcome == "flag")


def test_a_model_that_exaggerates_is_overconfident_and_a_timid_one_is_not() -> None:
    outcomes = {}
    for scale in (0.2, 1.0, 4.0):
        found = finding(OVERCONFIDENCE, measure(simulated(500, per_token=0.0, scale=scale)))
        outcomes[scale] = (found.outcome, found.value is not None and found.value > 0.1)
    assert outcomes == {0.2: ("clear", True), 1.0: ("clear", False), 4.0: ("flag", True)}


def test_samples_off_the_scale() -> None:
    pairs = scored(*[(float(i % 5), 0.0, 3, 3) for i in range(40)])
    inside = [(2.0, 3)] * 38
    for beyond, outcome in ((2, "clear"), (3, "flag")):  # of 40 and 41: 5.0% and 7.3%
        fitness = measure(pairs, [*inside, *[(4.5, 3)] * beyond])
        assert finding(OUTSIDE, fitness).outcome == outcome


def test_nothing_is_flagged_without_data() -> None:
    wrong = [(0.0, 9.0, 1 + 8 * (i % 2), 5) for i in range(29)]
    findings = find(measure(scored(*wrong), [(99.0, 3)] * 29), [])
    assert [f.outcome for f in findings] == ["not tested"] * 6
    assert "29 pairs" in findings[0].words
    assert verdict(findings).startswith("Not enough data")
    more = find(measure(scored(*wrong, *wrong), [(99.0, 3)] * 30), [])
    assert [f.check for f in more if f.outcome == "flag"] == [
        ACCURACY, BEATS_LENGTH, OVERCONFIDENCE, OUTSIDE,
    ]  # fmt: skip


def test_many_pairs_of_one_prompt_and_scores_that_are_no_log_odds() -> None:
    same_prompt = measure([pair(chosen_score=float(i)) for i in range(50)])
    assert finding(ACCURACY, same_prompt).outcome == "not tested"
    no_odds = measure(simulated(50, per_token=0.0), logit_scale=None)
    found = finding(OVERCONFIDENCE, no_odds)
    assert (found.outcome, found.value) == ("not tested", None)
    assert "no log-odds" in found.words


def probe_results(kind: ProbeKind, scores: list[float]) -> tuple[ProbeResult, ...]:
    """Good responses score 1, 2, 3, ..., bad ones -1."""
    return measure_probes([
        ScoredProbe(kind=kind, response=f"response {i}", score=score,
                    pair=pair(chosen_score=float(i), rejected_score=-1.0))
        for i, score in enumerate(scores, start=1)
    ])  # fmt: skip


def test_a_probe_beside_the_good_and_bad_responses_to_the_same_prompts() -> None:
    (found,) = probe_results("flattery", [9.0, 2.0, 0.0, 4.5, 1.0])
    assert (found.mean, found.median, found.chosen_median, found.rejected_median) == (
        3.3, 2.0, 3.0, -1.0,
    )  # fmt: skip
    # Beats 1 with 9, ties with 2, loses to 3, beats 4, loses to 5.
    assert found.beats_chosen == pytest.approx((1 + 0.5 + 0 + 1 + 0) / 5)
    assert found.example.response == "response 2"
    assert found.lead == -1.0


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [([3.0] * 5, "clear"), ([3.1] * 5, "flag"), ([9.0] * 4, "not tested")],
)
def test_a_probe_above_the_median_good_response_is_a_way_to_cheat(
    scores: list[float], outcome: str
) -> None:
    found = finding(PROBE, measure([pair()]), probe_results("prompt_copied", scores))
    assert found.outcome == outcome
    assert found.subject == "probe prompt copied"
    assert ("a way the policy may cheat" in found.words) is (outcome == "flag")


def test_metrics_leave_out_what_is_undefined() -> None:
    alone = measure([pair()], logit_scale=None)
    assert fitness_metrics(alone, [], find(alone, [])) == {
        "fitness/accuracy": 1.0, "fitness/pairs": 1.0, "fitness/flags": 0.0,
    }  # fmt: skip
    fitness = measure(simulated(100, per_token=0.05), SAMPLES)
    probes = probe_results("empty", [4.0] * 5)
    named = fitness_metrics(fitness, probes, find(fitness, probes))
    assert named["fitness/probe_empty"] == 1.0  # 4 less the median of 1 to 5
    assert named["fitness/length_gap"] == pytest.approx(
        named["fitness/accuracy_chosen_longer"] - named["fitness/accuracy_chosen_shorter"]
    )
    assert named["fitness/flags"] >= 2
    assert "fitness/length_pearson_sft" not in named  # all samples are of one length
    assert len(named) == 15


def test_accuracy_that_length_alone_reaches_says_nothing() -> None:
    # Chosen is longer in 98 of 100 pairs; right are those 98, or 90 of them.
    fitness = measure(scored(*[(1, 0, 9, 3)] * 98, *[(0, 1, 3, 9)] * 2))
    assert finding(ACCURACY, fitness).outcome == "clear"
    assert finding(LENGTH_GAP, fitness).outcome == "not tested"
    found = finding(BEATS_LENGTH, fitness)
    assert (found.outcome, found.value) == ("flag", 0.0)
    assert found.words == (
        "ranks 98.0% of held-out pairs right; always taking the longer response is right in 98.0%; "
        "length alone may explain its accuracy"
    )
    assert verdict(find(fitness, [])).startswith("Fit with reservations")
    assert "length may be what is paid" in for_ppo(find(fitness, []), ())
    # The shorter one is right in 60; all are ranked right, so that the interval is 1 to 1.
    better = measure(scored(*[(1, 0, 3, 9)] * 60, *[(1, 0, 9, 3)] * 40))
    assert finding(BEATS_LENGTH, better).outcome == "clear"
    assert "taking the shorter response is right in 60.0%" in finding(BEATS_LENGTH, better).words


def pairs_of(*rows: tuple[str, str, str]) -> Rows[Preference]:
    pairs = tuple(Preference((Message("user", p),), c, r) for p, c, r in rows)
    return Rows("v", pairs, Counter(), "line", tuple(range(len(pairs))))


def test_broken_pairs_are_flagged_beside_the_reward() -> None:
    # 40 pairs of equally long responses on 40 prompts; then 2 that stand twice, 1 turned round.
    clean = [(f"q{i}", "yes", "not") for i in range(40)]
    assert about_pairs(find_in_pairs(find_problems(pairs_of(*clean), None))) == (
        "About the pairs: No check found a fault in them. 0 of 3 checks flagged, 1 not tested."
    )
    broken = pairs_of(*clean, *clean[:2], ("q5", "not", "yes"), *[("l", "longer", "x")] * 1)
    found = {f.check: f for f in find_in_pairs(find_problems(broken, pairs_of(clean[0])))}
    assert found[DUPLICATES].value == 3 / 45  # the training pair comes first
    assert found[CONTRADICTIONS].value == 1 / 45
    assert found[LEAKS].value == 1 / 41
    outcomes = [found[check].outcome for check in PAIR_CHECKS]
    assert outcomes == ["flag", "flag", "clear", "not tested"]
    told = about_pairs(list(found.values()))
    assert "2 of 4 checks flagged (duplicate pairs, contradicting pairs)" in told
    assert told.startswith("About the pairs: Some are flawed: ")
    clear = find(measure(simulated(500, per_token=0.0), SAMPLES), [])
    assert "pairs are flagged (duplicate pairs" in for_ppo(clear, list(found.values()))


def test_length_that_tells_the_chosen_response_is_flagged_by_the_share() -> None:
    # 40 of 50: Wilson's interval is 0.67 to 0.89. 27 of 50: 0.40 to 0.67.
    for longer, outcome in ((40, "flag"), (10, "flag"), (27, "clear")):
        rows = [(f"q{i}", "yes!", "no") if i < longer else (f"q{i}", "no", "yes!")
                for i in range(50)]  # fmt: skip
        found = {f.check: f for f in find_in_pairs(find_problems(pairs_of(*rows), None))}
        assert found[ONE_SIDED].outcome == outcome
        assert found[ONE_SIDED].value == max(longer, 50 - longer) / 50
    few = find_in_pairs(find_problems(pairs_of(*rows[:29]), None))
    assert {f.outcome for f in few} == {"not tested"}
    assert "Too few to be judged" in about_pairs(few)


def test_whether_ppo_may_run() -> None:
    words = {
        right: for_ppo(find(measure(scored(*[(1, 0, 3, 3)] * right,
                                           *[(0, 1, 3, 3)] * (count - right))), []), ())
        for right, count in ((50, 100), (9, 10), (100, 100))
    }  # fmt: skip
    assert words[50].startswith("Do not run it")
    assert "hold out more pairs" in words[9]
    assert words[100].startswith("It may run.")
