"""The process in which the rows of the check of a GPU are computed."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from gpu_runs import Found, Place, Row, why
from lightning_rlhf.core.errors import RLHFError


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a row."""

    row: Row
    status: Literal["passed", "failed", "not run"]
    reason: str = ""
    """Reason of a row that failed or was not run."""
    found: Found = field(default_factory=Found)
    seconds: float = 0.0
    is_damaged: bool = False
    """True if the row may have left its process in a state that no other row should meet."""


def attempt(row: Row, place: Place, seconds: float) -> Outcome:
    """Return the outcome of a row, computed in this process."""
    try:
        outcome = Outcome(row=row, status="passed", found=row.work(place, row, seconds))
    except RLHFError as error:
        outcome = Outcome(row=row, status="failed", reason=why(error))
    except Exception as error:  # whatever a row raises, the others are run
        return Outcome(row=row, status="failed", reason=why(error), is_damaged=True)
    if place.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return outcome


class Worker:
    """A process that computes rows on the first GPU, started again where it is gone."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.process: Any = None
        self.talk: Any = None

    def run(self, row: Row, seconds: float) -> Outcome:
        """Return the outcome of a row; one that takes longer, or ends its process, has failed."""
        if self.process is not None and not self.process.is_alive():
            self.stop()  # it ended after its last row
        try:
            if self.process is None:
                self.start()
            self.talk.send((row, seconds))
            if self.talk.poll(seconds):
                outcome: Outcome = self.talk.recv()
                if outcome.is_damaged:
                    self.stop()
                return outcome
            reason = f"it took more than {seconds:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join()
            status = self.process.exitcode
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            reason = f"its process was ended by {how}; see {self.place.folder / 'log.txt'}"
        self.stop()
        return Outcome(row=row, status="failed", reason=reason)

    def start(self) -> None:
        """Start the process, and wait until it has imported the libraries."""
        context = multiprocessing.get_context("spawn")
        self.talk, other = context.Pipe()
        self.process = context.Process(target=serve, args=(self.place, other))
        self.process.start()
        other.close()
        self.talk.recv()

    def stop(self) -> None:
        """End the process, and whatever it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
        self.process = None


def serve(place: Place, talk: Connection) -> None:
    """Compute rows as they are asked for; the main function of a worker's process."""
    os.setsid()
    os.environ["CUDA_VISIBLE_DEVICES"] = (place.visible or "0").split(",")[0]
    log = os.open(place.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    talk.send("ready")
    while True:
        row, seconds = talk.recv()
        print(f"--- {row.name}, {row.shape}", flush=True)
        talk.send(attempt(row, place, seconds))
