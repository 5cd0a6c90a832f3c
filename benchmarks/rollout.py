"""Compare tokens per second of our `generate` with `model.generate` of transformers.

    python benchmarks/rollout.py [--quick] [--device cpu]

Both sides use the same policy with the same adapter, the same prompts and the same distribution
(temperature 1, no top-k, no top-p). The peer is measured with a separate adapter, the usual way,
and with the adapter merged into the weights. Ours also returns log-probabilities and values.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any
from unittest.mock import patch

import torch
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor

from common import markdown_table
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.kernels.lora import FusedLoRALinear
from lightning_rlhf.modules.ppo import PPOModule
from machine import in_turn, middle, options, write
from workloads import WORKLOADS, Workload, build_module, parameters, prompts_of

SIDES = ("ours", "peer", "peer, merged")


def measure(workload: Workload, repeats: int, device: torch.device) -> dict[str, Any]:
    """Return response tokens per second of each side, run in turn with a new seed each time."""
    found = compare(build_module(workload, device), prompts_of(workload), workload, repeats, device)
    return {"parameters": parameters(workload), **found}


def compare(
    module: PPOModule, prompts: Prompts, workload: Workload, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Return the tokens of each side, and response tokens a second without the first round.

    workload: sizes of the responses.
    """
    prompts = prompts.to(device)
    seeds = itertools.count()
    tokens: dict[str, list[int]] = {side: [] for side in SIDES}

    def ours() -> None:
        rollout = module.collector.roll_out(prompts, torch.Generator().manual_seed(next(seeds)))
        tokens["ours"].append(int(rollout.response_mask.sum()))

    def peer() -> None:
        with patch.object(FusedLoRALinear, "forward", LoRALinear.forward):
            count = peer_tokens(module, prompts, workload, next(seeds))
        tokens["peer"].append(count)

    def merged() -> None:
        with module.roles.merged():
            count = peer_tokens(module, prompts, workload, next(seeds))
        tokens["peer, merged"].append(count)

    works = dict(zip(SIDES, (ours, peer, merged), strict=True))
    times = in_turn(works, repeats, device)
    rates = {
        side: [n / s for n, s in zip(tokens[side][1:], times[side], strict=True)] for side in SIDES
    }
    return {"tokens": tokens, "tokens_per_s": rates}


def peer_tokens(module: PPOModule, prompts: Prompts, workload: Workload, seed: int) -> int:
    """Return the number of response tokens sampled by `model.generate`, end tokens included."""
    torch.manual_seed(seed)
    sampled: Tensor = module.roles.causal_lm.generate(
        input_ids=prompts.tokens,
        attention_mask=prompts.mask.long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=workload.response,
        eos_token_id=0 if workload.early_end else None,
        pad_token_id=0,
    )
    response = sampled[:, prompts.tokens.shape[1] :]
    if not workload.early_end:
        return response.numel()
    ended = (response == 0).cumsum(dim=1)
    return int(((ended == 0) | ((ended == 1) & (response == 0))).sum())


def main() -> None:
    args = options(str(__doc__))
    names = ["tiny", "tiny-eos"] if args.quick else list(WORKLOADS)
    results = {}
    for name in names:
        results[name] = measure(WORKLOADS[name], 3 if args.quick else 7, args.device)
        print(name, {s: middle(x, ".0f") for s, x in results[name]["tokens_per_s"].items()})
    rows = []
    for name, result in results.items():
        rates = result["tokens_per_s"]
        medians = {side: statistics.median(rates[side]) for side in SIDES}
        rows.append(
            [name, f"{result['parameters'] / 1e6:.2f}M"]
            + [middle(rates[side], ".0f") for side in SIDES]
            + [f"{medians['ours'] / medians[side]:.2f}" for side in SIDES[1:]]
        )
    header = ["workload", "model", "ours, tokens/s", "transformers, tokens/s",
              "transformers, adapter merged, tokens/s", "ours / transformers",
              "ours / merged"]  # fmt: skip
    write(
        args,
        "rollout",
        "Sampling responses",
        results,
        f"{WORKLOADS['tiny'].episodes} prompts of 16 to 32 tokens, responses of 48, or with `-eos` "
        "of 20 on the mean and at most 48. Median of "
        f"{len(next(iter(results.values()))['tokens_per_s']['ours'])} [smallest-largest], the "
        "sides in turn, after one round that warms up.",
        markdown_table(header, rows),
        "The peer is `model.generate` of transformers with do_sample, temperature 1, top_k 0 and "
        "top_p 1: first with the adapter beside the weights, as a user would have it, then with it "
        "merged into them; merging is timed with the rollout, in ours and in the merged peer. Ours "
        "also returns each token's log-probability and value, which the peer does not compute; "
        "with `tiny-critic` the value costs a forward pass of the critic's own adapter.",
    )


if __name__ == "__main__":
    main()
