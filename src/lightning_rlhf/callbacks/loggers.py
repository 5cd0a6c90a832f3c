"""Where metrics are written: always metrics.csv, and W&B or TensorBoard if asked for."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.image import imread

from lightning_rlhf.callbacks.metrics_file import MetricsFile
from lightning_rlhf.callbacks.wandb_logger import AXIS, RunWandb
from lightning_rlhf.core.config import require, require_number, require_one_of, require_text
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.storage import written_whole

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

Kind = Literal["csv", "tensorboard", "wandb"]
WandbMode = Literal["auto", "online", "offline", "disabled"]


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """The logger beside metrics.csv, if any."""

    kind: Kind


@dataclass(frozen=True, kw_only=True)
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    project: str
    entity: str | None
    """User or team; None is the account's own default."""
    tags: Sequence[str]
    """Added to the stage and the model."""
    mode: WandbMode
    """auto is online if a key is found, else offline; the variable WANDB_MODE overrides it."""

    init_timeout_s: float
    """Without an answer by then the run is offline."""
    finish_timeout_s: float
    """What is not uploaded by then at the end stays in the run's folder."""

    def __post_init__(self) -> None:
        for key in ("init_timeout_s", "finish_timeout_s"):
            require_number(f"logger.{key}", getattr(self, key), above=0)
        require_text("logger.project", self.project, "the name of a project")
        if self.entity is not None:
            require_text("logger.entity", self.entity, "a user or team, or null")
        is_list = isinstance(self.tags, list | tuple)
        require(is_list, "logger.tags", self.tags, "a list of texts")
        for tag in self.tags:
            require_text("logger.tags", tag, "a list of texts")
        require_one_of("logger.mode", self.mode, get_args(WandbMode))
        has_key = _wandb_key_present() or os.getenv("WANDB_IDENTITY_TOKEN_FILE")
        if wandb_mode(self.mode) == "online" and not has_key:
            raise ConfigError(
                "W&B is to be online (logger.mode, or the variable WANDB_MODE), but WANDB_API_KEY "
                "and netrc hold no key; run `wandb login`, or give logger.mode=offline"
            )


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What a dashboard shows of a run besides its metrics."""

    name: str
    stage: str
    model: str
    sweep: str | None
    """Runs of one sweep are grouped."""
    config: Mapping[str, Any]
    """The whole configuration, resolved."""


def logger_config(options: Mapping[str, Any]) -> LoggerConfig:
    """The section `logger` of a configuration, checked."""
    kind = options["kind"]
    require_one_of("logger.kind", kind, get_args(Kind))
    config = WandbConfig if kind == "wandb" else LoggerConfig
    keys = sorted(field.name for field in fields(config))
    found = sorted(map(str, options))
    if found != keys:
        raise ConfigError(f"logger has the keys {found}; logger={kind} wants {keys}")
    return config(**options)


def build_loggers(config: LoggerConfig, run_dir: Path, identity: RunIdentity) -> list[Logger]:
    """MetricsFile, then the configured logger; both continue what `run_dir` already holds."""
    loggers: list[Logger] = [MetricsFile(run_dir)]
    if isinstance(config, WandbConfig):
        run = _wandb_run(config, run_dir, identity)
        loggers.append(RunWandb(project=config.project, save_dir=run_dir, experiment=run))
    elif config.kind == "tensorboard":
        loggers.append(RunTensorBoard(run_dir))
    return loggers


def close_loggers(loggers: Sequence[Logger], exit_code: int) -> None:
    """Finish the W&B run, so that the next run in this process gets its own."""
    for logger in loggers:
        if isinstance(logger, RunWandb):
            logger.close(exit_code)


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard in `<run_dir>/tensorboard`, without numbered versions."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(save_dir=run_dir, name="tensorboard", version="", default_hp_metric=False)

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Hide what earlier event files say of later steps."""
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
            Event,
            SessionLog,
        )

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step + 1, session_log=start))


def log_pictures(loggers: Sequence[Logger], pictures: Mapping[str, Path], step: int) -> None:
    """PNG files, by what they show, where the logger shows pictures."""
    for logger in loggers:
        for what, path in pictures.items():
            if isinstance(logger, WandbLogger):
                logger.log_image(what, [str(path)])
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(what, imread(path), step, dataformats="HWC")


def wandb_mode(mode: WandbMode) -> Any:
    """The mode W&B is started in: WANDB_MODE, else `mode`, else what the presence of a key says."""
    if chosen := os.getenv("WANDB_MODE"):
        return chosen
    if mode == "auto":
        return "online" if _wandb_key_present() else "offline"
    return mode


def _wandb_key_present() -> bool:
    if os.getenv("WANDB_API_KEY"):
        return True
    url = os.getenv("WANDB_BASE_URL", "https://api.wandb.ai")
    path = Path(os.getenv("NETRC", "~/.netrc")).expanduser()
    return path.exists() and netrc.netrc(path).authenticators(urlsplit(url).netloc) is not None


@rank_zero_only
def _wandb_run(config: WandbConfig, run_dir: Path, identity: RunIdentity) -> Run:
    import wandb
    from wandb.errors import AuthenticationError, CommError

    start = partial(_start_wandb, config, run_dir, identity)
    mode, why = wandb_mode(config.mode), "WANDB_API_KEY and netrc hold no key"
    try:
        run = start(mode)
    except AuthenticationError as error:
        raise ConfigError(
            f"W&B refuses the key in WANDB_API_KEY or netrc: {error}. Give it anew with "
            "`wandb login`, or logger.mode=offline"
        ) from error
    except CommError:
        why = f"W&B did not answer in {config.init_timeout_s:g} s (logger.init_timeout_s)"
        wandb.teardown()  # which still holds the id of the run that could not be started
        run = start("offline")
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)
    if run.offline:
        reason = f", as {why}" if mode == "online" or not _wandb_key_present() else ""
        print(f"W&B: offline{reason}; upload later with `wandb sync {Path(run.dir).parent}`")
    return run


def _start_wandb(config: WandbConfig, run_dir: Path, identity: RunIdentity, mode: Any) -> Run:
    import wandb

    return wandb.init(
        project=config.project,
        entity=config.entity,
        name=identity.name,
        group=identity.sweep,
        job_type=identity.stage,
        tags=[identity.stage, identity.model, *config.tags],
        config=dict(identity.config),
        id=_wandb_id(run_dir),
        dir=run_dir,
        mode=mode,
        resume="allow" if mode == "online" else None,
        reinit="finish_previous",
        settings=wandb.Settings(
            silent=mode != "online",
            init_timeout=config.init_timeout_s,
            finish_timeout=config.finish_timeout_s,
        ),
    )


def _wandb_id(run_dir: Path) -> str:
    """One id a run folder, so that a resumed run continues its curves."""
    path = run_dir / "wandb_id.txt"
    if not path.exists():
        with written_whole(path) as beside:
            beside.write_text(secrets.token_hex(4))
    return path.read_text()
