"""The loggers of a run: always metrics.csv, and W&B or TensorBoard if configured."""

from __future__ import annotations

import os
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.image import imread

from lightning_rlhf.callbacks.logger_config import (
    WANDB_ID,
    LoggerConfig,
    WandbConfig,
    read_wandb_id,
    wandb_key_present,
    wandb_mode,
)
from lightning_rlhf.callbacks.metrics_file import MetricsFile
from lightning_rlhf.callbacks.wandb_logger import AXIS, RunWandb, forget, gone
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.io.storage import flush, written_whole
from lightning_rlhf.io.visible import visible_line

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

NAME_CHARACTERS, TAG_CHARACTERS = 128, 64
"""Largest numbers of characters that W&B allows in the name of a run or group, and in a tag."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The description of a run that a dashboard shows besides its metrics."""

    name: str
    """Display name: run/model/stage, or run/model/job/stage."""
    run: str
    """Name of the run."""
    model: str
    """Name of the model preset."""
    job: str | None
    """Name of the run's variant, which lists the varied values; None without variants. The jobs of
    a run form a group."""
    stage: str
    """Name of the stage."""
    config: Mapping[str, Any]
    """Complete configuration, resolved."""


def build_loggers(config: LoggerConfig, run_dir: Path, identity: RunIdentity) -> list[Logger]:
    """Return MetricsFile, then the configured logger; both continue the files in `run_dir`."""
    loggers: list[Logger] = [MetricsFile(run_dir)]
    if isinstance(config, WandbConfig):
        run = _wandb_run(config, run_dir, identity)
        loggers.append(RunWandb(project=config.project, save_dir=run_dir, experiment=run))
    elif config.kind == "tensorboard":
        loggers.append(RunTensorBoard(run_dir))
    return loggers


def close_loggers(loggers: Sequence[Logger], exit_code: int) -> None:
    """Finish the W&B run, so that the next run in this process starts a new one."""
    for logger in loggers:
        if isinstance(logger, RunWandb):
            logger.close(exit_code)


class RunTensorBoard(TensorBoardLogger):
    """A TensorBoard logger that writes to `<run_dir>/tensorboard`, without numbered versions."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(save_dir=run_dir, name="tensorboard", version="", default_hp_metric=False)

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Hide the events after `step` in earlier event files."""
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
            Event,
            SessionLog,
        )

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step + 1, session_log=start))

    @rank_zero_only
    def flush(self) -> None:
        """Write all events to the disk, so that they survive a kill and a loss of power."""
        self.experiment.flush()
        flush(Path(self.log_dir))


def log_pictures(loggers: Sequence[Logger], pictures: Mapping[str, Path], step: int) -> None:
    """Log PNG files to the loggers that display images.

    pictures: name of the image -> path of its file.
    """
    for logger in loggers:
        for what, path in pictures.items():
            if isinstance(logger, WandbLogger):
                logger.log_image(what, [str(path)])
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(what, imread(path), step, dataformats="HWC")


def log_table(
    loggers: Sequence[Logger],
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    step: int,
) -> None:
    """Log a table to W&B, where it is one of the loggers."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            logger.log_metrics({name: table}, step=step)


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
            f"W&B refuses the key in WANDB_API_KEY or netrc: {error}. Set it again with "
            "`wandb login`, or logger.mode=offline"
        ) from error
    except CommError:
        why = f"W&B did not answer in {config.init_timeout_s:g} s (logger.init_timeout_s)"
        wandb.teardown()  # releases the id of the run that could not be started
        run = start("offline")
    except gone():  # the W&B process has ended since the previous run of this Python process
        forget()
        run = start(mode)
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)
    if run.offline:
        reason = f", as {why}" if mode == "online" or not wandb_key_present() else ""
        line = f"W&B: offline{reason}; upload later with `wandb sync {Path(run.dir).parent}`"
        print(visible_line(line))
    return run


def _start_wandb(config: WandbConfig, run_dir: Path, identity: RunIdentity, mode: Any) -> Run:
    import wandb

    group = config.group or os.getenv("WANDB_RUN_GROUP") or (identity.run if identity.job else None)
    return wandb.init(
        project=config.project,
        entity=config.entity,
        name=fitted(identity.name, NAME_CHARACTERS),
        group=None if group is None else fitted(group, NAME_CHARACTERS),
        job_type=identity.stage,
        tags=[*wandb_tags(identity), *config.tags],
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


def wandb_tags(identity: RunIdentity) -> list[str]:
    """Return the tags of a run: stage, model, job, and each value in the job's name.

    A sweep joins values by , or + to the name of a job.
    """
    varied = [] if identity.job is None else [identity.job, *re.split("[,+]", identity.job)]
    tags = (identity.stage, identity.model, *filter(None, varied))
    return list(dict.fromkeys(fitted(tag, TAG_CHARACTERS) for tag in tags))


def fitted(text: str, longest: int) -> str:
    """Return `text` cut to `longest` characters.

    A text that is cut ends with a checksum of the whole, so that different texts stay different.
    """
    if len(text) <= longest:
        return text
    checksum = f"-{zlib.crc32(text.encode()):08x}"
    return text[: longest - len(checksum)] + checksum


def _wandb_id(run_dir: Path) -> str:
    """Return the W&B run id stored in the run folder, so that a resumed run continues its curves.

    A random id is written on the first call.
    """
    path = run_dir / WANDB_ID
    if not path.exists():
        with written_whole(path) as beside:
            beside.write_text(secrets.token_hex(4))
    return read_wandb_id(path)
