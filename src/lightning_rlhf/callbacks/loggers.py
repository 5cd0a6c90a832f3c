"""The loggers of a run: always metrics.csv, and W&B or TensorBoard if configured.

metrics.csv has one row per step and is complete on the disk after every call. A W&B process that
dies does not end the run.
"""

from __future__ import annotations

import csv
import os
import re
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from matplotlib.image import imread

from lightning_rlhf.callbacks.logger_config import (
    WANDB_ID,
    LoggerConfig,
    WandbConfig,
    read_wandb_id,
    wandb_key_present,
    wandb_mode,
)
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.metrics import METRICS
from lightning_rlhf.io.console import print_line, visible_line
from lightning_rlhf.io.storage import flush, full_disk_told, read_text, written_whole

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


AXIS = "iteration"
"""W&B's x-axis: iterations of PPO, optimizer steps of the other stages."""


class RunWandb(WandbLogger):
    """A W&B logger with the key `iteration` as its x-axis instead of trainer/global_step.

    W&B uploads in a separate process, wandb-core, which also waits for a lost network connection.
    If that process ends before the run does (killed, or out of memory), this logger prints one line
    and logs nothing more.
    """

    is_gone = False
    """True once W&B's process has ended."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        axis = {} if step is None else {AXIS: step}
        self._try(lambda: self.experiment.log({**metrics, **axis}))

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which W&B shows on the run's page and passes on by mail or Slack."""
        self._try(lambda: self.experiment.alert(title=title, text=text, level="WARN"))

    def close(self, exit_code: int) -> None:
        """Finish the W&B run, so that the next run in this process starts a new one."""
        self._try(lambda: self.experiment.finish(exit_code=exit_code))
        if self.is_gone:
            forget()

    def _try(self, ask: Callable[[], None]) -> None:
        """Call `ask` unless W&B's process has ended; other errors are raised."""
        if self.is_gone:
            return
        try:
            ask()
        except gone():
            self.is_gone = True
            print_line(
                "W&B: its process has ended; the run goes on without it: metrics.csv has every "
                "row, W&B those before at most"
            )


def forget() -> None:
    """Reset W&B's connection to its ended process, so that the next run starts a new process."""
    import wandb

    with suppress(*gone()):
        wandb.teardown()


def gone() -> tuple[type[Exception], ...]:
    """Return the exceptions that W&B raises when its process has ended."""
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    return ConnectionError, HandleAbandonedError, MailboxClosedError


STEP = "step"
_ORDER = {name: place for place, name in enumerate(METRICS)}

Row = dict[str, str]


class MetricsFile(Logger):
    """Logger that writes `<run_dir>/metrics.csv`.

    Lightning's CSVLogger deletes an existing file and writes several rows per step. This logger
    writes one row per step, with an empty cell for each metric not measured at that step, and a
    resumed run keeps the rows up to the step that it resumes from (`rewind`).
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.path = run_dir / "metrics.csv"
        self._rows = read_rows(self.path)
        self._columns = _columns(self._rows)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics to the row of `step`. Raises ValueError where `step` is None."""
        if step is None:
            raise ValueError("a row of metrics.csv needs its step")
        cells = {name: repr(float(value)) for name, value in metrics.items()}
        is_new_row = step > max(self._rows, default=-1)
        self._rows.setdefault(step, {}).update(cells)
        if is_new_row and self.path.exists() and cells.keys() <= set(self._columns):
            with full_disk_told(self.path), self.path.open("a", newline="") as file:
                self._writer(file).writerow({STEP: step, **cells})
        else:
            self._rewrite()

    def rewind(self, step: int) -> None:
        """Delete the rows after `step`."""
        self._rows = {s: row for s, row in self._rows.items() if s <= step}
        self._rewrite()

    def flush(self) -> None:
        """Write all rows to the disk, so that they survive a loss of power."""
        if self.path.exists():
            flush(self.path)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the hyperparameters: the run folder already holds the configuration."""

    def _rewrite(self) -> None:
        self._columns = _columns(self._rows)
        with written_whole(self.path) as beside, beside.open("w", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows({STEP: step, **self._rows[step]} for step in sorted(self._rows))

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, fieldnames=[STEP, *self._columns])


def read_rows(path: Path) -> dict[int, Row]:
    """Return step -> its cells that are not empty; {} where there is no file.

    A last line without line end is ignored: a row that was cut off may show "1" for 12.
    Raises CheckpointError with the line number where a complete line is not a valid row.
    """
    if not os.path.lexists(path):
        return {}
    text = read_text(path)
    try:
        header, *lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[STEP]]
    except csv.Error as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if header[0] != STEP or len({*header}) != len(header) or not all(header):
        raise CheckpointError(
            f"{path}, line 1, is damaged: found {','.join(header)[:60]!r}; allowed: {STEP}, and "
            "names that are all different"
        )
    rows: dict[int, Row] = {}
    for number, cells in enumerate(lines, start=2):
        try:
            step = int(cells[0])
            row = {name: x for name, x in zip(header[1:], cells[1:], strict=True) if x}
            [float(x) for x in row.values()]
            if step <= max(rows, default=-1):
                raise ValueError
        except (ValueError, IndexError):
            raise CheckpointError(
                f"{path}, line {number}, is damaged: found {','.join(cells)[:60]!r}; allowed: a "
                f"step larger than those before it, and {len(header) - 1} numbers or empty cells. "
                "Delete that line, or mend it"
            ) from None
        rows[step] = row
    return rows


def _columns(rows: Mapping[int, Row]) -> list[str]:
    """Return the metric names in the order of METRICS, then all others in alphabetical order."""
    names = {name for row in rows.values() for name in row}
    return sorted(names, key=lambda n: (_ORDER[n] if n in _ORDER else len(_ORDER), n))


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

    def rewind(self, step: int) -> None:
        """Hide the events after `step` in earlier event files."""
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
            Event,
            SessionLog,
        )

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step + 1, session_log=start))

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
    loggers: Sequence[Logger], name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]],
    step: int,
) -> None:  # fmt: skip
    """Log a table to W&B, where it is one of the loggers."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            logger.log_metrics({name: table}, step=step)


def _wandb_run(config: WandbConfig, run_dir: Path, identity: RunIdentity) -> Run:
    import wandb
    from wandb.errors import AuthenticationError, CommError

    group = config.group or os.getenv("WANDB_RUN_GROUP") or (identity.run if identity.job else None)

    def start(mode: Any) -> Run:
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
        upload = f"upload later with `wandb sync {Path(run.dir).parent}`"
        print(visible_line(f"W&B: offline{reason}; {upload}"))
    return run


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
