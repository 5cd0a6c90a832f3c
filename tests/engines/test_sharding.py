"""A base that two processes share, in every stage: the samples, metrics and weights of one.

`make engines-check` runs this; one case of each kind is among the tests of the modules.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks.stopping import WeightAverage

from ..cli.conftest import Workplace, given, pipeline, rows, tree, weights, workplace  # noqa: F401
from ..cli.test_processes import assert_close, assert_same_rows, in_processes
from ..modules.conftest import make_ppo, prompts, reward_adapters  # noqa: F401
from ..modules.experiences import Make
from ..modules.test_ptx import with_ptx
from ..modules.test_replicas import CASES, ITERATIONS, STEP, assert_all_same, assert_same, in_all
from ..modules.test_supervised import STAGES

SPREAD = {"qwen3": 0.2, "qwen3_5": 0.1}
"""Of the weights: linear attention magnifies rounding with it."""
WAYS = ("as it is", "recomputed", "averaged")
OTHERS = ("rloo", "dr_grpo", "reinforce++")
EVERY = CASES | {name: {"advantage": name, "samples_per_prompt": 4} for name in OTHERS}


def compare(
    make: Callable[[], Any], way: str, batches: list[Any], held_out: list[Any], folder: Path,
    *, magnified: bool = False, is_full: bool = False,
) -> None:  # fmt: skip
    """Bit for bit as in two processes with whole models, and as in one but for rounding.

    All with the library's layers. magnified: whether the run magnifies what the order of sums
    makes, so that it differs from one process with whole models too. is_full: whether gradients
    are summed in an order of their own.
    """

    def made() -> Any:
        module = make()
        module.roles._kernel_choice = "plain"
        module.roles._set_kernels()
        if way == "recomputed":
            module.roles.recompute_layers()
        return module

    callbacks = [WeightAverage(0.5)] if way == "averaged" else []
    both = partial(in_all, 2, made, batches, held_out, folder, callbacks=callbacks)
    (_, whole), (expected, found) = both(), both(shards=True)
    for one, other in [] if is_full else zip(found, whole, strict=True):
        assert_same(one, other)
        for name, weight in other["weights"].items():
            assert weight.equal(one["weights"][name]), name
    if not magnified:
        assert_all_same(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", [*SPREAD])
@pytest.mark.parametrize("case", EVERY)
def test_ppo(make_ppo: Make, architecture: str, case: str, way: str, tmp_path: Path) -> None:  # noqa: F811
    config = STEP | EVERY[case] | {"spread": SPREAD[architecture]}
    rows = config.get("rollout_batch_size", 8) // config.get("samples_per_prompt", 1)
    batches = [prompts(rows, seed=number) for number in range(ITERATIONS)]
    make = partial(with_ptx, make_ppo) if "ptx_batch_size" in config else make_ppo
    module = partial(make, architecture, **config)
    compare(
        module, way, batches, [prompts(2)], tmp_path,
        magnified="target_kl" in config or case == "reinforce++", is_full="finetune" in config,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", [*SPREAD])
@pytest.mark.parametrize("stage", [*STAGES])
def test_supervised(architecture: str, stage: str, way: str, tmp_path: Path) -> None:
    build, make_batch, _ = STAGES[stage]
    batch = make_batch()
    short = batch.select(slice(0, 3))
    compare(partial(build, architecture), way, [batch, short, batch], [batch, short], tmp_path)


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_a_run_resumes_bit_for_bit(pipeline: Workplace, finetune: str, tmp_path: Path) -> None:  # noqa: F811
    place = pipeline.copied(tmp_path / "work")
    words = ["stage=ppo", "ppo.critic=adapter", "trainer.strategy=fsdp", *given(place)]
    words += [f"ppo.finetune={finetune}", "ppo.rollout=hf"]
    found, folder = [], place.stage("ppo")
    for resume in ("overwrite=true", "resume=2"):
        in_processes(place, 2, *words, resume, folder=tmp_path).succeeded  # noqa: B018
        found.append((weights(folder), rows(folder)))
        shutil.rmtree(folder / "final")
    assert found[0] == found[1]


@pytest.mark.parametrize(("stage", "more"), [
    ("sft", ["sft.finetune=lora"]), ("sft", ["sft.finetune=full", "sft.final=2"]), ("rm", []),
    ("dpo", []), ("dpo", ["dpo.finetune=full"]),
    ("ppo", ["ppo.critic=model", "model.gradient_checkpointing=true"]),
    ("ppo", ["ppo.finetune=full"]),
])  # fmt: skip
def test_commands(pipeline: Workplace, stage: str, more: list[str], tmp_path: Path) -> None:  # noqa: F811
    """Of all stages, the critic of ppo on a base of its own, in one process, two and two shared.

    At the start of DPO every pair is a tie, but for rounding, which two copies of a base may have.
    """
    place = pipeline.copied(tmp_path / "work")
    parents = [] if stage == "sft" else given(place)[: 1 + (stage == "ppo")]
    words = [f"stage={stage}", *parents, *more]
    place.mini(*words, "run=one").succeeded  # noqa: B018
    for strategy in ("ddp", "fsdp"):
        outcome = in_processes(
            place, 2, *words, f"run={strategy}", f"trainer.strategy={strategy}", "preflight=strict",
            folder=tmp_path,
        )  # fmt: skip
        assert outcome.status == 0, outcome.err
        assert tree(place.stage(stage, strategy)).keys() == tree(place.stage(stage, "one")).keys()
        assert_close(place.stage(stage, strategy) / "final", place.stage(stage, "one") / "final")
        ties = {"update/accuracy"} if "dpo.finetune=full" in more else set()
        assert_same_rows(place.stage(stage, strategy), place.stage(stage, "one"), ties)


def test_callbacks_of_single_processes(
    workplace: Workplace,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one computes by itself before a checkpoint; the second one ends the run."""
    monkeypatch.syspath_prepend(workplace.folder)
    (workplace.folder / "own.py").write_text(
        "import os\n"
        "from lightning.pytorch import Callback\n"
        "class Own(Callback):\n"
        "    def on_train_batch_end(self, trainer, module, *_):\n"
        "        if os.environ['RANK'] == '0':\n"
        "            module.roles.probe(module.roles.role)\n"
        "        elif module.iteration == 5:\n"
        "            trainer.should_stop = True\n"
    )
    words = ["stage=sft", "sft.finetune=full", "trainer.strategy=fsdp", "sft.checkpoint_every=1"]
    words += ["+callbacks.x._target_=own.Own", "sft.checkpoint_minutes=0.001"]
    in_processes(workplace, 2, *words, folder=tmp_path).succeeded  # noqa: B018
    assert json.loads((workplace.stage("sft") / "ending.json").read_text())["last_step"] == 5
