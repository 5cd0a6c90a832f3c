"""What decoding saves by rounding fp32 weights once, and by packing a large output layer.

python benchmarks/decoding.py [--quick] [--device cpu] [--clock cpu]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from common import markdown_table
from lightning_rlhf.kernels import decoding, lora
from lightning_rlhf.modules.ppo import TRAINING
from machine import middle, options, write
from update import in_contexts
from workloads import Workload, build_module, parameters, prompts_of

BF16 = torch.bfloat16
MIXED = Workload(vocabulary=16384, hidden=512, layers=6, intermediate=1408)
LARGE = Workload(
    vocabulary=151_936, hidden=1024, layers=2, intermediate=3072, response=32, dtype=BF16
)
STEP_OFF, UNPACKED = "decoding step off", "output layer not packed"
SWITCHES: dict[str, Callable[[], Any]] = {
    STEP_OFF: partial(patch.object, decoding, "decode_step", lambda *_: None),
    UNPACKED: partial(patch.object, lora, "LARGEST_BF16", 2**26),
}
"""What is switched off, with the context that does it: 2**26 is above the layers' weights."""
WORKLOADS = {
    "fp32 weights under bf16 autocast": (MIXED, STEP_OFF),
    "bf16 weights": (replace(MIXED, dtype=BF16), STEP_OFF),
    "vocabulary 151,936, 8 rows": (replace(LARGE, episodes=8), UNPACKED),
    "vocabulary 151,936, 32 rows": (LARGE, UNPACKED),
    "vocabulary 248,320, 8 rows": (replace(LARGE, vocabulary=248_320, episodes=8), UNPACKED),
    "vocabulary 248,320, 32 rows": (replace(LARGE, vocabulary=248_320), UNPACKED),
}


def measure(
    workload: Workload, switch: str, repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of rollouts under bf16 autocast, as they are and with the switch."""
    module = build_module(workload, device)
    prompts = prompts_of(workload).to(device)

    def rollout(turn: int) -> None:
        module.collector.roll_out(prompts, module.generator(TRAINING, 0))

    with torch.autocast(device.type, BF16):
        contexts = {"as it is": nullcontext, switch: SWITCHES[switch]}
        return in_contexts(contexts, rollout, repeats, device)


def main() -> None:
    args = options(str(__doc__))
    results, rows = {}, []
    names = list(WORKLOADS)[:1] if args.quick else list(WORKLOADS)
    for name in names:
        workload, switch = WORKLOADS[name]
        found = measure(workload, switch, 3 if args.quick else 7, args.device)
        results[name] = found
        ratios = [a / b for a, b in zip(found[switch], found["as it is"], strict=True)]
        rows.append(
            [name, f"{parameters(workload) / 1e6:.0f}M", switch]
            + [middle(found[way], ".2f") for way in ("as it is", switch)]
            + [middle(ratios, ".2f")]
        )
        print(rows[-1])
    header = ["workload", "model", "switched off", "as it is, s", "switched off, s", "ratio"]
    write(
        args,
        "decoding",
        "What the decoding step and a packed output layer save",
        results,
        "A whole rollout under bf16 autocast: prompts of 16 to 32 tokens are read, weights are "
        f"copied, and {MIXED.response} tokens are decoded for each of 32 rows; with a large "
        f"vocabulary they are {LARGE.response} tokens, by models of {LARGE.layers} layers of "
        f"width {LARGE.hidden}. Median [smallest-largest], with and without in turn, after one "
        "round that warms up; ratios are of the same round.",
        markdown_table(header, rows),
        "Without the decoding step (`model.kernels=plain` has none) the model's own layers decode; "
        "they round fp32 weights at every token. An output layer that is not packed is read in the "
        "layout of the model.",
    )


if __name__ == "__main__":
    main()
