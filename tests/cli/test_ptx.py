"""ppo.ptx_coef: demonstrations in PPO, from their file to `final/`, and resumed."""

from __future__ import annotations

import shutil

import pytest

from .conftest import Workplace, given, rows, tree, weights

PTX = ("stage=ppo", "run=ptx", "ppo.ptx_coef=0.5", "ppo.ptx_batch_size=4", "record=true")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace) -> Workplace:
    """A copy of the pipeline's workplace in which run=ptx learned from demonstrations as well."""
    place = pipeline.copied(tmp_path_factory.mktemp("ptx") / "work")
    place.mini(*PTX, *given(place)).succeeded  # noqa: B018
    return place


def test_the_demonstrations_take_part(place: Workplace, pipeline: Workplace) -> None:
    with_them, without = place.stage("ppo", "ptx"), pipeline.stage("ppo")
    assert weights(with_them) != weights(without)
    losses = [row["update/ptx_loss"] for row in rows(with_them) if "update/ptx_loss" in row]
    assert len({*losses}) == 3  # one in each of three iterations
    assert all(float(loss) > 0 for loss in losses)
    assert {row["update/ptx_loss"] for row in rows(without) if "ppo_loss" in row} == {"0.0"}


def test_a_resumed_run_ends_with_the_same_bits(place: Workplace) -> None:
    folder = place.stage("ppo", "ptx")
    final, recorded = weights(folder), tree(folder / "rollouts")
    shutil.rmtree(folder / "final")
    place.mini(*PTX, *given(place), "resume=2").succeeded  # noqa: B018
    assert weights(folder) == final
    assert tree(folder / "rollouts") == recorded
