"""Advice on running PPO with a reward, from the findings of its checks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_rlhf.report.checks import (
    ACCURACY,
    BEATS_LENGTH,
    LENGTH_CORRELATION,
    LENGTH_GAP,
    OUTSIDE,
    OVERCONFIDENCE,
    PROBE,
    Check,
    Finding,
)
from lightning_rlhf.report.findings import is_unfit

LOOK_FOR: Sequence[tuple[set[Check], str]] = (
    ({BEATS_LENGTH, LENGTH_GAP, LENGTH_CORRELATION},
     "watch `rollout/response_tokens`, since length may be what is paid"),
    ({OVERCONFIDENCE}, "trust its order more than its distances"),
    ({OUTSIDE}, "distrust the scores where PPO starts, which lie where nobody measured"),
    ({PROBE}, "look in the samples for what the flagged probes show"),
)  # fmt: skip
"""Sets of checks, each with the advice that is given if one of them is flagged."""


def for_ppo(findings: Sequence[Finding], in_pairs: Sequence[Finding]) -> str:
    """Return the advice as a short paragraph.

    Args:
        findings: findings about the reward.
        in_pairs: findings about the pairs; may be empty.
    """
    flags = [finding.check for finding in findings if finding.outcome == "flag"]
    named = [finding.subject for finding in in_pairs if finding.outcome == "flag"]
    untold = any(f.check is ACCURACY and f.outcome == "not tested" for f in findings)
    if untold:
        words = "It may run, but nothing says that what it is paid is what people chose: hold out "
        words += "more pairs, of more prompts, and measure again."
    elif is_unfit(findings):
        words = "Do not run it on this reward: it would maximise what is not surely better than "
        words += "guessing."
    elif flags:
        watched = [advice for checks, advice in LOOK_FOR if checks & set(flags)]
        words = f"It may run, with an eye on the flags: {'; '.join(watched)}."
    else:
        words = "It may run. Read its samples all the same: a reward that rises while they get "
        words += "worse has found a weak spot that no check here looks for."
    if named:
        words += f" The pairs are flagged ({', '.join(named)}): mend them and train again first."
    return words
