"""The sections trainer, callbacks and logger: what of Lightning a user may give, and what not."""

from __future__ import annotations

import csv
import inspect
import json
import shutil
from typing import Any

import lightning as L
import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.stages import trainer_section
from lightning_rlhf.stages.stage import TrainerConfig
from lightning_rlhf.stages.trainer_section import OWNED, PASSED, read_trainer, resolve_auto

from .conftest import Workplace, rows

CPU = {
    "_target_": "lightning.Trainer", "accelerator": "cpu", "devices": 1, "precision": "32-true",
    "weights_dtype": "float32", "threads": None, "log_every_n_steps": 10,
}  # fmt: skip
OWN_LOGGER = """
from lightning.pytorch.loggers import Logger

class Lines(Logger):
    name = version = "lines"
    def __init__(self, file):
        super().__init__()
        self.file = file
    def log_metrics(self, metrics, step=None):
        with open(self.file, "a") as file:
            file.write(f"{step} {sorted(metrics)[0]}\\n")
    def log_hyperparams(self, *args, **kwargs):
        pass
"""


def test_every_argument_of_lightnings_trainer_is_passed_on_or_has_a_reason() -> None:
    """A new release of Lightning with another argument fails here."""
    there = {*inspect.signature(L.Trainer.__init__).parameters} - {"self"}
    ours = {*TrainerConfig.__dataclass_fields__} - {"weights_dtype", "threads", "options"}
    assert there == {*PASSED, *OWNED, *ours}


@pytest.mark.parametrize("key", sorted(OWNED))
def test_what_a_stage_sets_itself_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_trainer(CPU | {key: 1})
    assert str(raised.value) == f"trainer.{key} is 1, but it is not to be set: {OWNED[key]}"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"profilr": "simple"}, "trainer.profilr is not a known key; did you mean trainer.profil"),
        ({"limit_val_batches": 0}, "trainer.limit_val_batches is 0"),
        ({"devices": 2}, "trainer.devices"),
        ({"precision": "16-mixed"}, "trainer.precision"),
    ],
)
def test_other_mistakes_are_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_trainer(CPU | changes)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("has_gpu", "from_config", "accelerator", "found"),
    [
        (True, None, "auto", ("gpu", "bf16-mixed", "bfloat16")),
        (False, None, "auto", ("cpu", "32-true", "float32")),
        (True, {"model_type": "qwen3"}, "auto", ("cpu", "32-true", "float32")),  # model=tiny
        (True, None, "cpu", ("cpu", "32-true", "float32")),
        (False, None, "gpu", ("gpu", "bf16-mixed", "bfloat16")),  # refused later, by name
    ],
)
def test_auto_is_the_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    from_config: Any,
    accelerator: str,
    found: tuple[str, str, str],
) -> None:
    monkeypatch.setattr(trainer_section, "has_gpu", lambda: has_gpu)
    given = CPU | {"accelerator": accelerator, "precision": "auto", "weights_dtype": "auto"}
    tree = {"trainer": given, "model": {"from_config": from_config, "dtype": "auto"}}
    resolved = resolve_auto(tree)
    trainer = resolved["trainer"]
    assert (trainer["accelerator"], trainer["precision"], trainer["weights_dtype"]) == found
    assert resolved["model"]["dtype"] == found[2]
    assert tree["trainer"] is given
    assert given["precision"] == "auto"


def test_what_is_given_stands_beside_auto() -> None:
    given = CPU | {"precision": "bf16-mixed", "weights_dtype": "auto"}
    resolved = resolve_auto({"trainer": given, "model": {"from_config": None, "dtype": "float32"}})
    assert resolved["trainer"]["precision"] == "bf16-mixed"
    assert resolved["trainer"]["weights_dtype"] == "float32"


def test_monitors_a_profiler_and_a_logger_of_ones_own(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace.folder / "own_logger.py").write_text(OWN_LOGGER)
    monkeypatch.syspath_prepend(workplace.folder)
    mine = workplace.folder / "mine" / "logger"
    mine.mkdir(parents=True)
    (mine / "lines.yaml").write_text("_target_: own_logger.Lines\nfile: ${oc.env:OWN_KEY}.txt\n")
    monkeypatch.setenv("OWN_KEY", "lines-of-the-environment")
    out = workplace.mini(
        "stage=sft", "callbacks=monitor", "trainer.profiler=simple", "logger=lines",
        "hydra.searchpath=[file://mine]", "trainer.log_every_n_steps=1",
    ).succeeded.out  # fmt: skip
    assert "computing on the CPU, 32-true" in out
    lines = (workplace.folder / "lines-of-the-environment.txt").read_text().splitlines()
    assert any("update/grad_norm" in line for line in lines)
    written = [path for path in workplace.stage("sft").rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not any(b"lines-of-the-environment" in path.read_bytes() for path in written)
    with (workplace.stage("sft") / "metrics.csv").open(newline="") as file:
        names = csv.DictReader(file).fieldnames
    assert names is not None
    assert any(name.startswith("lr-AdamW") for name in names)
    assert any(name.startswith("DeviceStatsMonitor") for name in names)


def test_callbacks_change_no_number_and_the_run_goes_on_without_them(
    finished: Workplace,
) -> None:
    """Nor does a configuration that was written before there was the section."""
    folder = finished.stage("sft")
    before = [row for row in rows(folder) if "update/loss" in row]
    file = folder / "config.json"
    tree = json.loads(file.read_text())
    del tree["callbacks"], tree["trainer"]["_target_"]
    file.write_text(json.dumps(tree))
    shutil.rmtree(folder / "final")
    (folder / "checkpoints" / "000006.ckpt").unlink()
    finished.mini("stage=sft", "resume=true", "callbacks=monitor").succeeded  # noqa: B018
    after = [row for row in rows(folder) if "update/loss" in row]
    own = ("lr-", "DeviceStatsMonitor")
    assert [{k: x for k, x in row.items() if not k.startswith(own)} for row in after] == before


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["callbacks.mine=3"], "callbacks.mine is 3; allowed: a mapping with _target_"),
        (["callbacks.mine._target_=no.Such"], "callbacks.mine: "),
        (["callbacks.mine._target_=collections.Counter"], "callbacks.mine._target_ is"),
        (["trainer.profiler=nosuch"], "trainer: "),
        (["trainer._target_=collections.Counter"], "trainer._target_ is 'collections.Counter'"),
    ],
)
def test_what_cannot_be_built_is_named(
    workplace: Workplace, overrides: list[str], told: str
) -> None:
    assert told in workplace.mini("stage=sft", *overrides).error


def test_a_run_ends_with_a_checkpoint_when_its_time_is_over(workplace: Workplace) -> None:
    outcome = workplace.mini("stage=sft", "trainer.max_time=00:00:00:00")
    assert outcome.status == 143
    assert "resume=true goes on from the last checkpoint" in outcome.out
    assert not (workplace.stage("sft") / "final").exists()
    workplace.mini("stage=sft", "resume=true").succeeded  # noqa: B018
