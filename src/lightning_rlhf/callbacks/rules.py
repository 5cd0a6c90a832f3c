"""RULES: symptoms of faults in a run of PPO, with likely cause and remedy, the root causes first.

Where several rules apply in the same iteration, the order of RULES is the order of their findings:
data, reward, sampling, policy update, critic, outcome. A fault of one kind shows in the metrics of
the kinds behind it, seldom the other way round.
"""

from __future__ import annotations

from lightning_rlhf.callbacks.history import Rule
from lightning_rlhf.callbacks.outcome_rules import (
    reward_against_gold,
    reward_against_perplexity,
    reward_flat,
)
from lightning_rlhf.callbacks.rollout_rules import (
    groups_alike,
    kl_negative,
    length_extreme,
    nothing_ends,
    prompts_cut,
    responses_identical,
    responses_repeat,
    reward_constant,
)
from lightning_rlhf.callbacks.update_rules import (
    clip_fraction_high,
    clip_fraction_zero,
    critic_worse,
    entropy_collapse,
    kl_exploding,
    ratio_outliers,
    value_loss_rising,
)

RULES: tuple[Rule, ...] = (
    prompts_cut,
    groups_alike,
    reward_constant,
    nothing_ends,
    length_extreme,
    kl_negative,
    kl_exploding,
    entropy_collapse,
    ratio_outliers,
    clip_fraction_high,
    clip_fraction_zero,
    responses_identical,
    responses_repeat,
    critic_worse,
    value_loss_rising,
    reward_flat,
    reward_against_gold,
    reward_against_perplexity,
)
"""All rules, in the order of precedence."""


def rules_table() -> str:
    """Return RULES as a Markdown table."""
    lines = ["| rule | applies when | likely cause | what to do |", "|---|---|---|---|"]
    lines += [f"| `{r.name}` | {r.when} | {r.cause} | {r.remedy} |" for r in RULES]
    return "\n".join(lines)
