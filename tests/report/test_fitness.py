import math

import pytest

from lightning_rlhf.report.fitness import LONGER, SAME, SHORTER

from .pairs import measure, pair, scored

# Differences 1 (right), 0 (a tie), -2 (wrong) and 3 (right); of length 2, 0, -4 and -2.
FOUR = scored((1, 0, 4, 2), (0, 0, 3, 3), (0, 2, 1, 5), (3, 0, 2, 4))


def test_accuracy_of_all_pairs_and_by_length() -> None:
    """A tie counts one half."""
    found = measure(FOUR)
    assert (found.accuracy.accuracy, found.accuracy.pairs) == ((1 + 0.5 + 0 + 1) / 4, 4)
    assert (found.ties, found.prompts) == (1, 4)
    length = found.length
    groups = {group.label: (group.pairs, group.accuracy) for group in length["groups"]}
    assert groups == {LONGER: (1, 1.0), SHORTER: (2, 0.5), SAME: (1, 0.5)}
    assert length["gap"] == 0.5
    assert length["gap_interval"] is None  # chosen is longer for one prompt only
    # Of the three pairs of different lengths the longer scores higher in the first and third, and
    # was chosen in the first.
    assert length["model_prefers_longer"] == pytest.approx(2 / 3)
    assert length["people_prefer_longer"] == pytest.approx(1 / 3)
    # Without the third: of two pairs ranked right, chosen is longer in one.
    assert measure(FOUR[::3]).length["model_prefers_longer"] == 0.5


def test_prompts_that_differ_in_a_last_zero_byte_are_two() -> None:
    assert measure([pair(prompt="a"), pair(prompt="a\0"), pair(prompt="a")]).prompts == 2


def test_correlations_with_length() -> None:
    length = measure(FOUR, [(float(s), t) for s, t in ((1, 9), (2, 5), (3, 1))]).length
    # Scores (1, 0, 0, 3, 0, 0, 2, 0) and tokens (4, 3, 1, 2, 2, 3, 5, 4): less their means 0.75
    # and 3, products 2, squares 9.5 and 12.
    assert length["responses"]["pearson"] == pytest.approx(2 / math.sqrt(9.5 * 12))
    # Of the differences, less their means: (0.5, -0.5, -2.5, 2.5) and (3, 1, -3, -1), products 6,
    # squares 13 and 20. Ranks (3, 2, 1, 4) and (4, 3, 1, 2): 1 - 6 * 6 / (4 * 15) = 0.4.
    pairs = {"points": 4, "pearson": 6 / math.sqrt(13 * 20), "spearman": 0.4}
    assert length["pairs"] == pytest.approx(pairs, rel=1e-12)
    assert length["samples"]["pearson"] == pytest.approx(-1.0)


def test_calibration_by_hand() -> None:
    found = measure(FOUR).calibration
    assert found is not None
    # sigmoid(1), 1/2, sigmoid(2), sigmoid(3), each in a bin of its own.
    confidence = [0.7310585786, 0.5, 0.8807970780, 0.9525741268]
    assert [point["confidence"] for point in found["points"]] == pytest.approx(sorted(confidence))
    assert [point["accuracy"] for point in found["points"]] == [0.5, 1.0, 0.0, 1.0]
    assert found["ece"] == pytest.approx((0.2689414214 + 0 + 0.8807970780 + 0.0474258732) / 4)
    # log(1 + e^-1), log 2, log(1 + e^2), log(1 + e^-3)
    loss = [0.3132616875, 0.6931471806, 2.1269280110, 0.0485873516]
    assert found["log_loss"] == pytest.approx(sum(loss) / 4)
    assert found["overconfidence"] == pytest.approx(sum(confidence) / 4 - 0.625)
    # sqrt(c (1 - c)) of the three that are no ties: 0.443409, 0.324027, 0.212548
    assert found["ece_of_calibrated"] == pytest.approx(0.979984 * 0.7978846 / 4, rel=1e-5)


def test_scores_divided_by_their_deviation_are_scaled_back() -> None:
    half = [(p.chosen_score / 2, p.rejected_score / 2, 1, 1) for p in FOUR]
    assert measure(scored(*half), logit_scale=2.0).calibration == measure(FOUR).calibration
    assert measure(FOUR, logit_scale=None).calibration is None


def test_accuracy_by_difference_and_by_given_margin() -> None:
    found = measure(FOUR)
    by_difference = [(g.label, g.accuracy) for g in found.by_difference]
    assert by_difference == [("0", 0.5), ("1", 1.0), ("2", 0.0), ("3", 1.0)]
    assert found.by_margin == ()
    marked = [*FOUR, pair(margin=1.0), pair(margin=3.0, chosen_score=-1.0), pair(margin=1.0)]
    by_margin = measure(marked).by_margin
    assert [(g.label, g.pairs, g.accuracy) for g in by_margin] == [("1", 2, 1.0), ("3", 1, 0.0)]


def test_distributions_and_samples_outside_the_range_of_the_pairs() -> None:
    samples = [(score, 3) for score in (-0.5, 0.0, 1.0, 3.0, 7.5)]
    found = measure(FOUR, samples)
    assert found.outside == pytest.approx(2 / 5)  # the pairs score 0 to 3
    assert found.chosen["mean"] == 1.0
    assert found.rejected["mean"] == 0.5
    assert (found.edges[0], found.edges[-1]) == (-0.5, 7.5)
    assert sum(found.chosen["histogram"]) == 4
    nothing = measure(FOUR)
    assert (nothing.sampled, nothing.outside) == (None, None)
    assert nothing.length["samples"]["pearson"] is None


def test_constant_scores() -> None:
    found = measure(scored(*[(0.1, 0.1, i, i + 1) for i in range(40)]))
    assert found.accuracy.accuracy == 0.5
    assert found.accuracy.interval == (0.5, 0.5)
    assert found.length["responses"]["pearson"] is None
    assert found.calibration is not None
    assert (found.calibration["ece"], found.calibration["ece_of_calibrated"]) == (0.0, 0.0)
    assert found.calibration["log_loss"] == pytest.approx(math.log(2))
