"""-m: a folder for each job, jobs that fail alone, one table at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.cli.messages import VisibleFormatter
from lightning_rlhf.cli.sweep import adapt, job_name
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.stages.eval_reward import STAGE
from lightning_rlhf.stages.folder.folders import folder_of
from lightning_rlhf.stages.measured import metrics_of
from lightning_rlhf.stages.paths import CONF
from lightning_rlhf.stages.settings import read_settings

from .conftest import MINI, STAGES, Outcome, Workplace, tree, weights


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


def job_folder(place: Workplace, **values: object) -> Path:
    """The folder of the finished ppo job that ran with these numbers (kl_coef=…, seed=…)."""
    for file in place.outputs.rglob("final/manifest.json"):
        config = json.loads(file.read_text())["config"]
        flat = {**config.get("ppo", {}), "seed": config["seed"]}
        if config["job"] is not None and all(flat.get(k) == v for k, v in values.items()):
            return file.parents[1]
    raise AssertionError(f"no job with {values}")


@pytest.fixture(scope="module")
def swept(
    tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace
) -> tuple[Workplace, Outcome]:
    """A sweep of four on top of the finished stages, and what it said. To be read."""
    folder = tmp_path_factory.mktemp("swept") / "work"
    shutil.copytree(pipeline.folder, folder, symlinks=True)
    place = Workplace(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("COLUMNS", "400")
        command = ["stage=ppo", "ppo.iterations=1", "ppo.kl_coef=0.02,0.5", "seed=1,2"]
        return place, place.sweep(*command).succeeded


@pytest.fixture
def clean_sweep(tmp_path: Path, swept: tuple[Workplace, Outcome]) -> Workplace:
    """A copy of its workplace."""
    shutil.copytree(swept[0].folder, tmp_path / "clean")
    return Workplace(tmp_path / "clean")


def test_a_folder_for_each_job_and_one_table(swept: tuple[Workplace, Outcome]) -> None:
    assert jobs(swept[0]) == {
        f"kl_coef={kl_coef},seed={seed}" for kl_coef in ("0.02", "0.5") for seed in (1, 2)
    }
    assert "#3 : " in swept[1].out
    assert "++" not in swept[1].out
    assert "\\t" not in swept[1].out  # the tab with which Hydra indents a job's line
    text = table(swept[1].out)
    assert text.count(" done ") == 4
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
    trial = '#6 : ppo.kl_coef=0.1 callbacks.trial.storage="/a b" callbacks.trial.number=6'
    record = logging.LogRecord("hydra", logging.INFO, "", 0, trial, (), None)
    assert VisibleFormatter("%(message)s").format(record) == "#6 : ppo.kl_coef=0.1"


def test_jobs_differ_only_where_they_should(clean_sweep: Workplace) -> None:
    low, high = (weights(job_folder(clean_sweep, kl_coef=k, seed=1)) for k in (0.02, 0.5))
    other = weights(job_folder(clean_sweep, kl_coef=0.02, seed=2))
    assert low != high
    assert low != other
    parents = {
        json.loads((job_folder(clean_sweep, seed=s) / "final/manifest.json").read_text())[
            "parents"
        ]["sft"]
        for s in (1, 2)
    }
    assert len(parents) == 1


def test_a_job_is_the_single_run_of_the_same_numbers(clean_sweep: Workplace) -> None:
    command = ["stage=ppo", "ppo.iterations=1", "ppo.kl_coef=0.5", "seed=2", "run=single"]
    final = [clean_sweep.stage(stage) / "final" for stage in ("sft", "rm")]
    parents = [f"policy.checkpoint={final[0]}", f"reward.checkpoint={final[1]}"]
    clean_sweep.mini(*command, *parents).succeeded  # noqa: B018
    single = weights(clean_sweep.stage("ppo", "single"))
    assert weights(job_folder(clean_sweep, kl_coef=0.5, seed=2)) == single


def test_the_single_run_beside_a_sweep_is_left_alone(clean_sweep: Workplace) -> None:
    """And the other way round: overwriting the single run must not delete the sweep."""
    folders = [job_folder(clean_sweep, kl_coef=k, seed=s) for k in (0.02, 0.5) for s in (1, 2)]
    before = [tree(folder) for folder in folders]
    assert (clean_sweep.stage("ppo") / "final").is_dir()
    clean_sweep.mini("stage=ppo", "ppo.iterations=1", "overwrite=true").succeeded  # noqa: B018
    assert [tree(folder) for folder in folders] == before


def test_a_sweep_is_no_run_that_was_cut_off(pipeline: Workplace, finished: Workplace) -> None:
    """A single run of the stage that was only swept starts without resume or overwrite."""
    parents = [
        f"policy.checkpoint={pipeline.stage('sft') / 'final'}",
        f"reward.checkpoint={pipeline.stage('rm') / 'final'}",
    ]
    command = ["stage=ppo", "run=swept", "ppo.iterations=1", *parents]
    finished.sweep(*command, "seed=1,2").succeeded  # noqa: B018
    finished.mini(*command).succeeded  # noqa: B018


def test_called_again_it_does_nothing_anew(clean_sweep: Workplace) -> None:
    folders = [job_folder(clean_sweep, kl_coef=k, seed=s) for k in (0.02, 0.5) for s in (1, 2)]
    before = [tree(folder) for folder in folders]
    command = ["stage=ppo", "ppo.iterations=1", "ppo.kl_coef=0.02,0.5", "seed=1,2"]
    outcome = clean_sweep.sweep(*command).succeeded
    assert table(outcome.out).count(" done ") == 4
    assert [tree(folder) for folder in folders] == before


def test_called_again_it_goes_on_with_what_was_cut_off(clean_sweep: Workplace) -> None:
    """And begins what was not begun, whether resume=true is given or not."""
    whole = [job_folder(clean_sweep, kl_coef=k, seed=1) for k in (0.02, 0.5)]
    before = [weights(folder) for folder in whole]
    cut, missing = whole
    shutil.rmtree(cut / "final")
    shutil.rmtree(missing)
    command = ["stage=ppo", "ppo.iterations=1", "ppo.kl_coef=0.02,0.5", "seed=1,2"]
    clean_sweep.sweep(*command, "resume=true").succeeded  # noqa: B018
    assert [weights(folder) for folder in whole] == before


def test_called_again_it_goes_back_behind_a_damaged_checkpoint(workplace: Workplace) -> None:
    command = ["stage=sft", "seed=1,2", "sft.checkpoint_every=1", "sft.checkpoints_kept=9"]
    workplace.sweep(*command).succeeded  # noqa: B018
    folder = next(workplace.outputs.rglob("seed=1/sft"))
    before = weights(folder)
    shutil.rmtree(folder / "final")
    newest = sorted((folder / "checkpoints").glob("0*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    again = workplace.sweep(*command).succeeded
    assert f"{newest.name} cannot be read" in again.out
    assert weights(folder) == before


def test_a_job_of_unknown_parents_is_left_alone(clean_sweep: Workplace) -> None:
    """Not knowing is no reason to delete what took days."""
    folder = job_folder(clean_sweep, kl_coef=0.02, seed=1)
    (folder / "parents.json").unlink()
    (folder / "keep.txt").write_text("mine")
    command = ["stage=ppo", "ppo.iterations=1", "ppo.kl_coef=0.02", "seed=1,2"]
    clean_sweep.sweep(*command).succeeded  # noqa: B018
    assert (folder / "keep.txt").is_file()


def test_a_sweep_that_fails_fails_whatever_its_overrides_look_like(finished: Workplace) -> None:
    """The table of what happened must not stumble over brackets."""
    command = ["stage=ppo", "data.prompts.train='[/data/a.jsonl]'", "seed=5,6"]
    outcome = finished.sweep(*command)
    assert outcome.status == 1
    assert table(outcome.out).count("failed: ") == 2


@dataclass(frozen=True)
class Again:
    """A sweep over two reward models, called again after one of them was trained again."""

    outcome: Outcome
    left: dict[str, dict[str, str]]
    """reward.checkpoint -> the files of its job after the first call."""
    found: dict[str, dict[str, str]]
    """And after the second."""


OTHER, OWN = "another", "outputs/default/mini/rm/final"


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace) -> Again:
    """In which OWN was trained again and OTHER, a copy from before, was not."""
    folder = tmp_path_factory.mktemp("again") / "work"
    shutil.copytree(pipeline.folder, folder, symlinks=True)
    place = Workplace(folder)
    shutil.copytree(place.stage("rm") / "final", folder / OTHER)
    command = ["stage=ppo", "ppo.iterations=1", f"reward.checkpoint={OTHER},{OWN}"]

    def files() -> dict[str, dict[str, str]]:
        written = {
            file: json.loads(file.read_text())["config"]
            for file in place.outputs.rglob("final/manifest.json")
        }
        return {
            config["reward"]["checkpoint"]: tree(file.parents[1])
            for file, config in written.items()
            if config["job"] is not None
        }

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("COLUMNS", "400")
        place.sweep(*command).succeeded  # noqa: B018
        left = files()
        place.mini("stage=rm", "seed=1", "overwrite=true").succeeded  # noqa: B018
        return Again(place.sweep(*command), left, files())


ADAPTER = "final/adapter_model.safetensors"


def test_a_job_whose_parents_are_the_same_is_not_done_again(again: Again) -> None:
    assert again.found[OTHER] == again.left[OTHER]


def test_a_job_whose_parents_changed_is_done_again(again: Again) -> None:
    assert again.outcome.succeeded
    assert again.found[OWN][ADAPTER] != again.left[OWN][ADAPTER]


def test_a_failed_job_is_marked_and_the_others_go_on(finished: Workplace) -> None:
    command = ["stage=ppo", "ppo.iterations=1", "ppo.minibatch_size=7,8"]
    outcome = finished.sweep(*command)
    assert outcome.status == 1
    assert "Traceback" not in outcome.err
    assert "error: ppo.rollout_batch_size is 8, which ppo.minibatch_size = 7" in outcome.err
    text = table(outcome.out)
    assert text.count(" done ") == 1
    assert text.count("failed: ") == 1
    assert jobs(finished) == {"minibatch_size=8"}


def test_a_job_that_crashes_is_marked_and_the_others_go_on(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no user's."""
    from lightning_rlhf.stages import train_ppo
    from lightning_rlhf.stages.launch import Prepared

    original = train_ppo.hand_over

    def fail_first(ready: Prepared, *args: object, **kwargs: object) -> Path:
        if ready.settings.seed == 1:
            raise ZeroDivisionError("a fault in the code")
        return original(ready, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(train_ppo, "hand_over", fail_first)
    command = ["stage=ppo", "ppo.iterations=1", "seed=1,2"]
    outcome = finished.sweep(*command)
    assert outcome.status == 1
    text = table(outcome.out)
    assert "a fault in the code" in text
    assert text.count(" done ") == 1
    page = finished.outputs / "default" / "compare.html"
    assert "<td>failed</td><td>ZeroDivisionError: a fault in the code</td>" in page.read_text()

    monkeypatch.setattr(train_ppo, "hand_over", original)
    (alone,) = re.findall(r"^  alone: python train.py (.*)$", outcome.out, re.MULTILINE)
    failed = finished.outputs / "default/mini/seed=1/ppo"
    checkpoint = tree(failed / "checkpoints")
    finished.call(*shlex.split(alone)).succeeded  # noqa: B018
    assert (failed / "final").is_dir()
    assert not (failed / "failed.txt").exists()
    assert tree(failed / "checkpoints").items() >= checkpoint.items()  # it went on from there
    again = finished.sweep(*command).succeeded
    assert table(again.out).count(" done ") == 2
    assert "a fault in the code" not in page.read_text()


def test_a_sweep_of_no_jobs_is_an_error(workplace: Workplace) -> None:
    assert "range(START,STOP)" in workplace.sweep("stage=sft", "seed=range(5,1)").error


def test_debug_in_a_sweep_still_ends_in_a_table(finished: Workplace) -> None:
    outcome = finished.sweep(
        "stage=ppo", "ppo.iterations=1", "ppo.minibatch_size=7,8", "debug=true"
    )
    assert outcome.status == 1
    assert "does not divide" in outcome.out + outcome.err


def test_the_failed_job_alone_can_be_run_again(finished: Workplace) -> None:
    """Nothing of the failure stays in its folder."""
    assert finished.sweep("stage=ppo", "ppo.iterations=1", "ppo.minibatch_size=8",
                         "reward.checkpoint=./none").status == 1  # fmt: skip
    finished.sweep("stage=ppo", "ppo.iterations=1", "ppo.minibatch_size=8").succeeded  # noqa: B018


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


def test_a_sweep_over_the_stages_hands_over(workplace: Workplace, pipeline: Workplace) -> None:
    outcome = workplace.sweep("stage=sft,rm,ppo").succeeded
    assert table(outcome.out).count(" done ") == 3
    found = {
        json.loads(file.read_text())["stage"]: weights(file.parents[1])
        for file in workplace.outputs.rglob("final/manifest.json")
    }
    assert found == {stage: weights(pipeline.stage(stage)) for stage in STAGES}


def test_a_sweep_over_stages_and_seeds_keeps_the_seeds_apart(workplace: Workplace) -> None:
    workplace.sweep("stage=sft,rm,ppo", "seed=1,2").succeeded  # noqa: B018
    for file in workplace.outputs.rglob("final/manifest.json"):
        written = json.loads(file.read_text())
        for parent in written["parents"].values():
            manifest = json.loads((file.parent / parent / "manifest.json").read_text())
            assert manifest["config"]["seed"] == written["config"]["seed"]
    assert jobs(workplace) == {*jobs(workplace, "sft")} == {*jobs(workplace, "rm")}
    assert len(jobs(workplace)) == 2


def test_many_and_long_overrides_make_a_folder_all_the_same(finished: Workplace) -> None:
    """A file's name holds 255 bytes; a sweep on one's own data has long paths on its line."""
    deep = finished.folder / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    for part in ("train", "val"):
        source = finished.folder / "data" / f"prompts_{part}.jsonl"
        (deep / source.name).write_text(source.read_text())
    sources = [f"data.prompts.{part}={deep / f'prompts_{part}.jsonl'}" for part in ("train", "val")]
    finished.sweep("stage=ppo", "ppo.iterations=1", "seed=1,2", *sources).succeeded  # noqa: B018
    assert len(jobs(finished)) == 2


def test_nothing_but_outputs_is_left_where_one_stands(clean_sweep: Workplace) -> None:
    left = {path.name for path in clean_sweep.folder.iterdir()}
    assert left == {"README.md", "data", "outputs"}


@pytest.mark.parametrize(
    ("overrides", "varied", "name"),
    [
        (["stage=ppo", "++ppo.kl_coef=0.02", "seed=1"], ["ppo.kl_coef", "seed"],
         "kl_coef=0.02,seed=1"),
        (["stage=ppo", "++ppo.kl_coef=0.02", "seed=1"], ["seed"], "seed=1"),
        (["++sft.lr=1e-3", "++rm.lr=1e-4"], ["sft.lr", "rm.lr"], "rm.lr=1e-4,sft.lr=1e-3"),
        (["advantage=reinforce++", "seed=1"], ["advantage"], "advantage=reinforce++"),
        (["stage=sft"], ["stage"], None),
        (["stage=sft", "run=x", "seed=1"], ["run"], "seed-1"),
        (["stage=ppo", "seed=1", "resume=true"], [], "seed-1"),
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
    """What does not vary in a sweep is not in its names, and may differ from the sweep before."""
    first = ["stage=sft", "++sft.epochs=1", "seed=1"]
    with contextlib.chdir(workplace.folder):
        cfg = own_config(*first)
        adapt(cfg, first, ["seed"])
        assert cfg.job == "seed=1"
        settings = read_settings(cfg)
        folder_of(settings).mkdir(parents=True)
        (folder_of(settings) / "config.json").write_text(json.dumps(settings.tree))
        found = []
        for given in (first, ["stage=sft", "++sft.epochs=2", "seed=1"]):
            cfg = own_config(*given)
            adapt(cfg, given, ["seed"])
            found.append(cfg.job)
    assert found == ["seed=1", "seed-1+sft.epochs-2"]


def test_a_sweep_with_whole_names_goes_on_under_these(workplace: Workplace) -> None:
    given = ["stage=sft", "++sft.epochs=1", "seed=1"]
    (workplace.outputs / "default" / "mini" / "seed-1+sft.epochs-1").mkdir(parents=True)
    with contextlib.chdir(workplace.folder):
        cfg = own_config(*given)
        adapt(cfg, given, ["seed"])
    assert cfg.job == "seed-1+sft.epochs-1"


def own_config(*overrides: str) -> DictConfig:
    """What Hydra composes of model=mini data=small overrides."""
    register_resolvers()
    _, presets, *mini = MINI
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        path = f"hydra.searchpath=[file://{presets}]"
        return compose("config", [*mini, *overrides, path])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "final is missing"),
        (b"", "fitness.json cannot be loaded: Expecting value"),
        (b"[1]", "fitness.json holds no JSON object, but a list"),
        (b'{"metrics": [1]}', "fitness.json is damaged: it holds no metrics"),
        (b'{"metrics": {"fitness/flags": "none"}}', "fitness.json is damaged: it holds no metrics"),
    ],
)
def test_a_damaged_report_of_a_finished_job_is_named(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    final = tmp_path / "eval" / "final"
    if content is not None:
        final.mkdir(parents=True)
        (final / "fitness.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        metrics_of(final, STAGE)


def test_the_numbers_of_a_finished_eval_job_are_read(tmp_path: Path) -> None:
    final = tmp_path / "eval" / "final"
    final.mkdir(parents=True)
    (final / "fitness.json").write_text('{"metrics": {"fitness/flags": 2, "fitness/gap": 0.5}}')
    assert metrics_of(final, STAGE) == {"fitness/flags": 2, "fitness/gap": 0.5}
