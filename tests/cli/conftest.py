"""The command, called as a user calls it, on a model and data so small that a stage takes seconds.

`model=mini` and `data=small` are presets in tests/cli/presets, given with Hydra's --config-dir as a
user would give presets of his own.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from _posixsubprocess import fork_exec
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_rlhf.callbacks.checkpoints import Checkpoints
from lightning_rlhf.callbacks.progress import trained
from lightning_rlhf.cli import main as entry
from lightning_rlhf.cli.main import main
from lightning_rlhf.core.metrics import MACHINE
from lightning_rlhf.report import figures
from lightning_rlhf.runs.console import CONF, HOME, RECIPES

from ..composing import PRESETS
from ..composing import compositions as compositions
from ..composing import parsed_files as parsed_files

MINI = ("--config-dir", str(PRESETS), "model=mini", "data=small", "preflight=off")
"""Words of every call. The preflight has tests of its own, and so short a run does without it."""
SHIPPED = RECIPES / "quickstart" / "data"
STAGES = ("sft", "rm", "ppo")
ROWS = {"sft_train": 32, "sft_val": 4, "preferences_train": 32, "preferences_val": 4}
ROWS |= {"prompts_train": 16, "prompts_val": 4}


@dataclass(frozen=True)
class Outcome:
    """What a command left on the terminal."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one message of a command that refuses; fails the test where it is anything else."""
        assert self.status == 1, self
        assert "Traceback" not in self.out + self.err, self.err
        assert self.err.startswith("error: "), self.err
        assert self.err.count("error: ") == 1, self.err
        assert len(self.err.strip().splitlines()) == 1, self.err
        return self.err.removeprefix("error: ").strip()

    @property
    def succeeded(self) -> Outcome:
        """Itself; fails the test where the command failed."""
        assert self.status == 0, f"{self.out}\n{self.err}"
        return self


@dataclass(frozen=True)
class Workplace:
    """A folder to stand in, with small data, where `outputs/` grows."""

    folder: Path

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    def stage(self, stage: str, run: str = "default") -> Path:
        """The folder of a stage of model=mini."""
        return self.outputs / run / "mini" / stage

    def copied(self, folder: Path) -> Workplace:
        """A copy of it, in this new folder."""
        return Workplace(shutil.copytree(self.folder, folder, symlinks=True))

    def mini(self, *overrides: str) -> Outcome:
        """`python train.py model=mini data=small overrides`, in this process."""
        return self.call(*MINI, *overrides)

    def sweep(self, *overrides: str) -> Outcome:
        """`python train.py -m model=mini data=small overrides`, in this process."""
        return self.call("-m", *MINI, *overrides)

    def call(self, *arguments: str) -> Outcome:
        """`python train.py arguments`, in this process."""
        out, err = io.StringIO(), io.StringIO()
        status: object = 0
        with (
            contextlib.chdir(self.folder), process_state([str(HOME / "train.py"), *arguments]),
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        ):  # fmt: skip
            try:
                main()
            except SystemExit as stop:
                status = stop.code or 0
        return Outcome(status if isinstance(status, int) else 1, out.getvalue(), err.getvalue())

    def process(
        self, command: list[str], *arguments: str, environment: Mapping[str, str] | None = None
    ) -> Outcome:
        """`command arguments` as a process of its own."""
        done = subprocess.run(
            [*command, *arguments], cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, capture_output=True,
            text=True, check=False, timeout=300,
        )  # fmt: skip
        return Outcome(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def process_state(argv: list[str]) -> Iterator[None]:
    """The command line `argv`; afterwards all that a process holds once is as before.

    Hydra refuses to start inside itself, sets the root logger up and knows its job globally.
    """
    hydra, job = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    environment, arguments = dict(os.environ), sys.argv
    GlobalHydra.instance().clear()
    sys.argv = argv
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(environment)
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        GlobalHydra.instance().hydra = hydra
        HydraConfig.instance().cfg = job


@cache
def composed(*overrides: str) -> DictConfig:
    """What Hydra makes of model=mini data=small overrides; a quarter of a second."""
    entry.register_resolvers()
    _, presets, *mini = MINI
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        path = f"hydra.searchpath=[file://{presets}]"
        return compose("config", [*mini, *overrides, path], return_hydra_config=True)


def run(place: Workplace, key: str, value: Any, *overrides: str) -> Outcome:
    """The command from where Hydra calls it, with `key` set in what it composed."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with contextlib.chdir(place.folder), process_state(["train.py"]):
        cfg = composed(*overrides).copy()
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                entry.compose.__wrapped__(cfg)
            except SystemExit as stop:
                status = stop.code
    assert isinstance(status, int)
    return Outcome(status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Within the block, the subprocess module forks this process in place of starting Python: with
    all that is imported, a program begins in no time. So do the programs that it starts."""
    with patch.multiple(subprocess, _fork_exec=fork_python, _USE_POSIX_SPAWN=False):
        yield


def fork_python(words: Any, *given: Any) -> int:
    """Begin a program in a fork; `given` is what subprocess gives its function in C.

    It stands in for subprocess._fork_exec so that tests are quick: a start costs ten seconds of
    imports.
    """
    assert len(given) == 22  # as in CPython 3.11 to 3.13
    cwd, environment, stdin, _, _, stdout, _, stderr, _, error_pipe = given[3:13]
    new_session, group, before = given[14], given[15], given[20]
    if os.fsdecode(words[0]) != sys.executable:
        return fork_exec(words, *given)
    if pid := os.fork():
        return pid
    status: object = 1
    try:
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        for number, file in enumerate((stdin, stdout, stderr)):
            if file != -1:
                os.dup2(file, number)
        for file in {*given[5:12]} - {-1, 0, 1, 2}:
            os.close(file)
        os.chdir(cwd or ".")
        if new_session:
            os.setsid()
        if group != -1:
            os.setpgid(0, group)
        if before is not None:
            before()
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if environment is not None:
            os.environb.clear()
            os.environb.update(entry.split(b"=", 1) for entry in environment)
        os.close(error_pipe)  # its end says that the program has begun
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        _, *argv = [os.fsdecode(word) for word in words if os.fsdecode(word) != "-u"]
        is_module = argv[0] == "-m"
        with process_state(argv[is_module:]):
            if is_module:
                runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # as the interpreter does, it waits for threads
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status if isinstance(status, int) else 1)


TRAIN_PY = [sys.executable, str(HOME / "train.py")]
MODULE = [sys.executable, "-m", "lightning_rlhf"]
CONSOLE = [str(Path(sys.executable).with_name("lightning-rlhf"))]


@contextlib.contextmanager
def empty_pictures() -> Iterator[None]:
    """Curves and plots, a third of the time of a short run; tests/report looks at real ones."""
    drawn, PNG = Figure.savefig, b"\x89PNG"

    def savefig(self: Figure, file: Path | io.StringIO, **options: Any) -> None:
        drawn(self, file, **options) if isinstance(file, io.StringIO) else file.write_bytes(PNG)

    def draw_plots(path: Path, title: str, plots: Any) -> None:
        path.write_bytes(PNG)

    def svg(plot: Any) -> str:
        return f'<svg role="img" aria-label="{figures._text(plot.title)}"></svg>'

    with (
        patch.object(Figure, "savefig", savefig),
        patch.multiple(figures, svg=svg, draw_plots=draw_plots),
        patch.object(Hydra, "get_mode", lambda *_, **__: None),  # which composes all once more
    ):
        yield


@pytest.fixture(scope="module", autouse=True)
def _pictures_are_empty() -> Iterator[None]:
    with empty_pictures():
        yield


@pytest.fixture(autouse=True)
def _no_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def make_workplace(folder: Path) -> Workplace:
    """A workplace with the first rows of the shipped data, and the card of something else."""
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for name, count in ROWS.items():
        with (SHIPPED / f"{name}.jsonl").open(encoding="utf-8") as file:
            rows = [line for line, _ in zip(file, range(count), strict=False)]
        (folder / "data" / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    return Workplace(folder)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """An empty one."""
    return make_workplace(tmp_path / "work")


@pytest.fixture
def models(workplace: Workplace, pipeline: Workplace) -> Workplace:
    """One with copies of the final/ folders of run=default, sft/ and rm/."""
    for stage in ("sft", "rm"):
        shutil.copytree(pipeline.stage(stage) / "final", workplace.folder / stage)
    return workplace


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """One in which run=default went through all stages. To be read; write into another run.

    Whoever wrote into run=default all the same ends the tests with an error: the tests that come
    after would count files which are not theirs, or not, by the order in which they run.
    """
    place = make_workplace(tmp_path_factory.mktemp("pipeline") / "work")
    with empty_pictures():  # made before the fixtures of a module
        for stage in STAGES:
            place.mini(f"stage={stage}").succeeded  # noqa: B018
    before = tree(place.outputs / "default")
    yield place
    assert tree(place.outputs / "default") == before


@pytest.fixture(scope="session")
def judged(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """One of all stages, with a reward model of another vocabulary, and classifier/."""
    from .others import save_classifier, train

    place = pipeline.copied(tmp_path_factory.mktemp("judged") / "work")
    train(place)
    save_classifier(place.folder / "classifier")
    return place


@pytest.fixture
def finished(tmp_path: Path, pipeline: Workplace) -> Workplace:
    """A copy of the workplace in which all stages ran."""
    return pipeline.copied(tmp_path / "finished")


def tree(folder: Path) -> dict[str, str]:
    """Every file below `folder` and the hash of what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights(stage_folder: Path) -> dict[str, str]:
    """The safetensors in `final/`: adapters, full weights, heads, fingerprints."""
    files = tree(stage_folder / "final")
    return {name: digest for name, digest in files.items() if name.endswith(".safetensors")}


def rows(stage_folder: Path) -> list[dict[str, str]]:
    """metrics.csv without what differs between two equal runs: seconds and memory."""
    with (stage_folder / "metrics.csv").open(newline="") as file:
        return [
            {name: cell for name, cell in row.items() if cell and not name.startswith(MACHINE)}
            for row in csv.DictReader(file)
        ]


def given(place: Workplace) -> list[str]:
    """The parents of run=default, named."""
    return [
        f"policy.checkpoint={place.stage('sft') / 'final'}",
        f"reward.checkpoint={place.stage('rm') / 'final'}",
    ]


class PowerCut(Exception):
    """The plug is pulled."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """cut("step", k): the plug is pulled after the k-th batch and its checkpoint.

    cut("evaluation", k): within the evaluation that follows it.
    """

    def arrange(where: str, step: int) -> None:
        def pull(*args: Any, **kwargs: Any) -> None:
            raise PowerCut

        if where == "hand_over":
            for stage in ("supervised", "ppo"):
                monkeypatch.setattr(f"lightning_rlhf.stages.{stage}.hand_over", pull)
            return
        hook = "on_validation_batch_end" if where == "evaluation" else "on_train_batch_end"
        original = getattr(Checkpoints, hook)

        def pull_after(self: Any, trainer: Any, *arguments: Any) -> None:
            original(self, trainer, *arguments)
            if trained(trainer) == step:
                raise PowerCut

        monkeypatch.setattr(Checkpoints, hook, pull_after)
        monkeypatch.setattr(Checkpoints, "on_exception", lambda *_: None)

    return arrange
