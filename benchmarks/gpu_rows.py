"""Rows of the check of a GPU: what each computes there, and what it measures."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from transformers import PreTrainedModel

import lightning_rlhf
import rollout
from common import ROOT, Iteration, random_prompts
from gpu_runs import (
    DTYPE,
    PRECISION,
    TINY,
    TRUE,
    CheckError,
    Found,
    Measure,
    Place,
    Row,
    agreement,
    overrides,
    summary,
)
from lightning_rlhf.kernels.patch import rounding_of
from lightning_rlhf.models.config import BASE
from lightning_rlhf.models.loading import load_causal_lm
from lightning_rlhf.models.roles import Roles
from machine import bandwidth, product_rate
from true_shape import SHAPE, make_checkpoint
from workloads import LONGEST, SHORTEST, Workload, prompts_of

ENDING_S = 10
"""Seconds in which a command that takes too long may end by itself."""


def dtype_of(row: Row) -> str:
    """Return the data type of the row's weights, as a configuration names it."""
    return str(DTYPE[row.shape]).removeprefix("torch.")


def limits(place: Place, row: Row, seconds: float) -> Found:
    """Measure the rates of products and memory, which the shares of all rows are taken of."""
    size, budget = (8192, 1.0) if place.device.type == "cuda" else (256, 0.01)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    rates = {
        name: 1e9 * product_rate((size, size, size), dtype, place.device, budget)
        for name, dtype in dtypes.items()
    }
    return Found(limits=rates | {"memory": 1e9 * bandwidth(place.device, budget)})


def make(place: Place, row: Row, seconds: float) -> Found:
    """Write the checkpoint of the true shape, unless an earlier check has."""
    if not (place.folder / "model").is_dir():
        make_checkpoint(place.folder / "unfinished", SHAPE)
        (place.folder / "unfinished").rename(place.folder / "model")
    return Found(note=str(place.folder / "model"))


def fit(
    place: Place, row: Row, words: tuple[str, ...], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Run a stage in a Trainer with these arguments; return what `Measure` has found."""
    settings = lightning_rlhf.configuration(row.stage, *overrides(place, row), *words)
    training, measure = lightning_rlhf.build(settings), Measure()
    L.Trainer(
        max_epochs=1, logger=False, callbacks=[measure], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=0, **arguments,
    ).fit(training.module, training.data)  # fmt: skip
    return measure.found


def stage(place: Place, row: Row, seconds: float) -> Found:
    """Run a stage on one GPU; the first step of the tiny shape is compared with the CPU's."""
    precision = PRECISION[row.shape]
    words = (*place.words, f"trainer.precision={precision}",
             f"trainer.weights_dtype={dtype_of(row)}")  # fmt: skip
    measured = fit(place, row, words, place.arguments(precision))
    return summary(measured, compared(place, row, measured))


def compared(place: Place, row: Row, measured: dict[str, Any]) -> str:
    """Return the agreement of a run of the tiny shape with one on the CPU, kept for all rows."""
    if row.shape != TINY:
        return ""
    file = place.folder / f"cpu_{row.stage}.json"
    if not file.exists():
        arguments = {"accelerator": "cpu", "devices": 1}
        plain = Row(name="", shape=TINY, work=stage, seconds=0, stage=row.stage)
        found = fit(place, plain, ("trainer=cpu",), arguments)["first"]
        file.write_text(json.dumps(found))
    return agreement(measured["first"], json.loads(file.read_text()))


def command(place: Place, row: Row, seconds: float) -> Found:
    """Run a stage on all GPUs by the command of a user."""
    name = row.name.replace(" ", "_").replace(",", "")
    file = place.folder / f"{name}.json"
    file.unlink(missing_ok=True)
    words = (
        f"stage={row.stage}", *overrides(place, row), *place.words, f"run={name}", "overwrite=true",
        f"trainer.devices={place.gpus if row.on_all else 1}", "preflight=off",
        f"trainer.precision={PRECISION[row.shape]}", f"trainer.weights_dtype={dtype_of(row)}",
        "+callbacks.check._target_=gpu_runs.Measure", f"+callbacks.check.file={file}",
    )  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{ROOT / 'src'}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if place.visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place.visible
    process = subprocess.Popen([sys.executable, "-m", "lightning_rlhf", *words], env=environment)
    try:
        status = process.wait(max(1.0, seconds - ENDING_S))
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        raise CheckError(f"it took more than {seconds - ENDING_S:.0f} s") from None
    measured = json.loads(file.read_text()) if file.exists() else {"fault": None}
    if status or not measured.get("phases"):
        raise CheckError(measured["fault"] or f"the command has ended with status {status}: see "
                         f"{place.folder / 'log.txt'}")  # fmt: skip
    return summary(measured, compared(place, row, measured))


def logits(place: Place, row: Row, seconds: float) -> Found:
    """Compare the logits of the model with the CPU's, after the fixed tokens of `Roles.probe`."""
    roles = Roles(load(place, row))
    expected = roles.probe(BASE)
    found = roles.to(place.device).probe(BASE)
    layers = roles.causal_lm.config.get_text_config().num_hidden_layers
    apart = float((found - expected).norm() / expected.norm())
    limit = rounding_of(DTYPE[row.shape], layers)
    if not apart <= limit:
        raise CheckError(f"the logits are {apart:.2g} from those of the CPU; allowed: {limit:.2g}")
    return Found(equality=f"logits to {apart:.0e}")


def load(place: Place, row: Row) -> PreTrainedModel:
    """Return the row's model on the CPU, in the data type of its shape."""
    words = (*overrides(place, row), "trainer=cpu", f"trainer.weights_dtype={dtype_of(row)}")
    config = lightning_rlhf.configuration(row.stage, *words).model
    return load_causal_lm(config, trainable=False, seed=0)


def generate(place: Place, row: Row, seconds: float) -> Found:
    """Sample beside `generate` of transformers."""
    settings = lightning_rlhf.configuration("ppo", *overrides(place, row), *place.words)
    module = lightning_rlhf.build(settings).module.to(place.device)
    workload = Workload(
        vocabulary=module.roles.vocab_size, episodes=settings.config.rollout_batch_size,
        response=settings.config.max_response_tokens,
    )  # fmt: skip
    lower = row.shape == TRUE
    with torch.autocast(place.device.type, torch.bfloat16, lower, cache_enabled=False):
        found = rollout.compare(module, prompts_of(workload), workload, 2, place.device)
    rates = {side: median(found["tokens_per_s"][side]) for side in ("ours", "peer")}
    return Found(
        tokens_per_s={"rollout": rates["ours"], "transformers": rates["peer"]},
        note=f"{rates['ours'] / rates['peer']:.2f} times transformers' generate",
    )


def trl(place: Place, row: Row, seconds: float) -> Found:
    """Run iterations of PPO beside TRL's PPOTrainer, with the same model and prompts."""
    import ours
    import trl_peer  # which imports trl
    from ppo_vs_trl import setting_of

    model = load(place, row)
    workload = Workload(vocabulary=model.config.get_text_config().vocab_size, episodes=16)
    setting = setting_of(workload, 3)
    prompts = random_prompts(
        3, workload.episodes, vocabulary=workload.vocabulary, shortest=SHORTEST, longest=LONGEST,
        seed=0,
    )  # fmt: skip
    taken: list[list[Iteration]] = [[], []]
    for side, iterations in zip((ours, trl_peer), taken, strict=True):
        side.train(copy.deepcopy(model), setting, prompts, iterations.append, device=place.device)
        gc.collect()
        torch.cuda.empty_cache()
    one, other = (median(i.seconds for i in iterations[1:]) for iterations in taken)
    return Found(note=f"{one:.2f} s an iteration, TRL {other:.2f} s: {other / one:.2f} times")


STAGES = ("sft", "rm", "dpo", "ppo")
FAST = ("model.kernels=fast",)
FLA = ("fla", "causal_conv1d")
VLLM = os.environ.get("LIGHTNING_RLHF_VLLM", "vllm")
"""Program of vLLM, in an environment of its own."""
SERVED = (
    "ppo.rollout=vllm", "rollout_server.start=true", f"rollout_server.command={VLLM}",
    "rollout_server.arguments=[--gpu-memory-utilization,'0.4']",
)  # fmt: skip
ROWS = (
    Row(name="limits of the GPU", shape="", work=limits, seconds=10),
    *(Row(name=f"{TINY} {s}", shape=TINY, work=stage, stage=s, seconds=5) for s in STAGES),
    Row(name="checkpoint", shape=TRUE, work=make, seconds=30),
    *(Row(name="logits", shape=shape, work=logits, seconds=10) for shape in (TINY, TRUE)),
    *(Row(name=f"{TRUE} {s}", shape=TRUE, work=stage, stage=s, seconds=20) for s in STAGES),
    Row(name="transformers' generate", shape=TINY, work=generate, seconds=5),
    Row(name="transformers' generate", shape=TRUE, work=generate, seconds=20),
    Row(name="TRL's PPO", shape=TINY, work=trl, seconds=20, needs=("trl",)),
    Row(name="TRL's PPO", shape=TRUE, work=trl, seconds=40, needs=("trl",)),
    Row(name="fast layers", shape=TINY, work=stage, words=FAST, seconds=5),
    Row(name="fast layers", shape=TRUE, work=stage, words=FAST, seconds=20),
    *(Row(name=f"bitsandbytes {kind}", shape=TRUE, work=stage, seconds=25, needs=("bitsandbytes",),
          words=(f"model.quantization={kind}",)) for kind in ("nf4", "int8")),
    Row(name="full weights", shape=TRUE, work=stage, words=("ppo.finetune=full",), seconds=25),
    *(Row(name=f"{TRUE} ppo, {way} sharded, all GPUs", shape=TRUE, work=command, seconds=50,
          words=("trainer.strategy=fsdp", f"ppo.finetune={way}"), on_all=True)
      for way in ("lora", "full")),
    Row(name="vLLM", shape=TRUE, work=command, words=SERVED, seconds=240, needs=(VLLM,)),
    Row(name="flash-linear-attention", shape=TRUE, work=logits, seconds=10, needs=FLA),
    *(Row(name=f"{TINY} {s}, all GPUs", shape=TINY, work=command, stage=s, seconds=35, on_all=True)
      for s in STAGES),
    *(Row(name=f"{TRUE} {s}, all GPUs", shape=TRUE, work=command, stage=s, seconds=50, on_all=True)
      for s in STAGES),
)  # fmt: skip
"""Rows in the order in which they are run; where the time is over, the last ones are left out."""
