"""What every row of the tables must do: one short line, no model, no file."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_rlhf.cli import main
from lightning_rlhf.stages import console

from ..conftest import MINI, Outcome, Workplace, make_workplace, process_state, tree


@dataclass(frozen=True)
class Refusals:
    """A workplace in which every command is to be refused."""

    place: Workplace

    @property
    def folder(self) -> Path:
        return self.place.folder

    def __call__(self, *overrides: str, named: list[str]) -> str:
        """The error, which names `named`; the command leaves every file as it was."""
        before = tree(self.folder)
        return self._check(self.place.mini(*overrides), before, named)

    def value(self, key: str, value: Any, *overrides: str, named: list[str]) -> str:
        """As above, with `key` set in what Hydra composed of `overrides` once for all rows."""
        before = tree(self.folder)
        return self._check(run(self.place, key, value, *overrides), before, named)

    def _check(self, outcome: Outcome, before: dict[str, str], named: list[str]) -> str:
        error = outcome.error  # one line and no traceback
        assert [text for text in named if text not in error] == [], error
        assert len(error) < 600, error
        assert tree(self.folder) == before
        return error


@cache
def composed(*overrides: str) -> DictConfig:
    """What Hydra makes of model=mini data=small overrides; a quarter of a second."""
    main.register_resolvers()
    _, presets, *mini = MINI
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(console.CONF), version_base="1.3"):
        path = f"hydra.searchpath=[file://{presets}]"
        return compose("config", [*mini, *overrides, path], return_hydra_config=True)


def run(place: Workplace, key: str, value: Any, *overrides: str) -> Outcome:
    """The command from where Hydra hands over to it."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with contextlib.chdir(place.folder), process_state(["train.py"]):
        cfg = composed(*overrides).copy()
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main.compose.__wrapped__(cfg)
            except SystemExit as stop:
                status = stop.code
    assert isinstance(status, int)
    return Outcome(status, out.getvalue(), err.getvalue())


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded fails the command with a traceback."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lightning_rlhf.models.build_roles.load_causal_lm", load)


@pytest.fixture
def refused(tmp_path: Path) -> Refusals:
    """In an empty workplace."""
    return Refusals(make_workplace(tmp_path / "work"))


@pytest.fixture
def models(refused: Refusals, pipeline: Workplace) -> Refusals:
    """Beside copies of the final/ folders of run=default, sft/ and rm/."""
    for stage in ("sft", "rm"):
        shutil.copytree(pipeline.stage(stage) / "final", refused.folder / stage)
    return refused
