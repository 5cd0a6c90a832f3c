"""A folder of configurations of the user's own extends every group of conf/."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.runs.console import CONF

from .conftest import Workplace

OWN: Mapping[str, tuple[str, str, str, Any]] = {
    "model": ("defaults: [tiny, _self_]\nname: mine\n", "model=mine", "model.name", "mine"),
    "data": ("defaults: [quickstart, _self_]\nval_fraction: 0.5\n", "data=mine",
             "data.val_fraction", 0.5),
    "reward": ("defaults: [head, _self_]\nweight: 7.0\n", "reward=mine", "reward.weight", 7.0),
    "trainer": ("defaults: [cpu, _self_]\nlog_every_n_steps: 7\n", "trainer=mine",
                "trainer.log_every_n_steps", 7),
    "logger": ("defaults: [csv, _self_]\n", "logger=mine", "logger.kind", "csv"),
    "optimizer": ("defaults: [muon, _self_]\nmomentum: 0.5\n", "optimizer=mine",
                  "optimizer.momentum", 0.5),
    "advantage": ("# @package ppo\ndefaults: [rloo, _self_]\nsamples_per_prompt: 2\n",
                  "advantage=mine", "ppo.samples_per_prompt", 2),
    "policy_loss": ("# @package ppo\ndefaults: [gspo, _self_]\nclip_range_high: 0.5\n",
                    "policy_loss=mine", "ppo.clip_range_high", 0.5),
    "stages": ("# @package mine\nbeta: 0.1\n", "+stages=mine", "mine.beta", 0.1),
}  # fmt: skip
"""Group -> a file `mine.yaml` in it, the override that chooses it, a key and its value then."""
RECIPE = """
title: M
stages: [sft, ppo]
program: null
overrides: [data=quickstart]
promises: []
next: []
"""


@pytest.fixture
def own(workplace: Workplace) -> Workplace:
    """A workplace with a folder own/ that has a file in every group, and a recipe."""
    for group, (text, *_) in OWN.items():
        (workplace.folder / "own" / group).mkdir(parents=True)
        (workplace.folder / "own" / group / "mine.yaml").write_text(text)
    (workplace.folder / "own" / "recipe.yaml").write_text(RECIPE)
    return workplace


def shown(place: Workplace, *words: str) -> Any:
    """The configuration that a command would run with."""
    return yaml.safe_load(place.call(*words, "stage=ppo", "--cfg", "job").succeeded.out)


@pytest.mark.parametrize("folder", [["--config-dir", "own"], ["hydra.searchpath=[file://own]"]])
def test_a_file_of_ones_own_is_chosen_in_every_group(own: Workplace, folder: list[str]) -> None:
    """callbacks and the like have their own tests of what they build."""
    groups = {path.parent.name for path in CONF.glob("*/*.yaml")}
    assert groups - {"stage_model", "callbacks"} == set(OWN)
    found = OmegaConf.create(shown(own, *folder, *(override for _, override, *_ in OWN.values())))
    for _, _, key, value in OWN.values():
        assert OmegaConf.select(found, key) == value, key
    error = own.call(*folder, "+stages=mine", "stage=sft", "mine.betta=1").error
    assert error == "mine.betta is not a known key; did you mean mine.beta?"


def test_a_model_of_ones_own_has_numbers_in_every_stage(own: Workplace) -> None:
    """Beside those of tiny, from which it is derived and whose trainer has one thread."""
    (own.folder / "own" / "stage_model").mkdir()
    for section, text in {"sft": "epochs: 5", "trainer": "threads: 3"}.items():
        (own.folder / "own" / "stage_model" / f"{section}_mine.yaml").write_text(text)
    found = shown(own, "--config-dir", "own", "model=mine")
    assert (found["sft"]["epochs"], found["trainer"]["threads"]) == (5, 3)
    assert (found["rm"]["epochs"], found["sft"]["lr"]) == (2, 3e-3)  # tiny's


def test_numbers_of_several_stages_stand_in_a_file_of_ones_own(own: Workplace) -> None:
    """Which reads the stage that is chosen, as the command line may not."""
    (own.folder / "own" / "my.yaml").write_text(
        "defaults: [config, _self_]\nsft: {lr: 0.5}\nppo: {kl_coef: 0.5}\n"
        "data: {demonstrations: {train: none.jsonl}}\n"
    )
    words = ["--config-dir", "own", "--config-name", "my", "stage=sft"]
    for run in ("stage=sft", "recipe=own"):  # which hands it to its stages
        assert "none.jsonl does not exist" in own.call(*words[:-1], run).error
    assert "stage=sft does not read ppo.kl_coef;" in own.call(*words, "ppo.kl_coef=0.1").error


def test_a_recipe_hands_its_folders_on(own: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(list(command))
        return 1

    monkeypatch.setattr("lightning_rlhf.cli.recipe.run_command", run)
    path = "hydra.searchpath=[file://own]"
    words = ["recipe=own", path, "model=mine", "sft.lr=1e-3"]
    assert "stage=sft failed" in own.call(*words, "ppo.gamma=0.5").error
    (command,) = commands
    assert command[:3] == [sys.executable, "-m", "lightning_rlhf"]
    expected = [path, "stage=sft", "data=quickstart", "model=mine", "sft.lr=1e-3", "resume=auto"]
    assert command[3:] == expected


def test_a_sweep_gives_the_numbers_of_a_stage_to_that_stage(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Any, ...]] = []

    def execute(cfg: DictConfig, overrides: list[str], in_sweep: bool) -> None:
        found.append((cfg.stage, cfg.sft.lr, cfg.ppo.gamma, cfg.job))

    monkeypatch.setattr("lightning_rlhf.cli.main.execute", execute)
    workplace.sweep("stage=sft,ppo", "sft.lr=1,2", "ppo.gamma=0.5")
    assert found == [("sft", 1, 0.5, "lr=1"), ("sft", 2, 0.5, "lr=2"),
                     ("ppo", 1, 0.5, "lr=1"), ("ppo", 2, 0.5, "lr=2")]  # fmt: skip
