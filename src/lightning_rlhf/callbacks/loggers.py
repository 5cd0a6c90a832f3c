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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from matplotlib.image import imread
from torch import Tensor

from lightning_rlhf.callbacks import files
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.metrics import METRICS
from lightning_rlhf.io.console import print_line, visible_line
from lightning_rlhf.io.storage import flush, storage_errors, written_whole

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

AXIS = "iteration"
"""W&B's x-axis: iterations of PPO, optimizer steps of the other stages."""
NAME_CHARACTERS, TAG_CHARACTERS = 128, 64
"""Largest numbers of characters that W&B allows in the name of a run or group, and in a tag."""


class RunWandb(WandbLogger):
    """A W&B logger with the key `iteration` as its x-axis instead of trainer/global_step.

    W&B uploads in a separate process, wandb-core, which also waits for a lost network connection.
    If that process ends before the run does (killed, or out of memory), this logger prints one line
    and logs nothing more.
    """

    has_ended = False
    """True once W&B's process has ended."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        axis = {} if step is None else {AXIS: step}
        self._try(lambda: self.experiment.log({**metrics, **axis}))

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which W&B shows on the run's page and passes on by mail or Slack."""
        self._try(lambda: self.experiment.alert(title=title, text=text, level="WARN"))

    def close(self, exit_code: int) -> None:
        """Finish the W&B run and its process, so that the next run here starts anew."""
        import wandb

        self._try(lambda: self.experiment.finish(exit_code=exit_code))
        with suppress(*end_errors()):
            wandb.teardown()

    def _try(self, ask: Callable[[], None]) -> None:
        """Call `ask` unless W&B's process has ended; other errors are raised."""
        if self.has_ended:
            return
        try:
            ask()
        except end_errors():
            self.has_ended = True
            print_line(
                "W&B: its process has ended; the run goes on without it: metrics.csv has every "
                "row, W&B those before at most"
            )


def end_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that W&B raises when its process has ended."""
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    return ConnectionError, HandleAbandonedError, MailboxClosedError


class MetricsFile(Logger):
    """Logger that writes `<run_dir>/metrics.csv`.

    Lightning's CSVLogger deletes an existing file and writes several rows per step. This logger
    writes one row per step, with an empty cell for each metric not measured at that step, and a
    resumed run keeps the rows up to the step that it resumes from (`rewind`). Columns are in the
    order of METRICS, then all others in alphabetical order.
    """

    name, version, save_dir = "metrics", "", ""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.save_dir = str(run_dir)
        self.path = run_dir / "metrics.csv"
        self._rows = files.read_rows(self.path)
        self._columns: list[str] = []
        """Columns of the file as this logger has written it; empty before."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics to the row of `step`. Raises ValueError where `step` is None."""
        if step is None:
            raise ValueError("a row of metrics.csv needs its step")
        cells = {name: float(value) for name, value in metrics.items()}
        is_new_row = step > next(reversed(self._rows), -1)
        self._rows.setdefault(step, {}).update(cells)
        if is_new_row and cells.keys() <= set(self._columns) and self.path.exists():
            with storage_errors(self.path), self.path.open("a", newline="") as file:
                writer = csv.DictWriter(file, [files.STEP, *self._columns])
                writer.writerow({files.STEP: step, **cells})
        else:
            self.rewind(max(self._rows))

    def rewind(self, step: int) -> None:
        """Write the file anew, without the rows after `step`."""
        self._rows = {s: self._rows[s] for s in sorted(self._rows) if s <= step}
        order = {name: place for place, name in enumerate(METRICS)}
        names = {name for row in self._rows.values() for name in row}
        self._columns = sorted(names, key=lambda n: (order.get(n, len(order)), n))
        with written_whole(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, [files.STEP, *self._columns])
            writer.writeheader()
            writer.writerows({files.STEP: s, **row} for s, row in self._rows.items())

    def flush(self) -> None:
        """Write all rows to the disk, so that they survive a loss of power."""
        if self.path.exists():
            flush(self.path)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the hyperparameters: the run folder already holds the configuration."""


class RunTensorBoard(TensorBoardLogger):
    """A TensorBoard logger that writes to `<run_dir>/tensorboard`, without numbered versions."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(save_dir=run_dir, name="tensorboard", version="", default_hp_metric=False)

    def rewind(self, step: int) -> None:
        """Hide the events after `step` in earlier event files."""
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        event = event_pb2.Event(step=step + 1, session_log=start)
        self.experiment._get_file_writer().add_event(event)

    def flush(self) -> None:
        """Write all events to the disk, so that they survive a kill and a loss of power."""
        self.experiment.flush()
        flush(Path(self.log_dir))


def tags_of(stage: str, model: str, job: str | None) -> list[str]:
    """Return the tags of a run: stage, model, job, and each value in the job's name.

    The name of a sweep's job is key=value,key=value; a list as value has commas as well.
    """
    varied = [job, *re.split(",(?=[^,=]+=)", job)] if job else []
    return list(dict.fromkeys(fitted(tag, TAG_CHARACTERS) for tag in (stage, model, *varied)))


def fitted(text: str, longest: int) -> str:
    """Return `text`; cut to `longest` characters it ends with a checksum, so as to stay unique."""
    checksum = f"-{zlib.crc32(text.encode()):08x}"
    return text if len(text) <= longest else text[: longest - len(checksum)] + checksum


def build_loggers(
    config: files.LoggerConfig, run_dir: Path, about: Mapping[str, Any]
) -> list[Logger]:
    """Return MetricsFile, then the configured logger; both continue the files in `run_dir`.

    about: arguments of wandb.init that describe the run: name, group, job_type, tags, config.
    """
    loggers: list[Logger] = [MetricsFile(run_dir)]
    if isinstance(config, files.WandbConfig):
        run = wandb_run(config, run_dir, about)
        loggers.append(RunWandb(project=config.project, save_dir=run_dir, experiment=run))
    elif config.kind == "tensorboard":
        loggers.append(RunTensorBoard(run_dir))
    return loggers


def close_loggers(loggers: Sequence[Logger], exit_code: int) -> None:
    """Finish the W&B run, so that the next run in this process starts a new one."""
    for logger in loggers:
        if isinstance(logger, RunWandb):
            logger.close(exit_code)


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


def log_histograms(loggers: Sequence[Logger], columns: Mapping[str, Tensor], step: int) -> None:
    """Log the numbers of each component of the reward to loggers that draw histograms."""
    for logger in loggers:
        for name, numbers in columns.items():
            if isinstance(logger, WandbLogger):
                import wandb

                histogram: Any = wandb.Histogram(numbers.tolist())
                logger.log_metrics({f"histogram/reward/{name}": histogram}, step=step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_histogram(f"histogram/reward/{name}", numbers, step)


def log_table(
    loggers: Sequence[Logger], name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Log a table to W&B, where it is one of the loggers, at step 0."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            logger.log_metrics({name: table}, step=0)


def wandb_run(config: files.WandbConfig, run_dir: Path, about: Mapping[str, Any]) -> Run:
    """Return the run of W&B, online or offline; a resumed run continues the one of its folder."""
    import wandb
    from wandb.errors import AuthenticationError, CommError

    group = config.group or os.getenv("WANDB_RUN_GROUP") or about["group"]
    if not (run_dir / files.WANDB_ID).exists():
        with written_whole(run_dir / files.WANDB_ID) as temporary:
            temporary.write_text(secrets.token_hex(4))
    names = {
        "name": fitted(about["name"], NAME_CHARACTERS),
        "group": None if group is None else fitted(group, NAME_CHARACTERS),
        "tags": [*about["tags"], *config.tags],
        "id": files.read_wandb_id(run_dir / files.WANDB_ID),
    }

    def start(mode: Any) -> Run:
        return wandb.init(
            project=config.project,
            entity=config.entity,
            dir=run_dir,
            mode=mode,
            resume="allow" if mode == "online" else None,
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=mode != "online",
                init_timeout=config.init_timeout_s,
                finish_timeout=config.finish_timeout_s,
            ),
            **{**about, **names},
        )

    mode, why = config.start_mode, "WANDB_API_KEY and netrc hold no key"
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
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)
    if run.offline:
        reason = f", as {why}" if mode == "online" or not files.wandb_key_present() else ""
        upload = f"upload later with `wandb sync {Path(run.dir).parent}`"
        print(visible_line(f"W&B: offline{reason}; {upload}"))
    return run
