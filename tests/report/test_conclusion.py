"""The verdict of a run: its level and its sentence follow from facts."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.report.run_page import Evaluated, Level, Verdict, conclude

REWARD, GOLD, KL = "eval/reward_mean", "eval/judge/gold", "eval/kl"


def gained(metric: str, gain: float, low: float, high: float) -> Evaluated:
    return Evaluated(metric=metric, value=1.0, before=1.0 - gain, gain=gain,
                     gain_interval=(low, high))  # fmt: skip


def of(metric: str, value: float, *interval: float, **more: Any) -> Evaluated:
    return Evaluated(metric=metric, value=value, interval=interval or None, **more)  # type: ignore[arg-type]


def verdict(
    *evaluated: Evaluated, goal: tuple[str, str] = (REWARD, "max"), **facts: Any
) -> Verdict:
    given: dict[str, Any] = {"is_finished": True, "findings": 0, "sentence": None} | facts
    return conclude(evaluated, [goal], **given)


GOOD, LOSS = gained(REWARD, 0.5, 0.4, 0.6), ("eval/loss", "min")
ACCURACY = ("eval/accuracy", "max")
FALLEN = gained("eval/loss", -1.0, -1.1, -0.9)
UNIGRAM = of("eval/unigram_perplexity", 400.0)


@pytest.mark.parametrize(
    ("level", "evaluated", "facts"),
    [
        ("good", [GOOD], {}),
        ("doubtful", [gained(REWARD, 0.1, -0.1, 0.3)], {}),
        ("bad", [gained(REWARD, -0.5, -0.6, -0.4)], {}),
        ("doubtful", [GOOD, gained(GOLD, 0.0, -0.1, 0.1)], {}),
        ("bad", [GOOD, gained(GOLD, -0.2, -0.3, -0.1)], {}),
        ("doubtful", [GOOD], {"findings": 2}),
        ("doubtful", [GOOD], {"sentence": "s", "diverges": True}),
        ("doubtful", [GOOD], {"is_finished": False}),
        ("bad", [GOOD], {"rewards": [Verdict("bad", "Unfit.")]}),
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
        ("good", [FALLEN, of("eval/perplexity", 20.0), UNIGRAM], {"goal": LOSS}),
        ("good", [FALLEN, of("eval/perplexity", 0.0), UNIGRAM], {"goal": LOSS}),
    ],
)  # fmt: skip
def test_the_worst_fact_decides(
    level: Level, evaluated: list[Evaluated], facts: dict[str, Any]
) -> None:
    assert verdict(*evaluated, **facts).level == level


def test_the_sentence() -> None:
    kl = of(KL, 5.0, 4.0, 6.0)
    assert verdict(GOOD, gained(GOLD, -0.25, -0.3, -0.2), kl, findings=1, sentence="s").words == (
        "The reward on held-out prompts rose by 0.5 [0.4, 0.6] to 1; the gold score fell by 0.25 "
        "[0.2, 0.3] to 1; the KL to the SFT model is 5 [4, 6] nats a response; the diagnosis has 1 "
        "finding; s."
    )


def test_what_is_too_small_to_be_shown_did_not_change() -> None:
    found = verdict(gained(REWARD, 1e-9, 0.0, 0.0), Evaluated(metric=KL, value=-8.84e-07))
    assert "did not change" in found.words
    assert "0 [0, 0]" not in found.words
    assert "the KL to the SFT model is 0 nats" in found.words
