"""-m: a folder for each job, jobs that fail alone, one table at the end."""

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
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.cli.arguments import VisibleFormatter
from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.cli.sweep import (
    BASIC,
    Job,
    JobResult,
    Jobs,
    adapt,
    job_name,
    job_place,
    jobs_table,
    result_of,
)
from lightning_rlhf.evaluation import compare
from lightning_rlhf.runs.console import CONF
from lightning_rlhf.runs.folders import folder_of
from lightning_rlhf.runs.settings import read_settings

from .conftest import MINI, Outcome, Workplace, tree, weights


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which no cell of the table is wrapped."""
    monkeypatch.setenv("COLUMNS", "400")


def table(out: str) -> str:
    """The table at the end, its cells' text without the lines between them."""
    assert out.count("Sweep") == 1
    return re.sub(r"[│┃\s]+", " ", out[out.index("Sweep") :])


def jobs(place: Workplace, stage: str = "ppo") -> set[str]:
    """Names of the folders that the sweep wrote, wherever they lie, by their manifest."""
    found = set()
    for file in place.outputs.rglob("final/manifest.json"):
        written = json.loads(file.read_text())
        if written["stage"] == stage and written["config"]["job"] is not None:
            found.add(written["config"]["job"])
    return found


def job_folder(place: Workplace, kl_coef: float) -> Path:
    """The folder of the finished ppo job that ran with this number."""
    return place.outputs / "default" / "mini" / f"kl_coef={kl_coef}" / "ppo"


SWEPT = ("stage=ppo", "ppo.iterations=1", "seed=2")


@pytest.fixture(scope="module")
def swept(
    tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace
) -> tuple[Workplace, Outcome]:
    """A sweep on top of the finished stages, and what it said. To be read."""
    folder = tmp_path_factory.mktemp("swept") / "work"
    shutil.copytree(pipeline.folder, folder, symlinks=True)
    place = Workplace(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("COLUMNS", "400")
        return place, place.sweep(*SWEPT, "ppo.kl_coef=0.02,0.5").succeeded


@pytest.fixture
def clean_sweep(tmp_path: Path, swept: tuple[Workplace, Outcome]) -> Workplace:
    """A copy of its workplace."""
    shutil.copytree(swept[0].folder, tmp_path / "clean")
    return Workplace(tmp_path / "clean")


def test_a_folder_for_each_job_and_one_table(swept: tuple[Workplace, Outcome]) -> None:
    assert jobs(swept[0]) == {"kl_coef=0.02", "kl_coef=0.5"}
    assert "#1 : " in swept[1].out
    assert "++" not in swept[1].out
    assert "\\t" not in swept[1].out  # the tab with which Hydra indents a job's line
    text = table(swept[1].out)
    assert text.count(" done ") == 2
    assert "failed" not in text
    page = (swept[0].outputs / "default" / "compare.html").read_text()
    assert all(f"<td>kl_coef={value}" in page for value in ("0.02", "0.5"))
    assert "Highest eval/reward_mean: " in page
    assert [file.read_text() for file in (swept[0].outputs / "default").glob("compare_*.html")] == [
        page
    ]


def test_hydra_s_lines_are_indented_and_show_what_a_terminal_would_obey() -> None:
    record = logging.LogRecord("hydra", logging.INFO, "", 0, "\t#%d : run=\x1b[31m", (3,), None)
    assert VisibleFormatter("%(message)s").format(record) == "        #3 : run=\\x1b[31m"
    trial = "#6 : ppo.kl_coef=0.1 job='kl_coef=0.1' callbacks.trial.storage=/a"
    record = logging.LogRecord("hydra", logging.INFO, "", 0, trial, (), None)
    assert VisibleFormatter("%(message)s").format(record) == "#6 : ppo.kl_coef=0.1"


def test_a_job_is_the_single_run_of_the_same_numbers(clean_sweep: Workplace) -> None:
    command = ["stage=ppo", "ppo.iterations=1", "ppo.kl_coef=0.5", "seed=2", "run=single"]
    final = [clean_sweep.stage(stage) / "final" for stage in ("sft", "rm")]
    parents = [f"policy.checkpoint={final[0]}", f"reward.checkpoint={final[1]}"]
    clean_sweep.mini(*command, *parents).succeeded  # noqa: B018
    single = weights(clean_sweep.stage("ppo", "single"))
    assert weights(job_folder(clean_sweep, kl_coef=0.5)) == single


def test_called_again_it_runs_what_is_not_finished(clean_sweep: Workplace) -> None:
    """A job that was cut off, and one that was not begun; the finished one stays as it is."""
    cut, whole = (job_folder(clean_sweep, kl_coef=value) for value in (0.02, 0.5))
    before, files = weights(cut), tree(whole)
    shutil.rmtree(cut / "final")
    outcome = clean_sweep.sweep(*SWEPT, "ppo.kl_coef=0.02,0.5,0.1", "resume=true").succeeded
    assert table(outcome.out).count(" done ") == 3
    assert weights(cut) == before
    assert tree(whole) == files
    assert {path.name for path in clean_sweep.folder.iterdir()} == {"README.md", "data", "outputs"}


def test_a_value_that_is_refused_ends_the_sweep_before_its_first_job(finished: Workplace) -> None:
    before = tree(finished.outputs / "default" / "mini")
    error = finished.sweep("stage=ppo", "ppo.iterations=1", "ppo.minibatch_size=8,7").error
    assert "ppo.rollout_batch_size is 8, which ppo.minibatch_size = 7" in error
    assert tree(finished.outputs / "default" / "mini") == before


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
    assert "a fault in the code" in text
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


def test_a_sweep_of_no_jobs_is_an_error(workplace: Workplace) -> None:
    assert "range(START,STOP)" in workplace.sweep("stage=sft", "seed=range(5,1)").error


def test_a_sweep_of_evaluations_shows_what_their_reports_say(finished: Workplace) -> None:
    """Two rewards of opposite tastes: what the one ranks right the other ranks wrong."""
    rules = "def {}(prompts, responses):\n    return [{}float(len(r)) for r in responses]\n"
    text = rules.format("long", "") + rules.format("short", "-")
    (finished.folder / "rules.py").write_text(text)
    few = ("eval_reward.samples=4", "eval_reward.batch_size=4", "reward=function")
    outcome = finished.sweep("stage=eval_reward", *few, "reward.path=rules.py:long,rules.py:short")
    shown = table(outcome.succeeded.out)
    assert shown.count(" done ") == 2
    assert "fitness/flags" in shown
    files = sorted(finished.outputs.rglob("eval_reward/final/fitness.json"))
    metrics = [json.loads(file.read_text())["metrics"] for file in files]
    found = [numbers["fitness/accuracy"] for numbers in metrics]
    assert len(found) == len(set(found)) == 2
    assert sum(found) == 1
    assert all(f" done {accuracy:.3f} " in shown for accuracy in found), shown


def test_a_sweep_over_stages_and_seeds_keeps_the_seeds_apart(workplace: Workplace) -> None:
    workplace.sweep("stage=sft,rm", "seed=1,2").succeeded  # noqa: B018
    for file in workplace.outputs.rglob("rm/final/manifest.json"):
        written = json.loads(file.read_text())
        parent = file.parent / written["parents"]["sft"] / "manifest.json"
        assert json.loads(parent.read_text())["config"]["seed"] == written["config"]["seed"]
    assert len(jobs(workplace, "rm")) == 2


@pytest.mark.parametrize(
    ("overrides", "varied", "name"),
    [
        (["stage=ppo", "++ppo.kl_coef=0.02", "seed=1"], ["ppo.kl_coef", "seed"],
         "kl_coef=0.02,seed=1"),
        (["stage=ppo", "++ppo.kl_coef=0.02", "seed=1"], ["seed"], "seed=1"),
        (["++sft.lr=1e-3", "++rm.lr=1e-4"], ["sft.lr", "rm.lr"], "rm.lr=1e-4,sft.lr=1e-3"),
        (["advantage=reinforce++", "seed=1"], ["advantage"], "advantage=reinforce++"),
        (["stage=sft"], ["stage"], None),
        (["stage=sft", "run=x", "seed=1"], ["run"], None),
    ],
)  # fmt: skip
def test_a_job_is_named_after_what_varies(
    overrides: list[str], varied: list[str], name: str | None
) -> None:
    assert job_name(overrides, varied) == name


def test_names_of_jobs_are_folders_and_differ() -> None:
    """Whatever stands in the values: slashes, quotes, control characters, thousands of letters."""
    values = ["a/b", "a-b", "a b", "'a'", "a\x1b", "a\u202e", "..", ".", "1.", "1", "é" * 300,
              "é" * 301, "x" * 300]  # fmt: skip
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
            adapt(cfg, given, ["seed"])
            found.append(cfg.job)
    assert found == ["seed=1", "seed-1+sft.epochs-2"]


def own_config(*overrides: str) -> DictConfig:
    """What Hydra composes of model=mini data=small overrides."""
    register_resolvers()
    _, presets, *mini = MINI
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        path = f"hydra.searchpath=[file://{presets}]"
        return compose("config", [*mini, *overrides, path])


def jobs_of(place: Workplace, *words: str) -> Jobs:
    """The sweep of these words, whose launcher has not been called."""
    config = OmegaConf.create(
        {"hydra": {"sweep": {"dir": str(place.folder)}, "launcher": {"_target_": BASIC}}}
    )
    context = SimpleNamespace(config_loader=None)
    sweeper: Any = SimpleNamespace(launcher=None, config=config, hydra_context=context)
    return Jobs(sweeper, words, {})


def end(jobs: Jobs, *results: JobResult) -> object:
    """The exit status of a sweep with these results."""
    try:
        jobs.run(lambda: jobs.results.extend(results))
    except SystemExit as stop:
        return stop.code
    return 0


DONE = JobResult(overrides=["seed=2"], status="done")


def test_a_page_that_is_not_written_is_an_error(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(compare, "compare_runs", fail)
    run = workplace.folder / "ppo"
    run.mkdir()
    (run / "config.json").write_text("{}")
    result = JobResult(overrides=["seed=1"], status="done", folder=str(run), stage="ppo")
    assert end(jobs_of(workplace), result) == 1
    assert "error: no comparison: ValueError: a fault" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("result", "status", "said"),
    [
        ({"status": "stopped", "failure": "stopped"}, 128 + signal.SIGTERM, "the same command"),
        ({"status": "failed", "failure": "no memory"}, 1, "failed: seed=1: no memory"),
        ({"status": "done"}, 0, "done"),
    ],
)
def test_the_exit_status_of_a_sweep(
    workplace: Workplace,
    capsys: pytest.CaptureFixture[str],
    result: dict[str, Any],
    status: int,
    said: str,
) -> None:
    """As `scancel` ends one job of a cluster, a job has failed, or all is well."""
    assert end(jobs_of(workplace), JobResult(overrides=["seed=1"], **result), DONE) == status
    assert said in capsys.readouterr().out


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
    told = [(result.status, result.failure) for result in sweep.results]
    assert told == [("done", None), ("failed", "no memory"), ("failed", "it has no result")]
    assert "failed: stage=ppo run=two: no memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "job", "folder", "stage"),
    [
        ("quickstart", "seed=1", "seed=1/ppo", "ppo"),
        ("dpo", None, "eval_policy", "eval_policy"),
        ("rounds", "seed=1", "seed=1/round2/eval_policy", "eval_policy"),
        ("bandit", "seed=1", "seed=1/ppo", "ppo"),
        ("unknown", "seed=1", "seed=1/ppo", "ppo"),
    ],
)
def test_a_recipe_is_judged_by_its_last_step(
    recipe: str, job: str | None, folder: str, stage: str
) -> None:
    cfg = OmegaConf.create(
        {"outputs": "o", "run": "r", "model": {"name": "m"}, "stage": None, "recipe": recipe,
         "job": job}
    )  # fmt: skip
    assert job_place(cfg) == (stage, Path("o/r/m") / folder)


def test_a_job_without_a_folder_keeps_its_reason() -> None:
    cfg = OmegaConf.create({"outputs": None, "stage": "ppo"})
    job = Job(overrides=["outputs=null"], words=[], cfg=cfg)
    result = result_of(job, "outputs is None; allowed: a folder")
    assert (result.status, result.failure) == ("failed", "outputs is None; allowed: a folder")


def test_the_trials_of_a_study_are_in_the_order_of_its_metric(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Off a terminal no line of the table is broken, however long."""
    results = [
        JobResult(
            overrides=[f"data.sft={'x' * 200}{number}", f"seed={number}"], status=status,
            metrics={"eval/loss": loss}, summary=["eval/loss"],
        )
        for number, (status, loss) in enumerate([("done", 2.0), ("pruned", 0.5), ("done", 1.0)])
    ]  # fmt: skip
    sweep = jobs_of(workplace)
    sweep.goal = "eval/loss", "min"
    assert end(sweep, *results) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed=" in line]
    assert [line.split("seed=")[1][0] for line in lines] == ["2", "0", "1"]


def test_the_jobs_on_the_page_name_the_best_one() -> None:
    words = ["stage=ppo", "ppo.kl_coef=0.1"], ["stage=ppo", "ppo.kl_coef=-1"]
    done = JobResult(
        overrides=words[0], status="done", metrics={"eval/reward_mean": 0.5},
        summary=["eval/reward_mean"],
    )  # fmt: skip
    failed = JobResult(overrides=words[1], status="failed", failure="ppo.kl_coef is -1")
    goal = "eval/reward_mean", "max"
    found = jobs_table([done, failed], goal)
    assert found.title == "Sweep stage=ppo"
    assert found.columns == ["overrides", "status", "reward_mean", "why"]
    assert found.rows == [
        ["ppo.kl_coef=0.1", "done", "0.500", ""],
        ["ppo.kl_coef=-1", "failed", "-", "ppo.kl_coef is -1"],
    ]
    assert found.note == "Highest eval/reward_mean: 0.5, ppo.kl_coef=0.1."
    assert jobs_table([done, failed], None).columns == ["overrides", "status", "reward_mean"]
