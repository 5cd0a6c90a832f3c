"""The verdict of a run: its level and its sentence follow from facts."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.report.run_page import Evaluated, Level, Verdict, conclude

REWARD, GOLD, KL = "eval/reward_mean", "eval/judge/gold", "eval/kl"


def gained(metric: str, gain: float, low: float, high: float) -> Evaluated:
    return Evaluated(metric=metric, value=1.0, before=1.0 - gain, gain=gain,
                     gain_interval=(low, high))  # fmt: skip


def verdict(*evaluated: Evaluated, **facts: Any) -> Verdict:
    given = {"is_finished": True, "findings": 0, "sentence": None} | facts
    return conclude(evaluated, [(REWARD, "max")], **given)


GOOD = gained(REWARD, 0.5, 0.4, 0.6)


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
    ],
)  # fmt: skip
def test_the_worst_fact_decides(
    level: Level, evaluated: list[Evaluated], facts: dict[str, Any]
) -> None:
    assert verdict(*evaluated, **facts).level == level


def test_the_sentence() -> None:
    kl = Evaluated(metric=KL, value=5.0, interval=(4.0, 6.0))
    assert verdict(GOOD, gained(GOLD, -0.25, -0.3, -0.2), kl, findings=1, sentence="s").words == (
        "The reward on held-out prompts rose by 0.5 [0.4, 0.6] to 1; the gold score fell by 0.25 "
        "[0.2, 0.3] to 1; the KL to the SFT model is 5 [4, 6] nats a response; the diagnosis has 1 "
        "finding; s."
    )


def test_a_loss_is_better_when_it_falls() -> None:
    goal: Any = [("eval/loss", "min")]
    for gain, level in ((-0.5, "good"), (0.5, "doubtful")):
        one = Evaluated(metric="eval/loss", value=1.0, gain=gain)
        assert conclude([one], goal, is_finished=True, findings=0, sentence=None).level == level


def test_accuracy_is_held_against_guessing() -> None:
    """Accuracy 0.6: above 0.5 beyond doubt with [0.55, 0.65], not with [0.45, 0.75]."""
    goal: Any = [("eval/accuracy", "max")]
    for interval, level in (((0.55, 0.65), "good"), ((0.45, 0.75), "doubtful")):
        one = Evaluated(metric="eval/accuracy", value=0.6, interval=interval)
        assert conclude([one], goal, is_finished=True, findings=0, sentence=None).level == level


@pytest.mark.parametrize(
    ("perplexity", "level"), [(198.0, "doubtful"), (20.0, "good"), (0.0, "good")]
)
def test_a_model_that_knows_little_more_than_frequencies_is_not_good(
    perplexity: float, level: Level
) -> None:
    """Of a unigram perplexity of 400, three quarters of the loss are 400^(3/4) = 89.

    0 is no perplexity, but a manifest from elsewhere may have it.
    """
    loss = gained("eval/loss", -1.0, -1.1, -0.9)
    values = {"eval/perplexity": perplexity, "eval/unigram_perplexity": 400.0}
    scale = [Evaluated(metric=name, value=value) for name, value in values.items()]
    found = conclude(
        [loss, *scale], [("eval/loss", "min")], is_finished=True, findings=0, sentence=None
    )
    assert found.level == level
    assert ("learned little" in found.words) == (level == "doubtful")


def test_what_is_too_small_to_be_shown_did_not_change() -> None:
    found = verdict(gained(REWARD, 1e-9, 0.0, 0.0), Evaluated(metric=KL, value=-8.84e-07))
    assert "did not change" in found.words
    assert "0 [0, 0]" not in found.words
    assert "the KL to the SFT model is 0 nats" in found.words
