"""The section `trainer` of a configuration: arguments of lightning.Trainer, and two more keys."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import Count, build, check_value, described, refuse_unknown
from lightning_rlhf.stages.stage import AUTO, TrainerConfig, section

GPU = {"precision": "bf16-mixed", "weights_dtype": "bfloat16"}
CPU = {"precision": "32-true", "weights_dtype": "float32"}
"""Values of the keys set to auto, on a GPU and on the CPU."""
PASSED: Mapping[str, Any] = {
    **dict.fromkeys(("callbacks", "max_time", "plugins", "profiler", "strategy"), Any),
    **dict.fromkeys(("benchmark", "enable_model_summary", "enable_progress_bar"), bool | None),
    "detect_anomaly": bool,
    "deterministic": Annotated[bool | Literal["warn"] | None, described("true, false, warn, null")],
    "limit_val_batches": Annotated[
        Count | Annotated[float, Field(gt=0, le=1)],
        described("a whole number >= 1, or a share up to 1.0: evaluations tell the best step"),
    ],
}
"""Arguments of lightning.Trainer that are passed on unchanged -> type; Lightning checks Any."""
STRATEGIES = (AUTO, "single_device")
"""Strategies of Lightning, by name, with which a run computes."""
_LENGTH = "a run is one epoch: sft.epochs, rm.epochs or ppo.iterations say how long it is"
_RHYTHM = "val_every in the section of the stage says when a run evaluates"
_LOOP = "a run trains and evaluates on all of its data, in an order that it resumes"
OWNED: Mapping[str, str] = {
    "accumulate_grad_batches": "microbatch_size in the section of the stage splits a batch",
    "barebones": "a run writes metrics and checkpoints",
    "check_val_every_n_epoch": _RHYTHM,
    "default_root_dir": "outputs, run and job name the folder of a run",
    "enable_autolog_hparams": "config.json in the run's folder holds the configuration",
    "enable_checkpointing": "checkpoint_every in the section of the stage says when a run is saved",
    "fast_dev_run": "ppo.iterations=1, or a small sft.epochs or rm.epochs, is a short run",
    "gradient_clip_algorithm": "max_grad_norm in the section of the stage clips the norm",
    "gradient_clip_val": "max_grad_norm in the section of the stage clips the gradient",
    "inference_mode": "evaluations take what they need",
    "limit_predict_batches": _LOOP,
    "limit_test_batches": _LOOP,
    "limit_train_batches": _LENGTH,
    "logger": "the group logger says where metrics go",
    "max_epochs": _LENGTH,
    "max_steps": _LENGTH,
    "min_epochs": _LENGTH,
    "min_steps": _LENGTH,
    "model_registry": "checkpoints are files in the run's folder",
    "num_sanity_val_steps": _RHYTHM,
    "overfit_batches": _LOOP,
    "reload_dataloaders_every_n_epochs": _LOOP,
    "sync_batchnorm": _LOOP,
    "use_distributed_sampler": _LOOP,
    "val_check_interval": _RHYTHM,
}
"""Arguments of lightning.Trainer that a stage sets itself -> what to use instead."""


def read_trainer(node: Any) -> TrainerConfig:
    """Return the section, checked. Raises ConfigError naming the key."""
    node = section({"trainer": node}, "trainer")
    for key, reason in OWNED.items():
        if key in node:
            raise ConfigError(f"trainer.{key} is {node[key]!r}, but it is not to be set: {reason}")
    ours = {key for key in TrainerConfig.__dataclass_fields__ if key != "options"}
    refuse_unknown(node, {*ours, *PASSED, "_target_"}, "trainer.")
    is_named = "strategy" in node and isinstance(node["strategy"], str)
    if is_named and node["strategy"] not in STRATEGIES:
        raise ConfigError(
            f"trainer.strategy is {node['strategy']!r}, but the processes of a run "
            f"(trainer.devices, trainer.num_nodes) sum their gradients themselves; allowed: "
            f"{', '.join(STRATEGIES)}"
        )
    for key, kind in PASSED.items():
        if key in node:
            check_value(f"trainer.{key}", node[key], kind)
    options = {key: node[key] for key in node if key in (*PASSED, "_target_")}
    options = {"_target_": "lightning.Trainer", **options}
    mine = {key: node[key] for key in node if key in ours}
    return build(TrainerConfig, {**mine, "options": options}, "trainer")


def resolve_auto(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in which trainer=auto is replaced by settings for this machine.

    A GPU that torch can use gets bf16-mixed with frozen weights in bfloat16; else the CPU is used
    in float32. A model with random weights (model.from_config) is small and stays on the CPU.
    """
    trainer, model = tree["trainer"], tree["model"]
    if not isinstance(trainer, Mapping) or not isinstance(model, Mapping):
        return tree
    trainer, model = dict(trainer), dict(model)
    if is_auto(trainer, "accelerator"):
        is_small = "from_config" in model and model["from_config"] is not None
        trainer["accelerator"] = "gpu" if not is_small and has_gpu() else "cpu"
    values = GPU if trainer == trainer | {"accelerator": "gpu"} else CPU
    trainer |= {key: value for key, value in values.items() if is_auto(trainer, key)}
    if is_auto(model, "dtype"):
        model["dtype"] = trainer["weights_dtype"]
    return {**tree, "trainer": trainer, "model": model}


def is_auto(node: Mapping[str, Any], key: str) -> bool:
    """Return whether the key is present and its value is auto."""
    return key in node and node[key] == AUTO


def has_gpu() -> bool:
    """Return whether torch was built for CUDA and the driver has a device; imports no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = ast.parse(Path(spec.origin).with_name("version.py").read_text())
    for line in version.body:
        if ast.unparse(line).startswith("cuda") and ast.unparse(line).endswith("None"):
            return False
    return driver_has_gpu()


def driver_has_gpu() -> bool:
    """Return whether this machine has a CUDA driver with a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit, driver.cuDeviceGetCount  # noqa: B018
    except (OSError, AttributeError):  # no driver, or a library that only has its name
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and (count.value > 0)
    )
