from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.errors import AuthenticationError

from lightning_rlhf.callbacks.diagnosis import Diagnosis
from lightning_rlhf.callbacks.evaluation import Samples
from lightning_rlhf.callbacks.logger_config import logger_config, wandb_mode
from lightning_rlhf.callbacks.loggers import (
    RunIdentity,
    RunTensorBoard,
    _wandb_id,
    build_loggers,
    close_loggers,
    fitted,
    wandb_tags,
)
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.callbacks.rules import History, rule
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.metrics import HEADLINES

from .conftest import FakePPO, Fit

CONF = Path(__file__).parents[2] / "conf" / "logger"
IDENTITY = RunIdentity(
    name="lr/tiny/seed-1/ppo", run="lr", model="tiny", job="seed-1", stage="ppo",
    config={"seed": {"a": 1}},
)  # fmt: skip


def options(kind: str) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(CONF / f"{kind}.yaml"))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for folder in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder))


@pytest.mark.parametrize("by_variable", [False, True])
def test_online_without_a_key_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"W&B is to be online .*hold no key.*wandb login"):
        logger_config(options("wandb") | ({} if by_variable else {"mode": "online"}))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    logger_config(options("wandb") | {"mode": "online"})


def test_wandb_is_online_only_with_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode("auto") == "online"
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_mode("auto") == "online"
    assert wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("online") == "disabled"


def test_tensorboard_has_the_curves_the_samples_and_no_later_steps_after_a_rewind(
    fit: Fit, tmp_path: Path
) -> None:
    config = logger_config(options("tensorboard"))
    samples = Samples(every_n_iterations=2, count=1, characters=50, run_dir=tmp_path)
    loggers = build_loggers(config, tmp_path, IDENTITY)
    fit(FakePPO(), [PPOMetrics(), samples], loggers, batches=4)
    resumed = RunTensorBoard(tmp_path)
    resumed.rewind(2)
    resumed.log_metrics({"reward_mean": 99.0}, step=3)
    resumed.finalize("success")

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert rewards == [(1, 1.5), (2, 2.5), (3, 99.0)]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "train question 1 [b]? | t1 t2 t3 |" in text
    assert (tmp_path / "metrics.csv").exists()


@rule(when="in the second iteration", cause="a cause", remedy="a remedy")
def second(history: History) -> str | None:
    return "2 iterations" if len(history.rows) == 2 else None


def test_wandb_offline_keeps_curves_samples_and_identity(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = logger_config(options("wandb"))
    loggers = build_loggers(config, tmp_path, IDENTITY)
    said = capsys.readouterr().out
    assert said.startswith("W&B: offline, as WANDB_API_KEY and netrc hold no key; upload later")
    assert said.count("\n") == 1

    samples = Samples(every_n_iterations=1, count=2, characters=50, run_dir=tmp_path)
    diagnosis = Diagnosis(SimpleNamespace(), tmp_path, rules=[second])  # type: ignore[arg-type]
    fit(FakePPO(), [PPOMetrics(), diagnosis, samples], loggers, batches=2)
    close_loggers(loggers, exit_code=0)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    records = _wandb_records(folder)
    alerts = [record["alert"] for record in records if record["type"] == "alert"]
    assert [{key: alert[key] for key in ("title", "text", "level")} for alert in alerts] == [
        {"title": "second", "text": "2 iterations: a cause. a remedy", "level": "WARN"}
    ]
    run = next(r["run"] for r in records if r["type"] == "run")
    assert run["run_id"] == (tmp_path / "wandb_id.txt").read_text()
    assert run["display_name"] == "lr/tiny/seed-1/ppo"
    assert run["tags"] == ["ppo", "tiny", "seed-1"]
    assert run["run_group"] == "lr"
    assert run["config"]["update"]["seed"] == {"a": 1}
    axis = [r["metric"] for r in records if r["type"] == "metric"]
    assert axis[-1]["glob_name"] == "*"
    assert axis[-1]["step_metric"] == "iteration"
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert all("iteration" in h for h in history)
    assert set(HEADLINES) <= {key for h in history for key in h}
    curve = [(h["iteration"], h["reward_mean"]) for h in history if "reward_mean" in h]
    assert curve == [(1, 1.5), (2, 2.5)]
    tables = [h for h in history if "samples._type" in h]
    assert [h["samples._type"] for h in tables] == ["incremental-table-file"] * 2

    # A resumed run is the same run to W&B.
    resumed = build_loggers(config, tmp_path, IDENTITY)
    assert resumed[1].version == run["run_id"]
    close_loggers(resumed, exit_code=0)


def test_the_jobs_of_a_sweep_have_tags_and_names_of_their_own() -> None:
    short = replace(IDENTITY, job="kl_coef=0.1,seed=1")
    assert wandb_tags(short) == ["ppo", "tiny", "kl_coef=0.1,seed=1", "kl_coef=0.1", "seed=1"]
    one = replace(IDENTITY, job="ppo.kl_coef-0.1+seed-1")
    assert wandb_tags(one) == ["ppo", "tiny", "ppo.kl_coef-0.1+seed-1", "ppo.kl_coef-0.1", "seed-1"]
    assert wandb_tags(replace(IDENTITY, job=None)) == ["ppo", "tiny"]
    low, high = (replace(IDENTITY, job=f"{'x' * 70}{i}") for i in (1, 2))
    assert wandb_tags(low) != wandb_tags(high)
    assert all(1 <= len(tag) <= 64 for tag in (*wandb_tags(low), *wandb_tags(high)))
    assert fitted("x" * 128, 128) == "x" * 128
    assert len(fitted("x" * 129, 128)) == 128
    assert fitted("x" * 129, 128) != fitted("x" * 130, 128)


def test_half_an_id_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever is killed while it is written finds none, and not one that W&B refuses."""

    def cut_off(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lightning_rlhf.io.storage.flush", cut_off)
        with pytest.raises(KeyboardInterrupt):
            _wandb_id(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert _wandb_id(tmp_path) == _wandb_id(tmp_path)


def test_a_run_goes_on_offline_where_wandb_is_away(
    monkeypatch: pytest.MonkeyPatch, fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
    wandb.teardown()  # which a process reads once
    config = logger_config(options("wandb") | {"init_timeout_s": 1})
    loggers = build_loggers(config, tmp_path, IDENTITY)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("W&B: offline, as W&B did not answer in 1 s (logger.init_timeout_s);")
    fit(FakePPO(), [PPOMetrics()], loggers, batches=2)
    close_loggers(loggers, exit_code=0)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    records = _wandb_records(folder)
    assert next(r["run"] for r in records if r["type"] == "run")["run_id"]
    assert [r for r in records if r["type"] == "history"]


def test_a_key_that_wandb_refuses_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(**options: Any) -> None:
        asked.append(options)
        raise AuthenticationError("invalid API key")

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(wandb, "init", refuse)
    config = logger_config(options("wandb") | {"init_timeout_s": 11, "finish_timeout_s": 7})
    with pytest.raises(ConfigError, match=r"^W&B refuses the key .*: invalid API key\. Set it"):
        build_loggers(config, tmp_path, IDENTITY)
    (once,) = asked  # not once more, offline
    assert once["mode"] == "online"
    assert (once["settings"].init_timeout, once["settings"].finish_timeout) == (11, 7)


def _wandb_records(folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
