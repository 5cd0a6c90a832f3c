"""Detection of a collapsed policy, reported in one line at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping

FAR = 1.0
"""KL divergence in nats a token above which the policy has collapsed: its tokens are then on
average e times as likely as under the reference."""
SURE = 0.01
"""Entropy in nats a token below which the policy has collapsed: it nearly always picks the same
token."""


def collapsed(row: Mapping[str, float], stage: str = "ppo") -> str | None:
    """Return a description of the collapse that the last iteration's metrics show, or None.

    stage: name of the section whose keys the description names.

    A policy has collapsed if kl_divergence / response_tokens > FAR (or NaN), or entropy < SURE.
    """
    per_token = row["kl_divergence"] / row["rollout/response_tokens"]
    found = []
    if not per_token <= FAR:  # true of NaN as well
        found.append(f"kl_divergence is {per_token:.3g} nats a token (above {FAR:g})")
    if "entropy" in row and not row["entropy"] >= SURE:
        found.append(f"entropy is {row['entropy']:.3g} nats a token (below {SURE:g})")
    if not found:
        return None
    return (
        f"the policy has collapsed: {' and '.join(found)} in the last iteration. Look at samples/; "
        f"a smaller {stage}.lr, or a larger {stage}.kl_coef, keeps it near the SFT model"
    )
