"""Metrics of the updates of all stages that train."""

from __future__ import annotations

from lightning_rlhf.callbacks.definitions.metric import DPO, EVERY, PAIRS, PPO, RM, SFT, Metric

UPDATE: dict[str, Metric] = {
    "update/policy_loss": Metric(
        "mean over minibatches of the clipped surrogate",
        "1",
        "update",
        PPO,
        "near 0, slightly negative",
    ),
    "update/value_loss": Metric(
        "mean over minibatches of half the clipped squared error of the value",
        "score^2",
        "update",
        PPO,
        "falls in the first iterations",
    ),
    "update/kl_loss": Metric(
        "mean over minibatches of the KL to the reference in the loss, as kl_estimator says",
        "nats a token",
        "update",
        PPO,
        "as kl_divergence; 0 if the KL is in the reward",
    ),
    "update/ptx_loss": Metric(
        "mean over minibatches of the negative log-likelihood of a batch of demonstrations, mean "
        "over its target tokens; ptx_coef weighs it",
        "nats a token",
        "update",
        PPO,
        "no steep rise; 0 if ptx_coef is 0",
    ),
    "update/approx_kl": Metric(
        "mean over minibatches of KL(policy at sampling, policy now), estimator k3",
        "nats a token",
        "update",
        PPO,
        "below 0.05; above if steps are too large",
        band=(None, 0.05),
    ),
    "update/clip_fraction": Metric(
        "share of tokens whose ratio left the clip range",
        "share",
        "update",
        PPO,
        "below 0.3",
        band=(None, 0.3),
    ),
    "update/value_clip_fraction": Metric(
        "share of tokens whose value left its clip range",
        "share",
        "update",
        PPO,
        "below 0.5",
        band=(None, 0.5),
    ),
    "update/ratio_mean": Metric(
        "mean over minibatches of the mean probability ratio, policy now to policy at sampling",
        "1",
        "update",
        PPO,
        "within 0.01 of 1",
        band=(0.99, 1.01),
    ),
    "update/ratio_max": Metric(
        "largest probability ratio of any token in any minibatch",
        "1",
        "update",
        PPO,
        "below 10",
        band=(None, 10.0),
    ),
    "update/grad_norm": Metric(
        "gradient norm before clipping, of the logged step; in PPO the mean over minibatches",
        "1",
        "update",
        EVERY,
        "steady; spikes come before collapses",
    ),
    "update/steps": Metric(
        "optimizer steps taken in the iteration",
        "1",
        "update",
        PPO,
        "ppo_epochs x minibatches, unless target_kl or max_ratio is set",
    ),
    "update/skipped": Metric(
        "minibatches skipped because their mean ratio was above max_ratio", "1", "update", PPO, "0"
    ),
    "update/stopped": Metric(
        "1 if approx_kl above target_kl ended the epochs, else 0",
        "1",
        "update",
        PPO,
        "occasionally 1; always 1 if steps are too large",
    ),
    "update/nonfinite": Metric(
        "updates since the last row that were not made because loss or gradient is not finite",
        "1",
        "update",
        EVERY,
        "0",
    ),
    "update/kl_coef": Metric(
        "weight of the KL in this iteration's rewards or loss", "1", "update", PPO, "-"
    ),
    "update/lr": Metric(
        "learning rate of the first parameter group when the batch started",
        "1",
        "update",
        EVERY,
        "follows its schedule",
    ),
    "update/loss": Metric(
        "negative log-likelihood, mean over target tokens of the latest trainer.log_every_n_steps "
        "steps",
        "nats a token",
        "update",
        SFT,
        "falls",
    ),
    "update/perplexity": Metric("exp(update/loss)", "tokens", "update", SFT, "falls"),
    "update/rm_loss": Metric(
        "-log sigmoid(chosen - rejected), mean over pairs of the latest trainer.log_every_n_steps "
        "steps",
        "nats a pair",
        "update",
        RM,
        "falls below log 2 = 0.693, the loss of guessing",
        band=(None, 0.693),
    ),
    "update/accuracy": Metric(
        "share of the same pairs with chosen > rejected, a tie counting one half",
        "share",
        "update",
        PAIRS,
        "above 0.5; near 1 the model has memorised the pairs",
        band=(0.5, None),
    ),
    "update/reward_chosen": Metric(
        "mean reward of chosen; of stage=dpo the implicit one, beta log(policy / reference), of a "
        "token with loss_type sigmoid_norm and ipo",
        "reward",
        "update",
        PAIRS,
        "-",
    ),
    "update/reward_rejected": Metric(
        "mean reward of rejected, likewise", "reward", "update", PAIRS, "-"
    ),
    "update/reward_margin": Metric(
        "mean of chosen - rejected", "reward", "update", PAIRS, "grows, then flattens"
    ),
    "update/dpo_loss": Metric(
        "preference loss of loss_type with label_smoothing, without the SFT term, mean over pairs "
        "of the latest trainer.log_every_n_steps steps",
        "1",
        "update",
        DPO,
        "falls below that of the reference: log 2 = 0.693, with ipo 1 / (2 beta)^2",
    ),
    "update/logps_chosen": Metric(
        "mean over the same pairs of the log-probability of chosen under the policy",
        "nats a response",
        "update",
        DPO,
        "falls less than logps_rejected; far below its start the policy forgets what SFT learned: "
        "raise beta or sft_coef",
    ),
    "update/logps_rejected": Metric(
        "the same of rejected", "nats a response", "update", DPO, "falls"
    ),
    "update/sft_loss": Metric(
        "negative log-likelihood of the chosen responses, mean over their tokens; sft_coef weighs "
        "it",
        "nats a token",
        "update",
        DPO,
        "no steep rise",
    ),
}
