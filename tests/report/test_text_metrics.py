"""Numbers that describe texts, and percentages."""

import itertools
import math
from typing import Any

import pytest

from lightning_rlhf.callbacks.evaluation import distinct
from lightning_rlhf.callbacks.metrics import perplexity
from lightning_rlhf.core.kl import best_of_kl
from lightning_rlhf.report.comparison import best_of, pass_at_k
from lightning_rlhf.stages.supervised import unigram_perplexity


def test_distinct_counts_ngrams_over_all_texts() -> None:
    # Words a b a | a b: {a, b} of 5. Pairs ab ba | ab: {ab, ba} of 3. One triple. None of four.
    texts = ["a b\n a", "a b", ""]
    assert [distinct(texts, n) for n in (1, 2, 3, 4)] == [2 / 5, 2 / 3, 1.0, 0.0]


def test_perplexity_of_a_uniform_choice_is_the_number_of_choices() -> None:
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e4) == math.inf


def test_the_unigram_model_counts_one_more_of_each_token() -> None:
    """1 1 2 are known: p(1) = 3/6, p(2) = 2/6, p(another) = 1/6."""
    texts = [[1, 2], [9]]
    expected = (6 / 3 * 6 / 2 * 6 / 1) ** (1 / 3)
    assert unigram_perplexity([[1, 1], [2]], texts) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(1, 1, 1), (5, 0, 2), (5, 2, 3), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_pass(n: int, c: int, k: int) -> None:
    """Counted over all choices of k of the n responses."""
    passed = [i < c for i in range(n)]
    choices = [any(chosen) for chosen in itertools.combinations(passed, k)]
    assert pass_at_k(passed, k) == pytest.approx(sum(choices) / len(choices))


def test_the_best_of_n_is_the_first_of_the_highest_score() -> None:
    scores = [[1.0, 3.0, 3.0, 0.0, 2.0, 1.0], [5.0, 4.0, 4.0, 6.0, 6.0, 6.0]]  # of two prompts
    samples: list[Any] = [
        {"index": prompt, "place": place, "score": score, "kl": -7.0}
        for prompt, some in enumerate(scores)
        for place, score in enumerate(some)
    ]
    found = best_of(samples, 3, 2)
    places = [(x["index"], x["place"], x["score"]) for x in found]
    assert places == [(0, 1, 3.0), (0, 4, 2.0), (1, 0, 5.0), (1, 3, 6.0)]
    for sample in found:
        assert sample["kl"] == pytest.approx(best_of_kl(scores[sample["index"]], 3))
