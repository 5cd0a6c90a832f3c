"""The library's front door: examples/plain_lightning.py, docs/library.md, configuration()."""

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import lightning_rlhf
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.runs.console import HOME

from .conftest import PRESETS, STAGES, Workplace, given, make_workplace, weights

EXAMPLE = HOME / "examples" / "plain_lightning.py"
MINI = (f"hydra.searchpath=[file://{PRESETS}]", "model=mini", "data=small")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace in which the example trained the three stages."""
    place = make_workplace(tmp_path_factory.mktemp("example") / "work")
    train = runpy.run_path(str(EXAMPLE))["train"]
    with contextlib.chdir(place.folder):
        for stage in STAGES:
            train(stage, *MINI)
    return place


def test_both_doors_train_the_same_weights(example: Workplace, pipeline: Workplace) -> None:
    for stage in STAGES:
        ours = weights(example.stage(stage))
        assert len(ours) > 1
        assert ours == weights(pipeline.stage(stage)), stage


def test_what_was_saved_is_a_run_of_the_command(example: Workplace) -> None:
    written = json.loads((example.stage("ppo") / "final" / "manifest.json").read_text())
    assert written["parents"]["sft"] == "../../sft/final"
    assert "holds a run that finished" in example.mini("stage=ppo").error
    with contextlib.chdir(example.folder):
        settings = lightning_rlhf.configuration("ppo", *MINI)
        with pytest.raises(ConfigError, match="holds a run that finished"):
            lightning_rlhf.build(settings)


def test_the_snippet_of_the_docs_trains(
    tmp_path: Path, pipeline: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (HOME / "docs" / "library.md").read_text()
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    configuration, place = lightning_rlhf.configuration, make_workplace(tmp_path / "work")
    asked: list[tuple[str, ...]] = []

    def smaller(stage: str, *overrides: str) -> object:
        asked.append((stage, *overrides))
        return configuration(stage, *overrides, *MINI, *given(pipeline), "ppo.iterations=1")

    monkeypatch.setattr(lightning_rlhf, "configuration", smaller, raising=False)
    names: dict[str, object] = {}
    with contextlib.chdir(place.folder):
        exec(found[1], names)
    [words] = asked
    assert configuration(*words).stage == "ppo"  # as it stands there
    assert weights(place.stage("ppo"))


def test_a_configuration_has_the_defaults_of_conf_and_what_is_given() -> None:
    settings = lightning_rlhf.configuration("ppo", "model=tiny", "ppo.kl_coef=0.1", "seed=3")
    assert isinstance(settings.config, PPOConfig)
    # ppo.yaml, ppo_tiny.yaml, the words above, gae.yaml
    assert settings.config.clip_range == 0.2
    assert settings.config.iterations == 150
    assert (settings.config.kl_coef, settings.seed) == (0.1, 3)
    assert settings.config.advantage == "gae"
    assert lightning_rlhf.configuration("ppo").config.kl_coef == 0.06


def test_one_set_of_overrides_serves_several_stages() -> None:
    """As that of a recipe; a wrong key of any section is named at the first stage."""
    words = ("sft.epochs=2", "rm.lr=0.5", "ppo.kl_coef=0.1", "advantage=rloo", "seed=3")
    sft, rm, ppo = (lightning_rlhf.configuration(s, *words, stages=STAGES) for s in STAGES)
    assert (sft.config.epochs, rm.config.lr, ppo.config.kl_coef) == (2, 0.5, 0.1)
    assert (ppo.config.advantage, {sft.seed, rm.seed, ppo.seed}) == ("rloo", {3})
    for alone, own in ((sft, words[0]), (rm, words[1])):
        assert lightning_rlhf.configuration(alone.stage, own, "seed=3") == alone
    with pytest.raises(ConfigError, match="does not read eval_reward"):
        lightning_rlhf.configuration("sft", "eval_reward.samples=1", stages=STAGES)


def test_what_cannot_be_built_is_told_before_a_model_loads(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlhf.models.loading.load_causal_lm", pytest.fail)
    told = "resume is True; allowed: false"
    with contextlib.chdir(workplace.folder), pytest.raises(ConfigError, match=told):
        lightning_rlhf.build(lightning_rlhf.configuration("sft", "resume=true", *MINI))
    assert not workplace.outputs.exists()


def test_a_program_that_uses_hydra_keeps_its_own_configurations(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        lightning_rlhf.configuration("ppo")
        assert compose("mine").a == 1


def test_importing_the_package_loads_no_library() -> None:
    code = (
        "import sys, lightning_rlhf; found = {'torch', 'lightning', 'hydra'} & {*sys.modules}; "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
