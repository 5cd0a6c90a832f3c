"""The library's front door: examples/notebook.py, docs/library.md, configuration()."""

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger

import lightning_rlhf
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.runs.console import HOME

from .conftest import PRESETS, STAGES, Workplace, given, make_workplace, rows, weights

NOTEBOOK, PAGE = HOME / "examples" / "notebook.py", HOME / "docs" / "library.md"
Trained = tuple[Workplace, dict[str, Any]]
MINI = (f"hydra.searchpath=[file://{PRESETS}]", "model=mini", "data=small")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A workplace in which the notebook trained the three stages, and its names."""
    place = make_workplace(tmp_path_factory.mktemp("notebook") / "work")
    with contextlib.chdir(place.folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERRIDES", " ".join(MINI))
        return place, runpy.run_path(str(NOTEBOOK), run_name="__main__")


def test_both_doors_train_the_same_weights(notebook: Trained, pipeline: Workplace) -> None:
    """But for PPO, whose loss the notebook replaces."""
    for stage in STAGES:
        ours = weights(notebook[0].stage(stage, "notebook"))
        assert (ours == weights(pipeline.stage(stage))) == (stage != "ppo"), stage
    names = notebook[1]
    assert [len(axis.lines[0].get_xdata()) for axis in names["axes"]] == [3, 1, 3]  # val_every=2
    assert names["conversation"].models[0].turns[0].tokens > 0


def test_what_was_saved_is_a_run_of_the_command(notebook: Trained) -> None:
    place = notebook[0]
    written = json.loads((place.stage("ppo", "notebook") / "final/manifest.json").read_text())
    assert written["parents"]["sft"] == "../../sft/final"
    assert "holds a run that finished" in place.mini("stage=ppo", "run=notebook").error
    with contextlib.chdir(place.folder), pytest.raises(ConfigError, match="run that finished"):
        lightning_rlhf.build(lightning_rlhf.configuration("ppo", "run=notebook", *MINI))


def test_the_first_snippet_of_the_docs_trains_as_the_command_does(
    tmp_path: Path, pipeline: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    snippet = PAGE.read_text().split("```python\n")[1].split("```")[0]
    configuration, place = lightning_rlhf.configuration, make_workplace(tmp_path / "work")
    asked: list[tuple[str, ...]] = []

    def smaller(*words: str) -> object:
        asked.append(words)
        return configuration("ppo", *MINI, *given(pipeline))

    monkeypatch.setattr(lightning_rlhf, "configuration", smaller, raising=False)
    with contextlib.chdir(place.folder):
        exec(snippet, {})
    assert configuration(*asked[0]).stage == "ppo"  # as it stands there
    assert weights(place.stage("ppo")) == weights(pipeline.stage("ppo"))


def test_the_snippets_of_the_modules_alone_train(
    tmp_path: Path, pipeline: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model that is here, and the numbers of model=mini."""
    configuration, fit, ended = lightning_rlhf.configuration, L.Trainer.fit, list[Any]()

    def smaller(stage: str, *words: str) -> object:
        assert configuration(stage, *words).stage == stage  # as it stands there
        return configuration(stage, *words, *MINI)

    monkeypatch.setattr(lightning_rlhf, "configuration", smaller, raising=False)
    monkeypatch.setattr(L.Trainer, "fit", lambda t, *args: (fit(t, *args), ended.append(t)))
    monkeypatch.chdir(tmp_path)
    hub, final = "HuggingFaceTB/SmolLM2-135M-Instruct", str(pipeline.stage("sft") / "final")
    blocks = re.findall(r"<!-- example: .*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec("".join(blocks).replace(hub, final), {})
    assert [trainer.lightning_module.iteration for trainer in ended] == [32, 3, 32]  # 64 * 2 / 4
    assert ended[0].callback_metrics["eval/loss"] < 6.5  # log 1792 = 7.5 without training
    assert ended[2].callback_metrics["eval/accuracy"] == 1


def fit_ppo(pipeline: Workplace, *own: L.Callback, ckpt_path: str | None = None) -> Any:
    """The module after a fit of PPO that validates at each iteration."""
    training = lightning_rlhf.build(lightning_rlhf.configuration("ppo", *MINI, *given(pipeline)))
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", val_check_interval=1, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, log_every_n_steps=1, logger=CSVLogger("logs"), callbacks=[*own],
    )  # fmt: skip
    trainer.fit(training.module, training.data, ckpt_path=ckpt_path)
    return training.module


def test_callbacks_of_lightning_do_what_they_do_elsewhere(
    workplace: Workplace, pipeline: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace.folder)
    best = callbacks.ModelCheckpoint("kept", "{step}", HELD_OUT, mode="max", save_top_k=3)
    others = callbacks.RichProgressBar(), callbacks.LearningRateMonitor()
    module = fit_ppo(pipeline, best, *others)
    found = rows(Path(module.trainer.log_dir))
    scores = {row["step"]: float(row[HELD_OUT]) for row in found if HELD_OUT in row}
    assert [*scores] == ["1", "2", "3"]
    [own] = (x for x in rows(pipeline.stage("ppo")) if x["step"] == "2" and HELD_OUT in x)
    assert scores["2"] == pytest.approx(float(own[HELD_OUT]), rel=1e-5)  # of the command
    assert best.best_model_path.endswith(f"step={max(scores, key=scores.__getitem__)}.ckpt")
    rates = [float(row["lr-AdamW/pg1"]) for row in found if "lr-AdamW/pg1" in row]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])  # linear, 0 after three iterations
    resumed = fit_ppo(pipeline, ckpt_path="kept/step=1.ckpt").state_dict()
    assert all(torch.equal(x, resumed[name]) for name, x in module.state_dict().items())
    stop = callbacks.EarlyStopping(HELD_OUT, min_delta=1e9, patience=1, mode="max")
    assert fit_ppo(pipeline, stop).iteration == 2  # the second gain is no such number


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


def test_what_cannot_be_built_is_refused_before_a_model_loads(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlhf.models.loading.load_causal_lm", pytest.fail)
    message = "resume is True; allowed: false"
    with contextlib.chdir(workplace.folder), pytest.raises(ConfigError, match=message):
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
