"""Which step becomes final/, early ends, exports: on a PPO run of six iterations.

`reference` keeps the checkpoint of every step, so that `export` of a step is what the others must
hand over.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.models.checkpoint import digest

from .conftest import Outcome, Workplace, rows, tree

SIX = ("ppo.lr_schedule=constant", "ppo.iterations=6", "ppo.val_every=2", "ppo.ppo_epochs=1")


def ppo(place: Workplace, job: str, *overrides: str) -> Outcome:
    return place.mini("stage=ppo", f"job={job}", *SIX, *overrides)


def folder(place: Workplace, job: str) -> Path:
    return place.outputs / "default" / "mini" / job / "ppo"


def weights(model: Path) -> dict[str, str]:
    return {name: found for name, found in tree(model).items() if name.endswith(".safetensors")}


def manifest(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "manifest.json").read_text())
    return found


def kl_of_evaluations(place: Workplace) -> dict[int, float]:
    """Return eval/kl of the reference by iteration, without that before the first."""
    found = {int(row["step"]): row for row in rows(folder(place, "reference"))}
    return {step: float(found[step]["eval/kl"]) for step in (2, 4, 6)}


def exported(place: Workplace, job: str, step: int) -> Path:
    """Export a step of a run once; return the folder."""
    path = folder(place, job) / f"final_{step:06d}"
    if not path.exists():
        run = str(folder(place, job).relative_to(place.folder))
        place.call("export", run, "--step", str(step)).succeeded  # noqa: B018
    return path


@pytest.fixture(scope="module")
def place(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with run=default of SFT and the reward model, and the PPO run job=reference."""
    found = pipeline.copied(tmp_path_factory.mktemp("final") / "work")
    ppo(found, "reference", "ppo.checkpoints_kept=9").succeeded  # noqa: B018
    return found


def test_an_export_of_the_last_step_is_final(place: Workplace) -> None:
    last, out = folder(place, "reference") / "final", exported(place, "reference", 6)
    assert weights(out) == weights(last)
    assert set(tree(out)) == set(tree(last))
    one, two = manifest(out), manifest(last)
    changed = {key for key in one if one[key] != two[key]}
    assert changed == {"metrics", "chosen"}  # seconds, and that it is an export
    assert {**one["metrics"], "time/stage_s": 0} == {**two["metrics"], "time/stage_s": 0}
    assert (one["chosen"]["final"], two["chosen"]["final"]) == ("6", "last")
    assert digest(out) != digest(last)


def test_the_best_evaluation_becomes_final(place: Workplace) -> None:
    """In the direction in which the last is not the best; newer checkpoints are kept than its."""
    kl = kl_of_evaluations(place)
    mode, choose = ("max", max) if kl[6] == min(kl.values()) else ("min", min)
    best = choose(kl, key=lambda step: kl[step])
    assert best != 6
    words = [f"ppo.best.mode={mode}", "ppo.best.metric=eval/kl", "ppo.checkpoints_kept=1"]
    out = ppo(place, "best", "final=best", *words).succeeded.out
    final = folder(place, "best") / "final"
    assert weights(final) == weights(exported(place, "reference", best))
    found = manifest(final)
    assert found["chosen"] == {
        "final": "best", "step": best, "last_step": 6, "stopped": None,
        "metrics": {"eval/kl": {"mode": mode, "chosen": kl[best], "last": kl[6]}},
    }  # fmt: skip
    assert found["metrics"]["eval/kl"] == kl[best]
    assert f"final/ is step {best} (final=best): eval/kl" in " ".join(out.split())


def test_a_run_ends_without_gain_and_so_does_a_resumed_one(place: Workplace) -> None:
    """With patience 1, after the second evaluation, in the direction in which it is no gain."""
    kl, step = kl_of_evaluations(place), 4
    mode = "min" if kl[4] >= kl[2] else "max"
    keys = ["ppo.stop.patience=1", "ppo.stop.metric=eval/kl", f"ppo.stop.mode={mode}"]
    ppo(place, "patient", *keys).succeeded  # noqa: B018
    final = folder(place, "patient") / "final"
    assert weights(final) == weights(exported(place, "reference", step))
    chosen = manifest(final)["chosen"]
    assert (chosen["step"], chosen["last_step"]) == (step, step)
    assert chosen["stopped"].startswith("eval/kl has not gained more than 0 since ")
    assert rows(folder(place, "patient"))[-1]["step"] == str(step)

    before = weights(final), rows(folder(place, "patient"))
    shutil.rmtree(final)
    (folder(place, "patient") / "ending.json").unlink()
    ppo(place, "patient", *keys, f"resume={step}").succeeded  # noqa: B018
    assert (weights(final), rows(folder(place, "patient"))) == before


def test_a_finished_run_is_not_made_longer(place: Workplace) -> None:
    before = tree(folder(place, "reference"))
    for resume, message in (("auto", "ppo.iterations was 6, is 9"), ("true", "that finished")):
        error = ppo(place, "reference", "ppo.iterations=9", f"resume={resume}").error
        assert message in error
        assert "overwrite=true" in error
    assert tree(folder(place, "reference")) == before


def test_every_stage_exports_and_chooses(place: Workplace) -> None:
    sft = place.stage("sft", "kept")
    words = ["stage=sft", "run=kept"]
    place.mini(*words, "final=4", "sft.checkpoints_kept=1").succeeded  # noqa: B018
    assert {path.stem for path in (sft / "checkpoints").iterdir()} == {"000004", "000006", "best"}
    run = sft.relative_to(place.folder)
    for step in ("4", "6"):
        place.call("export", str(run), "--step", step, "--out", f"sft{step}").succeeded  # noqa: B018
    assert weights(place.folder / "sft4") == weights(sft / "final")
    assert weights(place.folder / "sft6") == weights(place.stage("sft") / "final")
    found = manifest(sft / "final")
    measured = {row["step"]: row for row in rows(sft)}
    assert found["metrics"]["eval/loss"] == float(measured["4"]["eval/loss"])

    rm = place.stage("rm")
    out = place.call("export", str(rm), "--step", "6", "--out", "rm6").succeeded.out
    assert "fitness report: rm6/report.md" in out
    assert weights(place.folder / "rm6") == weights(rm / "final")
    one, two = manifest(place.folder / "rm6"), manifest(rm / "final")
    for key in ("reward_mean", "reward_std", "verdicts", "tokenizer_hash"):
        assert one[key] == two[key]


def test_exports_that_are_refused(place: Workplace, tmp_path: Path) -> None:
    run = str(folder(place, "reference"))
    error = place.call("export", run, "--step", "7").error
    assert error.endswith("has no checkpoint of step 7; kept are: 1, 2, 3, 4, 5, 6")
    error = place.call("export", run, "--step", "6", "--out", str(tmp_path)).error
    assert error == f"--out is '{tmp_path}'; allowed: a folder that does not exist"
    assert "is no run" in place.call("export", str(place.outputs), "--step", "1").error
