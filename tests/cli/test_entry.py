"""The three doors to the command: train.py, python -m, the console command; and being stopped."""

import inspect
import json
import os
import re
import signal
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from zipfile import ZipFile

import pytest
from hatchling.build import build_wheel

from lightning_rlhf.callbacks.stop import Stopped
from lightning_rlhf.cli.arguments import COMMANDS, WITHOUT_RUN
from lightning_rlhf.core.policy_losses import POLICY_LOSSES
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.runs.console import CONF, HOME, PACKAGE, RECIPES

from ..matrix import matrix
from .conftest import CONSOLE, MINI, MODULE, TRAIN_PY, Workplace, forking, given


@pytest.mark.parametrize(
    ("door", "name"),
    [([sys.executable, *CONSOLE], "lightning-rlhf"), (TRAIN_PY, "python train.py")],
)
def test_help_lists_what_can_be_chosen_under_the_name_it_was_called_by(
    workplace: Workplace, door: list[str], name: str
) -> None:
    with forking():
        outcome = workplace.process(door, "--help").succeeded
    shown = outcome.out
    assert outcome.err == ""
    assert f"\n{name} ..." in shown
    assert f"{name} -sc install=bash" in shown
    others = {"lightning-rlhf", "train.py", "lightning_rlhf"} - {name.split()[-1]}
    assert not [other for other in others if other in shown]
    recipes = sorted(path.parent.name for path in RECIPES.glob("*/recipe.yaml"))
    assert f"recipe: {', '.join(recipes)}" in shown
    rewards = sorted(path.stem for path in (HOME / "conf" / "reward").glob("*.yaml"))
    assert f"reward: {', '.join(rewards)}" in shown
    for command in (*COMMANDS, *WITHOUT_RUN):
        assert f"\n  {command} " in shown


INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_while_it_starts_is_one_line(workplace: Workplace) -> None:
    """In an import, of Hydra here; the console command enters where the module does."""
    (workplace.folder / "hydra.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(workplace.folder), str(PACKAGE.parent)])
    outcome = workplace.process(MODULE, "stage=sft", environment={"PYTHONPATH": path})
    assert (outcome.status, outcome.out, outcome.err) == (130, "", "stopped\n")
    scripts = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"lightning-rlhf": "lightning_rlhf.__main__:main"}


def test_the_clipped_loss_is_five_frames_below_the_step_and_that_six_below_the_command(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of our own, train.py and the loss included; and PPO's step can be read aloud."""
    found: set[tuple[str, ...]] = set()
    ppo = POLICY_LOSSES["ppo"]

    def spy(batch: Any) -> Any:
        stack = traceback.extract_stack()
        found.add(tuple(f.name for f in stack if Path(f.filename).is_relative_to(PACKAGE)))
        return ppo(batch)

    monkeypatch.setitem(POLICY_LOSSES, "ppo", spy)
    finished.mini("stage=ppo", "run=own", "ppo.iterations=1", *given(finished)).succeeded  # noqa: B018
    command, step = ("main", "compose", "execute", "fit"), "training_step"
    assert found == {(*command, step, "update", "accumulate", "loss_terms", "policy_losses")}
    assert len(inspect.getsource(PPOModule.training_step).splitlines()) <= 25


@pytest.mark.slow
def test_the_wheel_holds_presets_and_recipes_and_a_run_finds_them(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of conf/, recipes/ and src/, and no others. Unpacked away from the checkout.

    One step is taken. The fork forgets the package, and keeps the libraries.
    """
    monkeypatch.chdir(HOME)
    site = tmp_path / "env" / "site-packages"
    with ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        wheel.extractall(site)
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        [metadata] = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        assert not re.search(rb"\]\((?!https?:)", wheel.read(metadata))  # no link into the checkout
    places = {CONF: "lightning_rlhf/conf", RECIPES: "lightning_rlhf/recipes", PACKAGE.parent: ""}
    assert found == {
        str(place / path.relative_to(folder))
        for folder, place in zip(places, map(Path, places.values()), strict=True)
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    words = (*MINI, "stage=sft", "sft.epochs=0.125", "trainer.threads=1")
    program = tmp_path / "start.py"
    program.write_text(
        "import runpy, sys\n"
        "for name in [*sys.modules]:\n"
        "    if name.partition('.')[0] == 'lightning_rlhf':\n"
        "        del sys.modules[name]\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        "runpy.run_module('lightning_rlhf', run_name='__main__', alter_sys=True)\n"
    )
    with forking():
        outcome = workplace.process([sys.executable, str(program)], *words).succeeded
    assert "sft finished" in outcome.out
    config = (workplace.stage("sft") / "config.json").read_text()
    assert str(site / "lightning_rlhf" / "recipes" / "quickstart" / "tokenizer") in config


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(signal.SIGTERM)])
def test_a_stop_is_seen_in_the_exit_status(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    """128 + the signal's number, as of a shell; a sweep goes on with no further job."""
    execute = Mock(side_effect=stop)
    monkeypatch.setattr("lightning_rlhf.cli.main.execute", execute)
    outcome = workplace.sweep("stage=sft", "seed=1,2")
    assert outcome.status == 128 + (stop.signum if isinstance(stop, Stopped) else signal.SIGINT)
    assert outcome.err == ""
    execute.assert_called_once()
    assert "Sweep" not in outcome.out


def test_a_plain_installation_brings_what_the_package_imports_itself() -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=!]", x)[0].replace("-core", "") for x in project["dependencies"]}
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    assert {name.replace("-", "_") for name in names} <= imported
    assert len(names) <= 20


EXTRAS = [
    ("uvicorn", "serve", "serve-reward final"),
    ("wandb_workspaces", "dashboard", "dashboard me/project"),
    ("optuna", "sweeps", "-m stage=sft hydra/sweeper=optuna"),
    ("tensorboard", "tensorboard", "stage=sft logger=tensorboard"),
    ("datasets", "hub", "stage=sft data.demonstrations.train=org/name"),
    ("math_verify", "verify", "stage=ppo policy.checkpoint=base reward=math_answer"),
    ("jsonschema", "verify", "stage=ppo policy.checkpoint=base reward=json_schema"),
    ("reasoning_gym", "reasoning-gym", "stage=ppo policy.checkpoint=base reward=reasoning_gym"),
]


@pytest.mark.parametrize(("module", "extra", "words"), matrix(EXTRAS, *EXTRAS[:6]))
def test_a_run_without_an_extra_says_what_to_install(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, module: str, extra: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    row = {"prompt": "2+2?", "answer": "4", "schema": {}, "metadata": {}}
    prompts = workplace.folder / "rows.jsonl"
    prompts.write_text("".join(json.dumps(row | {"prompt": f"{n}?"}) + "\n" for n in range(16)))
    own = "reward=" in words and [f"data.prompts.train={prompts}", f"data.prompts.val={prompts}"]
    call = workplace.call if "/project" in words or "serve" in words else workplace.mini
    error = call(*words.split(), *(own or ())).error
    assert f" needs {module}: pip install 'lightning-rlhf[{extra}]'" in error


def test_faults_of_the_configuration_are_reported_without_imports(workplace: Workplace) -> None:
    program = (
        "import sys\nfrom lightning_rlhf.__main__ import main\ntry:\n    main()\nfinally:\n"
        "    print(sorted({'lightning', 'transformers', 'peft', 'torch'} & set(sys.modules)))\n"
    )
    outcome = workplace.process([sys.executable, "-c", program, "stage=ppo", "ppo.lr=-1"])
    assert "ppo.lr is -1" in outcome.err
    assert outcome.out.splitlines()[-1] == "[]", outcome
