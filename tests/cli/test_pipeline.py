"""SFT, reward model and PPO one after another: what they leave, repeat and take up again."""

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks.files import numbered
from lightning_rlhf.core.metrics import MACHINE

from .conftest import MINI, MODULE, STAGES, Workplace, forking, rows, weights

STEPS = {"sft": 6, "rm": 6, "ppo": 3}
"""Batches of each stage: 0.75 * 32 / 4, and ppo.iterations."""


def manifest(stage_folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage_folder / "final" / "manifest.json").read_text())
    return found


def samples(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "samples").glob("*")}


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MACHINE)}


# What a stage leaves.


@pytest.mark.parametrize("stage", STAGES)
def test_the_run_folder(pipeline: Workplace, stage: str) -> None:
    folder = pipeline.stage(stage)
    last = f"checkpoints/{STEPS[stage]:06d}.ckpt"
    head = {"sft": "model", "rm": "roles/reward_head", "ppo": "roles/value_head"}[stage]
    files = [f"final/{head}.safetensors", "final/roles/fingerprint.safetensors", "metrics.csv",
             "final/manifest.json", "final/tokenizer.json", "final/chat_template.jinja",
             "config.json", last, "checkpoints/best.ckpt", "curves.png"]  # fmt: skip
    if stage != "sft":
        files += ["final/adapter_model.safetensors", "final/adapter_config.json"]
    for name in files:
        assert (folder / name).stat().st_size > 0, name
    assert not [*folder.rglob("*.tmp"), *folder.parent.glob("*.lock")]
    # val_every 2 of 3 iterations: before the first, after the second, and at the end.
    evaluations = {"sft": [2, 4, 6], "rm": [], "ppo": [0, 2, 3]}[stage]
    found = sorted(path.name for path in (folder / "samples").glob("eval_*"))
    assert stage != "ppo" or found == [f"eval_{i:06d}.jsonl" for i in evaluations]
    assert (folder / "samples").is_dir() == (stage != "rm")

    written = json.loads((folder / "config.json").read_text())
    assert written == manifest(folder)["config"]
    assert [name for name in STAGES if name in written] == [stage]


def test_what_manifests_say(pipeline: Workplace) -> None:
    """Parents by paths from their own folder, so that outputs/ can be moved; adapters name the
    model that they stand on, so that PeftModel.from_pretrained finds it."""
    found = {stage: manifest(pipeline.stage(stage)) for stage in STAGES}
    finals = {stage: f"../../{stage}/final" for stage in STAGES}
    assert [found[stage]["parents"] for stage in STAGES] == [
        {}, {"sft": finals["sft"]}, {"sft": finals["sft"], "reward": finals["rm"]}
    ]  # fmt: skip
    for stage in ("rm", "ppo"):
        adapter = json.loads((pipeline.stage(stage) / "final/adapter_config.json").read_text())
        base = (pipeline.stage("sft") / "final").resolve()
        assert Path(adapter["base_model_name_or_path"]) == base
    names = {"sft": "loss", "rm": "accuracy", "ppo": "reward_mean"}
    for stage, name in names.items():
        metrics = found[stage]["metrics"]
        assert {f"eval/{name}", "time/stage_s", "compute/flops"} <= metrics.keys()
        assert all(abs(value) < float("inf") for value in metrics.values()), stage
    assert found["ppo"]["metrics"]["start/eval/kl"] == pytest.approx(0.0, abs=1e-4)
    by_step = {int(row["step"]): row for row in rows(pipeline.stage("ppo"))}
    for iteration in (1, 2, 3):
        assert {"reward_mean", "kl_divergence", "entropy", "ppo_loss"} <= by_step[iteration].keys()


def test_a_reward_is_scaled_on_samples_of_the_model_before_its_training(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full fine-tuning of the reward model changes the very weights that spoke."""
    from lightning_rlhf.evaluation import evaluate_reward
    from lightning_rlhf.rollout import collector
    from lightning_rlhf.stages import fit

    order = []
    for name, module in {
        "sft_samples": evaluate_reward, "trainer_of": fit, "reward_moments": collector,
    }.items():  # fmt: skip
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name,
            lambda *args, name=name, original=original, **kwargs: (
                order.append(name), original(*args, **kwargs))[1],
        )  # fmt: skip
    finished.mini("stage=rm", "rm.finetune=full", "job=full").succeeded  # noqa: B018
    assert order == ["sft_samples", "trainer_of", "reward_moments"]


# Cut off and taken up again.


@pytest.mark.parametrize(
    ("stage", "cuts"),
    [
        ("ppo", [("step", 1), ("evaluation", 2), ("step", 3), ("hand_over", 0)]),
        pytest.param("rm", [("step", 5), ("hand_over", 0)], marks=pytest.mark.matrix),
    ],
)
def test_a_run_that_was_cut_off_ends_as_the_unbroken_one(
    finished: Workplace, pipeline: Workplace, monkeypatch: pytest.MonkeyPatch,
    cut: Callable[[str, int], None],
    stage: str, cuts: list[tuple[str, int]],
) -> None:  # fmt: skip
    """Again and again: after the first and the last step, in an evaluation, before the end."""
    folder = finished.stage(stage)
    shutil.rmtree(folder)
    for number, (where, step) in enumerate(cuts):
        cut(where, step)
        broken = finished.mini(f"stage={stage}", *["resume=true"][:number])
        assert broken.status == 1
        assert "PowerCut" in broken.err
        assert not (folder / "final").exists()
        monkeypatch.undo()

    assert "was cut off. Give resume=true" in finished.mini(f"stage={stage}").error
    finished.mini(f"stage={stage}", "resume=true").succeeded  # noqa: B018
    unbroken = pipeline.stage(stage)
    assert weights(folder) == weights(unbroken)
    assert untimed(manifest(folder)["metrics"]) == untimed(manifest(unbroken)["metrics"])
    assert rows(folder) == rows(unbroken)
    assert samples(folder) == samples(unbroken)


def test_what_changes_nothing_may_be_resumed_with(finished: Workplace) -> None:
    """Another value of anything else is refused by its key."""
    shutil.rmtree(finished.stage("sft") / "final")
    for word in ("sft.lr=0.5", "+data.chat_template_kwargs.x=1"):
        error = finished.mini("stage=sft", "resume=true", word).error
        key = word.lstrip("+").split("=")[0].removesuffix(".x")
        assert f"cannot be resumed: {key}" in error
        assert "config.json" in error
    changed = ("logger=tensorboard", "sft.checkpoints_kept=1")
    finished.mini("stage=sft", "resume=5", *changed).succeeded  # noqa: B018


def start(
    place: Workplace, *words: str, python: Sequence[str] = MODULE,
    before: Callable[[], None] | None = None,
    way: Callable[[], AbstractContextManager[None]] = forking,
) -> subprocess.Popen[str]:  # fmt: skip
    """The command in a process that is not waited for, which calls `before` first."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
        if before is not None:
            before()

    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with way():
        return subprocess.Popen([*python, *words], cwd=place.folder, preexec_fn=prepare, **pipes)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Until `path` is there."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.005)


LONG = ("stage=sft", "sft.epochs=3", "sft.val_every=24")
"""24 steps, of which a kill leaves some."""


@pytest.mark.slow
def test_a_process_that_is_killed(workplace: Workplace) -> None:
    """At any moment: it can be taken up again, and ends as one that was not."""
    process = start(workplace, *MINI, *LONG)
    folder = workplace.stage("sft")
    wait_for(folder / "checkpoints" / "000003.ckpt", process)
    time.sleep(random.uniform(0, 0.1))
    process.kill()
    process.communicate(timeout=120)
    assert not (folder / "final").exists(), "it was through before it was killed"
    assert 0 < int(numbered(folder / "checkpoints")[-1].stem) < 24
    workplace.mini(*LONG, "resume=true").succeeded  # noqa: B018
    workplace.mini(*LONG, "run=whole").succeeded  # noqa: B018
    assert weights(folder) == weights(workplace.stage("sft", "whole"))
