"""Metrics of PPO's headline and of its rollouts."""

from __future__ import annotations

from lightning_rlhf.callbacks.definitions.metric import PPO, Metric

ROLLOUT: dict[str, Metric] = {
    "reward_mean": Metric(
        "mean over responses of the score, before any KL penalty",
        "score",
        "rollout",
        PPO,
        "rises, then flattens; 0 is what the SFT model gets on training prompts",
    ),
    "kl_divergence": Metric(
        "mean over responses of sum_t kl_t, policy against reference",
        "nats a response",
        "rollout",
        PPO,
        "starts at 0, grows slowly; growth without end is reward hacking",
    ),
    "entropy": Metric(
        "mean over minibatches of the mean entropy of a token's distribution",
        "nats a token",
        "update",
        PPO,
        "falls slowly; near 0 the policy has collapsed",
    ),
    "ppo_loss": Metric(
        "mean over minibatches of policy_loss + kl_coef kl_loss + vf_coef value_loss "
        "- ent_coef entropy + ptx_coef ptx_loss",
        "1",
        "update",
        PPO,
        "near 0 and noisy; not a sign of progress in either direction",
    ),
    "rollout/reward_std": Metric(
        "standard deviation of the score over responses, denominator B",
        "score",
        "rollout",
        PPO,
        "above 0; at 0 there is nothing to learn; a warning after three iterations",
        band=(0.0, None),
    ),
    "rollout/reward_min": Metric("smallest score of the batch", "score", "rollout", PPO, "-"),
    "rollout/reward_max": Metric("largest score of the batch", "score", "rollout", PPO, "-"),
    **{
        f"rollout/score_p{p:02d}": Metric(
            f"{p}% quantile of the score over responses, linear between neighbours (numpy's "
            "default)",
            "score",
            "rollout",
            PPO,
            healthy,
        )
        for p, healthy in (
            (5, "rises too; alone at the bottom it shows responses that still fail"),
            (25, "-"),
            (50, "follows reward_mean"),
            (75, "-"),
            (95, "far from score_p50 only while responses differ"),
        )
    },
    "rollout/groups_alike": Metric(
        "share of prompts whose responses all have the same score, from which rloo, grpo and "
        "dr_grpo learn nothing but the KL",
        "share",
        "rollout",
        PPO,
        "below 0.5; near 1 nothing is learned: harder or easier prompts, more samples_per_prompt",
    ),
    "rollout/reward/<component>": Metric(
        "mean over responses of one of several components of the reward, before its weight",
        "the component's",
        "rollout",
        PPO,
        "no component rises at the cost of all others",
    ),
    "rollout/reward_paid": Metric(
        "mean over responses of the score that PPO is paid, before its own shaping; only if a "
        "component has a running normalization or a clip",
        "score",
        "rollout",
        PPO,
        "follows reward_mean; near 0 by construction with running normalization",
    ),
    "rollout/reward_paid_range": Metric(
        "largest less smallest of the same scores; only where reward_paid is logged",
        "score",
        "rollout",
        PPO,
        "above 0",
    ),
    "rollout/kl_std": Metric(
        "standard deviation over responses of sum_t kl_t, denominator B",
        "nats a response",
        "rollout",
        PPO,
        "of the size of kl_divergence; kl_std / sqrt(B) is the standard error of kl_divergence",
    ),
    "rollout/most_common": Metric(
        "share of responses that equal the most common response of the batch, token for token",
        "share",
        "rollout",
        PPO,
        "below 0.5, unless the answers to all prompts are the same few",
    ),
    "rollout/repetition": Metric(
        "share of 4-grams of tokens that occurred earlier in the same response, over all responses",
        "share",
        "rollout",
        PPO,
        "below 0.1; 0.4 is a loop of the same words",
    ),
    "rollout/response_tokens": Metric(
        "mean over responses of their tokens, end token included",
        "tokens",
        "rollout",
        PPO,
        "no steady drift to the limit or to 1",
    ),
    "rollout/ended": Metric(
        "share of responses that end with an end token or stop string",
        "share",
        "rollout",
        PPO,
        "near 1",
    ),
    "rollout/padding": Metric(
        "share of padding among the positions read for scoring, microbatch_size rows at a time",
        "share",
        "rollout",
        PPO,
        "lower costs less; a smaller microbatch_size lowers it, with more passes",
    ),
    "rollout/shaped_return": Metric(
        "mean over responses of sum_t rewards_t: the shaped score, less the KL if kl_in=reward",
        "score",
        "rollout",
        PPO,
        "rises; this is what PPO maximises (with ppo.kl_in=loss, less the KL)",
    ),
    "rollout/value_mean": Metric(
        "mean over response tokens of the critic's value at sampling time; 0 without a critic",
        "score",
        "rollout",
        PPO,
        "follows shaped_return",
    ),
    "rollout/explained_variance": Metric(
        "1 - Var(returns - values) / Var(returns) over tokens; nan if no variance; 0 if no critic",
        "1",
        "rollout",
        PPO,
        "above 0 after warm-up; below 0 the critic hurts",
        band=(0.0, None),
    ),
}
