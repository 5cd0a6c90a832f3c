"""-m: a folder for each job, jobs that fail alone, one table and one page at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.cli import sweep as sweeps
from lightning_rlhf.cli.arguments import VisibleFormatter
from lightning_rlhf.cli.sweep import BASIC, Job, Jobs, job_name, job_place
from lightning_rlhf.runs.folders import folder_of
from lightning_rlhf.runs.settings import read_settings

from .conftest import Outcome, Workplace, composed, tree, weights


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which no cell of the table is wrapped."""
    monkeypatch.setenv("COLUMNS", "400")


def table(out: str) -> str:
    """The table at the end, its cells' text without the lines between them."""
    assert out.count("Sweep") == 1
    return re.sub(r"[│┃\s]+", " ", out[out.index("Sweep") :])


def job_folder(place: Workplace, kl_coef: float) -> Path:
    """The folder of the ppo job that ran with this number."""
    return place.outputs / "default" / "mini" / f"kl_coef={kl_coef}" / "ppo"


SWEPT = ("stage=ppo", "ppo.iterations=1", "seed=2")


@pytest.fixture(scope="module")
def swept(
    tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace
) -> tuple[Workplace, Outcome]:
    """A sweep on top of the finished stages, and its output. To be read."""
    place = pipeline.copied(tmp_path_factory.mktemp("swept") / "work")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("COLUMNS", "400")
        return place, place.sweep(*SWEPT, "ppo.kl_coef=0.02,0.5").succeeded


def test_a_folder_for_each_job_and_one_table(swept: tuple[Workplace, Outcome]) -> None:
    place, outcome = swept
    names = {file.parents[2].name for file in place.outputs.rglob("*/ppo/final/manifest.json")}
    assert names == {"mini", "kl_coef=0.02", "kl_coef=0.5"}
    assert "#1 : " in outcome.out
    assert "\\t" not in outcome.out  # the tab with which Hydra indents a job's line
    text = table(outcome.out)
    assert text.count(" done ") == 2
    assert "failed" not in text
    page = (place.outputs / "default" / "compare.html").read_text()
    assert all(f"<td>kl_coef={value}" in page for value in ("0.02", "0.5"))
    assert "Highest eval/reward_mean: " in page
    assert "Highest eval/reward_mean: " in outcome.out


def test_called_again_it_runs_what_is_not_finished(
    swept: tuple[Workplace, Outcome], tmp_path: Path
) -> None:
    """A job that was cut off, and one that was not begun; the finished one stays as it is.

    The new one is the single run of the same numbers.
    """
    shutil.copytree(swept[0].folder, tmp_path / "clean")
    place = Workplace(tmp_path / "clean")
    cut, whole = (job_folder(place, kl_coef=value) for value in (0.02, 0.5))
    before, files = weights(cut), tree(whole)
    there = {path.name for path in place.folder.iterdir()}
    shutil.rmtree(cut / "final")
    outcome = place.sweep(*SWEPT, "ppo.kl_coef=0.02,0.5,0.1", "resume=true").succeeded
    assert table(outcome.out).count(" done ") == 3
    assert weights(cut) == before
    assert tree(whole) == files
    assert {path.name for path in place.folder.iterdir()} == there
    final = [place.stage(stage) / "final" for stage in ("sft", "rm")]
    parents = [f"policy.checkpoint={final[0]}", f"reward.checkpoint={final[1]}"]
    place.mini(*SWEPT, "ppo.kl_coef=0.1", "run=single", *parents).succeeded  # noqa: B018
    assert weights(job_folder(place, kl_coef=0.1)) == weights(place.stage("ppo", "single"))


def test_a_job_that_crashes_is_marked_and_the_others_go_on(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no user's."""
    from lightning_rlhf.runs.run import Run
    from lightning_rlhf.stages import ppo

    original = ppo.hand_over

    def fail_first(ready: Run, *args: object, **kwargs: object) -> Path:
        if ready.settings.seed == 1:
            raise ZeroDivisionError("a fault in the code")
        return original(ready, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ppo, "hand_over", fail_first)
    command = ["stage=ppo", "ppo.iterations=1", "seed=1,2"]
    outcome = finished.sweep(*command)
    assert outcome.status == 1
    text = table(outcome.out)
    assert "ppo.iterations=1 seed=1: ZeroDivisionError: a fault in the code" in text
    assert text.count(" done ") == 1
    page = finished.outputs / "default" / "compare.html"
    assert "<td>ZeroDivisionError: a fault in the code</td>" in page.read_text()

    monkeypatch.setattr(ppo, "hand_over", original)
    failed = finished.outputs / "default/mini/seed=1/ppo"
    checkpoint = tree(failed / "checkpoints")
    again = finished.sweep(*command).succeeded
    assert table(again.out).count(" done ") == 2
    assert "a fault in the code" not in page.read_text()
    assert not (failed / "failed.txt").exists()
    assert tree(failed / "checkpoints").items() >= checkpoint.items()  # it went on from there


def test_hydra_s_lines_show_what_a_terminal_would_obey_and_no_report_of_a_trial() -> None:
    text = "\t#6 : run=\x1b[31m job='kl_coef=0.1' callbacks.trial.storage=/a"
    record = logging.LogRecord("hydra", logging.INFO, "", 0, text, (), None)
    assert VisibleFormatter("%(message)s").format(record) == "        #6 : run=\\x1b[31m"


@pytest.mark.parametrize(
    ("overrides", "varied", "name"),
    [
        (["stage=ppo", "++ppo.kl_coef=0.02", "seed=1"], ["ppo.kl_coef", "seed"],
         "kl_coef=0.02,seed=1"),
        (["stage=ppo", "++ppo.kl_coef=0.02", "seed=1"], ["seed"], "seed=1"),
        (["++sft.lr=1e-3", "++rm.lr=1e-4"], ["sft.lr", "rm.lr"], "rm.lr=1e-4,sft.lr=1e-3"),
        (["stage=sft", "run=x", "seed=1"], ["stage", "run"], None),
    ],
)  # fmt: skip
def test_a_job_is_named_after_what_varies(
    overrides: list[str], varied: list[str] | None, name: str | None
) -> None:
    assert job_name(overrides, varied) == name


def test_names_of_jobs_are_folders_and_differ() -> None:
    """Whatever stands in the values: slashes, quotes, control characters, thousands of letters."""
    values = ["a/b", "a-b", "a b", "a\x1b", "..", ".", "1.", "1", "é" * 300, "é" * 301]
    names = [job_name([f"data.judge={value}"], ["data.judge"]) for value in values]
    assert len(set(names)) == len(values)
    for name in names:
        assert name is not None
        assert re.fullmatch(r"judge=[\w.+=,-]*(?<!\.)", name)
        assert len(name.encode()) <= 255


def test_another_sweep_in_the_same_run_gets_folders_of_its_own(workplace: Workplace) -> None:
    """What does not vary is not in its names."""
    first, found = ["stage=sft", "++sft.epochs=1", "seed=1"], []
    with contextlib.chdir(workplace.folder):
        settings = read_settings(own_config(*first, "job='seed=1'"))
        folder_of(settings).mkdir(parents=True)
        (folder_of(settings) / "config.json").write_text(json.dumps(settings.tree))
        for given in (first, ["stage=sft", "++sft.epochs=2", "seed=1"]):
            cfg = own_config(*given)
            sweeps.set_name(cfg, given, ["seed"])
            found.append(cfg.job)
        # Called again with overwrite=true, it replaces its own run, not that of the other sweep.
        settings = read_settings(own_config(*given, f"job='{found[1]}'"))
        folder_of(settings).mkdir(parents=True)
        (folder_of(settings) / "config.json").write_text(json.dumps(settings.tree))
        cfg = own_config(*given, "overwrite=true")
        sweeps.set_name(cfg, given, ["seed"])
    assert [*found, cfg.job] == ["seed=1", "seed=1,epochs=2", "seed=1,epochs=2"]


def own_config(*overrides: str) -> DictConfig:
    """What Hydra composes of model=mini data=small overrides for a job."""
    cfg = composed(*overrides).copy()
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def jobs_of(place: Workplace, *words: str) -> Jobs:
    """The sweep of these words, whose launcher has not been called."""
    config = OmegaConf.create(
        {"hydra": {"sweep": {"dir": str(place.folder)}, "launcher": {"_target_": BASIC}}}
    )
    context = SimpleNamespace(config_loader=None)
    sweeper: Any = SimpleNamespace(launcher=None, config=config, hydra_context=context)
    return Jobs(sweeper, words, {})


@pytest.mark.parametrize(("ends", "status"), [("stopped", 128 + signal.SIGTERM), ("failed", 1)])
def test_the_exit_status_of_a_sweep(workplace: Workplace, ends: str, status: int) -> None:
    """As `scancel` ends one job of a cluster, or one has failed."""
    sweep = jobs_of(workplace)
    results = [Job(overrides=["seed=1"], status=ends), Job(overrides=["seed=2"], status="done")]
    with pytest.raises(SystemExit) as stop:
        sweep.run(lambda: sweep.results.extend(results))
    assert stop.value.code == status


def test_a_launcher_that_gives_up_leaves_what_the_folders_tell(
    finished: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job has finished, one has failed with a reason, and one was killed."""

    def give_up(*args: object, **kwargs: object) -> None:
        raise MemoryError("a worker was killed")

    with contextlib.chdir(finished.folder):
        sweep = jobs_of(finished)
        sweep.launcher = SimpleNamespace(launch=give_up)
        jobs = []
        for words in (["stage=ppo"], ["stage=ppo", "run=two"], ["stage=ppo", "run=three"]):
            jobs.append(Job(overrides=words, words=words, cfg=own_config(*words)))
        failed = finished.stage("ppo", "two") / "failed.txt"
        failed.parent.mkdir(parents=True)
        failed.write_text("no memory\n")
        with pytest.raises(MemoryError, match="a worker was killed"):
            sweep.run(lambda: sweep.launch(jobs))
    outcomes = [(result.status, result.failure) for result in sweep.results]
    assert outcomes == [("done", None), ("failed", "no memory"), ("failed", "it has no result")]
    assert "failed: stage=ppo run=two: no memory" in capsys.readouterr().out


def test_a_recipe_is_judged_by_its_last_step() -> None:
    tree = {"outputs": "o", "run": "r", "model": {"name": "m"}, "stage": None, "job": "seed=1"}
    for recipe, folder in (("rounds", "round2/eval_policy"), ("bandit", "ppo")):
        cfg = OmegaConf.create(tree | {"recipe": recipe})
        assert job_place(cfg) == Path("o/r/m/seed=1") / folder
