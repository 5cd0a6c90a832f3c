"""Metrics of time, compute and memory."""

from __future__ import annotations

from lightning_rlhf.callbacks.definitions.metric import EVERY, PPO, Metric

COST: dict[str, Metric] = {
    "time/rollout_s": Metric("sampling responses with their values", "s", "time", PPO, "-"),
    "time/score_s": Metric("scoring by the reward source and the reference", "s", "time", PPO, "-"),
    "time/update_s": Metric("all optimizer steps of the iteration", "s", "time", PPO, "-"),
    "time/iteration_s": Metric("rollout_s + score_s + update_s", "s", "time", PPO, "steady"),
    "time/other_s": Metric(
        "from the end of the iteration before: evaluation, logs, samples, checkpoints, data",
        "s",
        "time",
        PPO,
        "small compared with iteration_s, except where one of these is due",
    ),
    "time/tokens_per_s": Metric("response tokens / iteration_s", "tokens/s", "time", PPO, "steady"),
    "time/episodes_per_s": Metric("responses / iteration_s", "1/s", "time", PPO, "steady"),
    "compute/generated_tokens": Metric(
        "response tokens sampled so far, end tokens included", "tokens", "compute", PPO, "-"
    ),
    "compute/scored_tokens": Metric(
        "prompt and response tokens read without a gradient so far, once for each model that reads "
        "them: reference, reward models, a critic apart, the policy where it annotates",
        "tokens",
        "compute",
        PPO,
        "-",
    ),
    "compute/trained_tokens": Metric(
        "prompt and response tokens read with a gradient so far, once for each epoch of PPO",
        "tokens",
        "compute",
        EVERY,
        "-",
    ),
    "compute/rollout_flops": Metric(
        "floating-point operations of sampling so far", "FLOP", "compute", PPO, "-"
    ),
    "compute/score_flops": Metric(
        "floating-point operations of the reference and the reward models so far",
        "FLOP",
        "compute",
        PPO,
        "-",
    ),
    "compute/update_flops": Metric(
        "floating-point operations of all updates so far", "FLOP", "compute", PPO, "-"
    ),
    "compute/flops": Metric(
        "floating-point operations so far: from 2 to 6 for each weight and real token, and "
        "attention; in PPO rollout_flops + score_flops + update_flops; evaluation is not counted",
        "FLOP",
        "compute",
        EVERY,
        "-",
    ),
    "compute/device_s": Metric(
        "time of the training steps so far, in PPO the sum of time/iteration_s, times the number "
        "of processes",
        "s",
        "compute",
        EVERY,
        "-",
    ),
    "compute/peak_memory": Metric(
        "largest memory so far: of tensors on a GPU, else of the process",
        "bytes",
        "compute",
        EVERY,
        "below what the machine has",
    ),
}
