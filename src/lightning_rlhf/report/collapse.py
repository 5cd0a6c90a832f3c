"""Whether a policy has gone to where its numbers mean nothing: one line at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping

FAR = 1.0
"""Nats a token from the reference: its tokens are e times as likely as they were, on average."""
SURE = 0.01
"""Nats a token of entropy: the same token nearly always."""


def collapsed(row: Mapping[str, float]) -> str | None:
    """What the metrics of the last iteration say of a collapse; None where they say nothing.

    kl_divergence / response_tokens > FAR, or entropy < SURE.
    """
    per_token = row["kl_divergence"] / row["rollout/response_tokens"]
    found = []
    if not per_token <= FAR:  # NaN is far too
        found.append(f"kl_divergence is {per_token:.3g} nats a token (above {FAR:g})")
    if not row["entropy"] >= SURE:
        found.append(f"entropy is {row['entropy']:.3g} nats a token (below {SURE:g})")
    if not found:
        return None
    return (
        f"the policy has collapsed: {' and '.join(found)} in the last iteration. Look at samples/; "
        "a smaller ppo.lr, or a larger ppo.kl_coef, keeps it near the SFT model"
    )
