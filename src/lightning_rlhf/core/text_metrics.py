"""Numbers that describe samples: win rate, distinct n-grams, perplexity and pass@k."""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean

LARGEST_EXPONENT = math.log(sys.float_info.max)
"""Natural logarithm of the largest float, 709.78."""


def outcome(ours: float, theirs: float) -> float:
    """Return 1 where `ours` is larger, 0 where `theirs` is, 1/2 for a tie."""
    return 0.5 if ours == theirs else float(ours > theirs)


def distinct(texts: Iterable[str], n: int) -> float:
    """Return distinct-n: how varied the texts are, 0 to 1; repetition lowers it.

        distinct_n = |{different n-grams}| / |n-grams|, over all texts together

    Source: Li et al. 2016, https://arxiv.org/abs/1510.03055, section 5.1
    Departs: an n-gram is of words, which white space separates. 0 where no text has n words.
    """
    grams = [
        tuple(words[i : i + n])
        for words in (text.split() for text in texts)
        for i in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else 0.0


def perplexity(loss: float) -> float:
    """Return exp(loss) for a mean negative log-likelihood in nats a token, inf on overflow."""
    return math.inf if loss > LARGEST_EXPONENT else math.exp(loss)


def unigram_perplexity(known: Iterable[Sequence[int]], texts: Iterable[Sequence[int]]) -> float:
    """Return the perplexity of texts under the frequencies of tokens in others; lower is better.

        exp(- mean over the tokens t of texts of log p(t)),   p(t) = (n(t) + 1) / (N + V)

    n(t) is the number of t in `known`, N that of all its tokens, V that of the different ones and
    one more, which stands for every token that is not there.

    Source: Jurafsky and Martin, Speech and Language Processing, chapter 3, add-one smoothing
    Departs: V counts the tokens of `known`, not those of the tokenizer.
    """
    counts = Counter(chain.from_iterable(known))
    total = counts.total() + len(counts) + 1
    return math.exp(fmean(math.log(total / (counts[t] + 1)) for t in chain.from_iterable(texts)))


def pass_at_k(passed: Sequence[bool], k: int) -> float:
    """Return the unbiased estimate of the probability that one of k responses passes.

        pass@k = 1 - C(n - c, k) / C(n, k), with n responses of which c pass; k <= n

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1
    """
    n, c = len(passed), sum(passed)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
