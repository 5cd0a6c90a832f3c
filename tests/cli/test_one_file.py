"""examples/ppo_in_one_file.py: its first iterations are those of stage=ppo of the quickstart."""

import ast
import contextlib
import runpy
import sys
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

import lightning_rlhf
from lightning_rlhf.core.results import RESULT, IterationResult
from lightning_rlhf.runs.console import HOME

from .conftest import PRESETS, Workplace

FILE = HOME / "examples" / "ppo_in_one_file.py"
ITERATIONS = 3
ALLOWED = {"torch", "transformers", "peft", "numpy"} | sys.stdlib_module_names


class Iterations(Callback):
    """The results of all iterations."""

    def __init__(self) -> None:
        self.found: list[IterationResult] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.found.append(outputs[RESULT])


def test_it_is_short_and_imports_nothing_of_the_package() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    tree = ast.walk(ast.parse(text))
    imports = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= ALLOWED


def test_its_first_iterations_are_those_of_the_package(workplace: Workplace) -> None:
    """The models of some steps on a few rows, and all other numbers those of the quickstart."""
    few = ("--config-dir", str(PRESETS), "data=small", "preflight=off")
    workplace.call(*few, "stage=sft", "sft.epochs=8").succeeded  # noqa: B018
    workplace.call(*few, "stage=rm", "rm.epochs=4", "rm.calibration_samples=16").succeeded  # noqa: B018
    with contextlib.chdir(workplace.folder):
        settings = lightning_rlhf.configuration("ppo", "reward.unfit=warn")
        training = lightning_rlhf.build(settings)
        theirs = Iterations()
        trainer = L.Trainer(
            max_epochs=1, limit_train_batches=ITERATIONS, limit_val_batches=0, accelerator="cpu",
            logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[theirs],
        )  # fmt: skip
        trainer.fit(training.module, training.data)
        folder = workplace.outputs / "default" / "tiny"
        train = runpy.run_path(str(FILE))["train"]
        ours = [*islice(train(*(str(folder / s / "final") for s in ("sft", "rm"))), ITERATIONS)]
    assert len(ours) == len(theirs.found) == ITERATIONS
    for (experience, updates), result in zip(ours, theirs.found, strict=True):
        for name in ("score", "rewards", "advantages", "returns"):
            found, expected = getattr(experience, name), getattr(result.experience, name)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for number, name in enumerate(("loss", "entropy")):
            expected = torch.stack([getattr(update, name) for update in result.updates])
            torch.testing.assert_close(updates[:, number], expected, rtol=0, atol=1e-5)
    assert ours[-1][0].kl.abs().max() > 1e-3, "the policy has moved"
