"""The sections trainer, callbacks and logger: what of Lightning a user may give, and what not."""

import functools
import inspect
import json
import shutil
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_rlhf.cli.launch import run_processes
from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.runs.accelerator import check_devices
from lightning_rlhf.runs.console import CONF
from lightning_rlhf.runs.objects import own_objects
from lightning_rlhf.runs.settings import OWNED, PASSED, read_settings, resolve_auto
from lightning_rlhf.runs.stage import Settings, TrainerConfig

from .conftest import Workplace, rows

CPU = {
    "_target_": "lightning.Trainer", "accelerator": "cpu", "devices": 1, "num_nodes": 1,
    "precision": "32-true", "weights_dtype": "float32", "threads": None,
    "matmul_precision": "highest", "log_every_n_steps": 10,
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
            file.write(f"{step} {sorted(metrics)}\\n")
    def log_hyperparams(self, *args, **kwargs):
        pass
"""


def test_every_argument_of_lightnings_trainer_is_passed_on_or_has_a_reason() -> None:
    """A new release of Lightning with another argument fails here."""
    there = {*inspect.signature(L.Trainer.__init__).parameters} - {"self"}
    torchs = {"weights_dtype", "threads", "matmul_precision"}
    ours = {*TrainerConfig.__dataclass_fields__} - {*torchs, "options"}
    assert there == {*PASSED, *OWNED, *ours}


GPU_FOUND, CPU_FOUND = ("gpu", "bf16-mixed", "bfloat16"), ("cpu", "32-true", "float32")


@pytest.mark.parametrize(("has_gpu", "from_config", "accelerator", "found"), [
    (True, None, "auto", GPU_FOUND), (False, None, "auto", CPU_FOUND),
    (True, {"model_type": "qwen3"}, "auto", CPU_FOUND),  # model=tiny
    (False, None, "gpu", GPU_FOUND),  # refused later, by name
])  # fmt: skip
def test_auto_is_the_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, from_config: Any, accelerator: str, found: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    given = CPU | {"accelerator": accelerator, "precision": "auto", "weights_dtype": "auto"}
    tree = {"trainer": given, "model": {"from_config": from_config, "dtype": "auto"}}
    resolved = resolve_auto(tree)
    trainer = resolved["trainer"]
    assert (trainer["accelerator"], trainer["precision"], trainer["weights_dtype"]) == found
    assert resolved["model"]["dtype"] == found[2]
    assert given["precision"] == "auto"


def test_short_names_of_a_precision_are_lightnings() -> None:
    for name, found in ((32, "32-true"), ("bf16", "bf16-mixed")):
        assert settings_of(trainer={"precision": name}).trainer.precision == found
    with pytest.raises(ConfigError, match=r"'16-mixed'; allowed: auto, 32-true .*bf16-mixed"):
        settings_of(trainer={"precision": "16-mixed"})


def test_callbacks_change_no_number_and_the_run_goes_on_without_them(finished: Workplace) -> None:
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


@functools.cache
def composed() -> Any:
    """The configuration of stage=sft as conf/ has it."""
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("config", ["stage=sft", "trainer=cpu"]))


def settings_of(**sections: Any) -> Settings:
    """A configuration with these sections, of which `trainer` may lack what is in CPU."""
    tree = composed()
    trainer = CPU | sections.pop("trainer", {})
    return read_settings(OmegaConf.create(tree | sections | {"trainer": trainer}))


@pytest.mark.parametrize(
    ("key", "name", "instead"),
    [
        ("callbacks", "callbacks.ModelCheckpoint", "checkpoint_every"),
        ("plugins", "plugins.io.AsyncCheckpointIO", "checkpoint_every"),
        ("strategy", "strategies.DDPStrategy", "allowed: auto, ddp, fsdp, single_device:"),
    ],
)
def test_objects_that_do_what_a_stage_does_are_refused_with_what_to_use_instead(
    key: str, name: str, instead: str
) -> None:
    node: Any = {"_target_": f"lightning.pytorch.{name}"}
    with pytest.raises(ConfigError, match=rf"^trainer\.{key} is .*{instead}"):
        own_objects(settings_of(trainer={key: [node] if key == "callbacks" else node}))


def test_one_process_in_a_batch_script_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose variables have the tasks of the whole job, which srun has not started."""
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "sweep")
    own_objects(settings_of())


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_")

    settings = settings_of(trainer={"accelerator": "gpu"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", unusable)
    with pytest.raises(ConfigError) as raised:
        check_devices(settings)
    assert "(CUDA error: no kernel image is available); allowed: trainer=cpu" in str(raised.value)
    check_devices(settings_of())


def test_more_processes_than_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"is 4, but torch finds 1 CUDA GPU .* at most 1, or"):
        run_processes(settings_of(trainer={"accelerator": "gpu", "devices": 4}), [])
    check_devices(settings_of(trainer={"devices": 4}), 4)


OWN_CALLBACKS = """
import os
from lightning.pytorch.callbacks import Callback

class Refusing(Callback):
    def __init__(self, key):
        raise ValueError(f"{key} is no key")
"""


@pytest.fixture
def own(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A workplace beside which own_callbacks and own_logger can be imported."""
    (workplace.folder / "own_callbacks.py").write_text(OWN_CALLBACKS)
    (workplace.folder / "own_logger.py").write_text(OWN_LOGGER)
    monkeypatch.syspath_prepend(workplace.folder)
    return workplace


def test_what_a_callback_is_given_from_the_environment_is_not_shown(
    own: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_KEY", "sk-4711-secret")
    given = ["callbacks.mine._target_=own_callbacks.Refusing",
             "callbacks.mine.key='Bearer ${oc.env:OWN_KEY}'"]  # fmt: skip
    error = own.mini("stage=sft", *given).error
    assert error == "callbacks.mine: Bearer *** is no key (ValueError)"
    assert "did you mean Refusing?" in own.mini("stage=sft", given[0].removesuffix("g")).error
    outcome = own.mini("stage=sft", *given, "debug=true")
    assert "Traceback" in outcome.err
    assert "4711" not in outcome.out + outcome.err


def test_a_monitor_that_is_not_measured_is_named_with_all_that_are(workplace: Workplace) -> None:
    """Before EarlyStopping reads it, which would fail with a traceback."""
    stop = "callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"
    error = workplace.mini("stage=sft", stop, "callbacks.stop.monitor=eval/los").error
    assert error.startswith("the monitor of EarlyStopping is 'eval/los'; allowed: ")
    assert error.endswith("eval/loss, eval/perplexity")


def test_a_profiler_a_bar_a_stopping_rule_and_a_logger_of_ones_own(
    own: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EarlyStopping ends the run at the first evaluation: no loss is below -1."""
    classes = "lightning.pytorch.callbacks"
    mine = own.folder / "mine" / "logger"
    mine.mkdir(parents=True)
    (mine / "lines.yaml").write_text("_target_: own_logger.Lines\nfile: ${oc.env:OWN_KEY}.txt\n")
    monkeypatch.setenv("OWN_KEY", "lines-of-the-environment")
    out = own.mini(
        "stage=sft", "callbacks=monitor", "callbacks.device=null", "trainer.profiler=simple",
        f"+callbacks.bar._target_={classes}.RichProgressBar",
        f"callbacks.stop._target_={classes}.EarlyStopping", "callbacks.stop.monitor=eval/loss",
        "callbacks.stop.divergence_threshold=-1", "trainer.log_every_n_steps=1",
        "logger=lines", "hydra.searchpath=[file://mine]",
    ).succeeded.out  # fmt: skip
    assert "computing on the CPU, 32-true" in out
    assert "a callback ended the run after step 2 of 6" in out
    assert (own.stage("sft") / "final").is_dir()
    assert "update/grad_norm" in (own.folder / "lines-of-the-environment.txt").read_text()
    written = [path for path in own.stage("sft").rglob("*") if path.is_file()]
    assert not any(b"lines-of-the-environment" in path.read_bytes() for path in written)
    evaluated = [row["step"] for row in rows(own.stage("sft")) if "eval/loss" in row]
    assert evaluated == ["0", "2"]
    names = {name for row in rows(own.stage("sft")) for name in row}
    assert any(name.startswith("lr-AdamW") for name in names)
    assert not any(name.startswith("DeviceStats") for name in names)


def test_what_the_trainer_refuses_costs_no_finished_run(own: Workplace) -> None:
    final = own.stage("sft") / "final"
    final.mkdir(parents=True)
    (final / "kept").touch()
    (own.stage("sft") / "config.json").write_text('{"stage": "sft"}')
    refused = own.mini("stage=sft", "overwrite=true", "callbacks.x._target_=nosuch.Longest")
    assert refused.error.startswith("callbacks.x: Error loading 'nosuch.Longest': No module named")
    refused = own.mini("stage=sft", "overwrite=true", "trainer.max_time=a")
    assert refused.error.startswith("trainer: ")
    assert (final / "kept").exists()


def test_a_run_ends_with_a_checkpoint_when_its_time_is_over(workplace: Workplace) -> None:
    outcome = workplace.mini("stage=sft", "trainer.max_time=00:00:00:00")
    assert outcome.status == 143
    assert "resume=auto goes on from the checkpoint of step " in outcome.out
    assert not (workplace.stage("sft") / "final").exists()
    workplace.mini("stage=sft", "resume=true").succeeded  # noqa: B018
