"""ema_decay: `final/`, evaluations, exports and resumed runs of averaged weights."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from lightning_rlhf.callbacks.files import load_checkpoint
from lightning_rlhf.callbacks.stopping import AVERAGE

from ..matrix import matrix
from .conftest import PowerCut, Workplace, given, rows, weights
from .test_pipeline import samples

RUN = ("stage=ppo", "run=ema", "ppo.ema_decay=0.7", "ppo.checkpoints_kept=9", "record=true")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace) -> Workplace:
    """A copy of the pipeline's workplace in which run=ema averaged the weights of PPO."""
    place = pipeline.copied(tmp_path_factory.mktemp("ema") / "work")
    place.mini(*RUN, *given(place)).succeeded  # noqa: B018
    return place


def check_average(model: Path, checkpoint: Path, trained: int) -> None:
    """Check that a model's file has the averages of the checkpoint, in all trained tensors."""
    averages = plain(load_checkpoint(checkpoint)[AVERAGE])
    (file,) = model.glob("*model.safetensors")
    found = plain(load_file(file))
    assert len(found) == trained
    assert len([name for name in averages if "heads" not in name]) == trained
    for name, tensor in found.items():
        (held,) = [x for key, x in averages.items() if key.endswith(name)]
        assert tensor.equal(held), name


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names without the beginning and PEFT's name of the adapter."""
    return {
        re.sub(r"\.(policy|reward)\.", ".", name.removeprefix("base_model.")): tensor
        for name, tensor in tensors.items()
    }


def test_final_and_exports_hold_the_average(place: Workplace) -> None:
    folder = place.stage("ppo", "ema")
    run = str(folder.relative_to(place.folder))
    place.call("export", run, "--step", "2").succeeded  # noqa: B018
    trained = len(load_file(place.stage("ppo") / "final" / "adapter_model.safetensors"))
    check_average(folder / "final", folder / "checkpoints" / "000003.ckpt", trained)
    check_average(folder / "final_000002", folder / "checkpoints" / "000002.ckpt", trained)
    assert weights(folder) != weights(place.stage("ppo"))


def test_nothing_that_is_trained_changes_and_what_is_evaluated_does(place: Workplace) -> None:
    plain_run, averaged = place.stage("ppo"), place.stage("ppo", "ema")
    for name in ("000002", "000003"):
        one, other = (
            load_checkpoint(run / "checkpoints" / f"{name}.ckpt") for run in (plain_run, averaged)
        )
        assert AVERAGE not in one
        assert one["state_dict"].keys() == other["state_dict"].keys()
        for key, tensor in one["state_dict"].items():
            assert tensor.equal(other["state_dict"][key]), key
    for one, other in zip(rows(plain_run), rows(averaged), strict=True):
        different = {name for name in one if one[name] != other[name]}
        assert all(name.startswith("eval/") for name in different)
        assert bool(different) == ("eval/kl" in one and one["step"] != "0"), one["step"]


def test_a_resumed_run_ends_with_the_same_bits(
    place: Workplace, cut: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed after step 2, then after the last one, within whose evaluation it was cut off."""
    folder = place.stage("ppo", "ema")
    before = weights(folder), rows(folder), samples(folder)
    shutil.rmtree(folder / "final")
    cut("evaluation", 3)
    assert PowerCut.__name__ in place.mini(*RUN, *given(place), "resume=2").err
    monkeypatch.undo()
    assert not (folder / "final").exists()
    place.mini(*RUN, *given(place), "resume=true").succeeded  # noqa: B018
    assert (weights(folder), rows(folder), samples(folder)) == before


@pytest.mark.parametrize("stage", matrix(["sft", "rm"], "rm"))
def test_other_stages_average_too(place: Workplace, stage: str) -> None:
    """Of SFT all weights, of a reward model its adapter."""
    words = [] if stage == "sft" else [f"policy.checkpoint={place.stage('sft') / 'final'}"]
    words += [f"{stage}.ema_decay=0.5", f"{stage}.epochs=0.25"]
    place.mini(f"stage={stage}", "run=ema", *words).succeeded  # noqa: B018
    folder = place.stage(stage, "ema")
    last = max((folder / "checkpoints").glob("0*.ckpt"))
    trained = [name for name in load_checkpoint(last)["state_dict"] if "heads" not in name]
    check_average(folder / "final" / ("roles" if stage == "rm" else ""), last, len(trained))
