"""hydra/sweeper=optuna: the trials of a study, what a second command repeats, and pruning."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from omegaconf import OmegaConf
from optuna.trial import TrialState

from lightning_rlhf.cli import study
from lightning_rlhf.cli.arguments import parse_overrides
from lightning_rlhf.cli.study import StudyConfig, Trials, space_of
from lightning_rlhf.cli.sweep import Job
from lightning_rlhf.core.errors import ConfigError

from .conftest import Workplace

METRIC = "eval/reward_mean"
TRIAL = "callbacks.trial"
SPACE = ["ppo.kl_coef=tag(log,interval(0.01,0.5))", "seed=1,2", "ppo.rollout_batch_size=8"]


class Crash(Exception):
    """The command is killed."""


class Launched:
    """A sweep whose jobs end at once, with the KL coefficient as their reward."""

    def __init__(self, crash_at: int | None = None, folder: str | None = None) -> None:
        self.crash_at, self.run_folder = crash_at, folder
        self.launched: list[dict[str, str]] = []
        self.batches: list[int] = []
        """Number of jobs of each call."""
        self.results: list[Job] = []
        self.words: Sequence[str] = ()
        self.folder = Path()

    def job(self, overrides: Sequence[str], more: Sequence[str]) -> list[str]:
        return [*overrides, *more]

    def launch(self, jobs: Sequence[Sequence[str]]) -> None:
        self.batches.append(len(jobs))
        for words in jobs:
            values = dict(word.split("=", 1) for word in words)
            if len(self.launched) == self.crash_at:
                raise Crash
            self.launched.append(values)
            self.results.append(
                Job(
                    overrides=list(words), folder=self.run_folder or f"r/{len(self.results)}",
                    status="done", metrics={METRIC: float(values["ppo.kl_coef"])},
                )
            )  # fmt: skip


def trials(
    folder: Path, jobs: Launched, n_trials: int, words: Sequence[str] = SPACE, **changes: Any
) -> Trials:
    """The trials of one command."""
    options = {
        "metric": METRIC, "direction": "maximize", "n_trials": n_trials, "n_jobs": 1,
        "storage": str(folder / "study.log"), "study_name": "ppo", "pruner": None, "params": {},
        "sampler": {"_target_": "optuna.samplers.RandomSampler", "seed": 0}, **changes,
    }  # fmt: skip
    jobs.words, jobs.folder = words, folder
    return Trials(StudyConfig(**options), jobs)  # type: ignore[arg-type]


def run(folder: Path, jobs: Launched, *args: Any, **changes: Any) -> list[Job]:
    """One command; return the results that it shows."""
    trials(folder, jobs, *args, **changes).run()
    return jobs.results


def read(folder: Path) -> optuna.Study:
    storage = study.open_storage(str(folder / "study.log"))
    return optuna.load_study(study_name="ppo", storage=storage)


def chosen(jobs: Launched) -> list[tuple[str, str]]:
    return [(values["ppo.kl_coef"], values["seed"]) for values in jobs.launched]


def test_trials_are_in_their_intervals_and_their_results_in_the_study(tmp_path: Path) -> None:
    jobs = Launched()
    results = run(tmp_path, jobs, 4, n_jobs=3)
    assert [r.status for r in results] == ["done"] * 4
    for values in jobs.launched:
        assert 0.01 <= float(values["ppo.kl_coef"]) <= 0.5
        assert values["seed"] in ("1", "2")
        assert values["ppo.rollout_batch_size"] == "8"
    assert len({*chosen(jobs)}) == 4
    found = read(tmp_path)
    assert [t.state for t in found.trials] == [TrialState.COMPLETE] * 4
    assert found.best_value == max(float(values["ppo.kl_coef"]) for values in jobs.launched)


def test_the_same_command_goes_on_and_repeats_no_finished_trial(tmp_path: Path) -> None:
    """Killed within its third trial: that one is the first of the second command."""
    first, second = Launched(crash_at=2), Launched()
    with pytest.raises(Crash):
        run(tmp_path, first, 5)
    begun = read(tmp_path).trials[2]
    results = run(tmp_path, second, 5)
    assert len(results) == 5
    assert len(second.launched) == 3
    assert float(second.launched[0]["ppo.kl_coef"]) == pytest.approx(
        begun.params["ppo.kl_coef"], rel=1e-3
    )
    assert len({*chosen(first), *chosen(second)}) == 5
    third = Launched()
    assert len(run(tmp_path, third, 5)) == 5
    assert third.launched == []


def test_equal_trials_are_launched_one_after_the_other(tmp_path: Path) -> None:
    """Since they have one folder, in which two processes would meet."""
    jobs = Launched()
    assert len(run(tmp_path, jobs, 3, ["ppo.kl_coef=choice(0.1)"], n_jobs=2)) == 3
    assert jobs.batches == [1, 1, 1]


def test_a_trial_whose_run_was_pruned_before_is_not_complete(tmp_path: Path) -> None:
    """Its folder is done, and its metric that of a run that ended early."""
    run(tmp_path, Launched(folder="r/one"), 1)
    found = read(tmp_path)
    attributes = found.trials[0].user_attrs
    found.add_trial(optuna.trial.create_trial(state=TrialState.PRUNED, user_attrs=attributes))
    results = run(tmp_path, Launched(folder="r/one"), 3)
    assert [r.status for r in results][2] == "pruned"


def test_a_second_command_on_a_study_leaves_its_running_trials_alone(tmp_path: Path) -> None:
    other = trials(tmp_path, Launched(), 2)

    class Meanwhile(Launched):
        def launch(self, jobs: Sequence[Sequence[str]]) -> None:
            with pytest.raises(ConfigError, match="another command runs trials of the study 'ppo'"):
                other.run()
            super().launch(jobs)

    results = run(tmp_path, Meanwhile(), 2)
    assert [r.status for r in results] == ["done"] * 2
    assert not [*tmp_path.glob("*.lock")]
    other.run()


def test_a_job_reads_the_address_of_a_database_from_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a password, which the job's command line and its config.json are not to have."""
    monkeypatch.setenv(study.STORAGE, "")
    jobs, address = Launched(), f"sqlite:///{tmp_path}/study.db?timeout=10"
    results = run(tmp_path, jobs, 1, storage=address)
    (values,) = jobs.launched
    assert values[f"{TRIAL}.storage"] == f'"${{oc.env:{study.STORAGE}}}"'
    assert os.environ[study.STORAGE] == address
    assert "timeout" not in str(results)
    node = OmegaConf.create({"storage": json.loads(values[f"{TRIAL}.storage"])})
    assert node.storage == address


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (["ppo.kl_coef=0.1"], {}, "nothing to choose"),
        (SPACE[:2], {}, "has trials of ppo.rollout_batch_size=8, not of defaults"),
        (SPACE, {"direction": "minimize"}, "direction=maximize, not of .*direction=minimize"),
        ([SPACE[0], "seed=1,3", SPACE[2]], {}, "trials of seed=1,2, not of seed=1,3; allowed: "),
    ],
)
def test_what_is_no_study_or_another_one_is_refused(
    tmp_path: Path, words: list[str], changes: dict[str, str], message: str
) -> None:
    """Before a trial begins, which the next command would go on with."""
    run(tmp_path, Launched(), 1)
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, Launched(), 2, words, **changes)
    assert len(read(tmp_path).trials) == 1


def test_a_job_gets_its_study_and_a_pruner_that_holds_another(tmp_path: Path) -> None:
    """Hydra parses neither escapes of characters nor dictionaries with quoted keys."""
    folder = tmp_path / "José's run"
    folder.mkdir()
    pruner = {
        "_target_": "optuna.pruners.PatientPruner", "patience": 1,
        "wrapped_pruner": {"_target_": "optuna.pruners.MedianPruner"},
    }  # fmt: skip
    jobs = Launched()
    run(folder, jobs, 1, pruner=pruner)
    (values,) = jobs.launched
    words = [f"{key}={value}" for key, value in values.items() if key.startswith(TRIAL)]
    found = {o.key_or_group.removeprefix(f"{TRIAL}."): o.value() for o in parse_overrides(words)}
    assert found["storage"] == str(folder / "study.log")
    assert found["pruner.wrapped_pruner._target_"] == "optuna.pruners.MedianPruner"


@pytest.mark.parametrize("sweep", ["sft.lr=tag(lgo,interval(1,2))", "seed=range(5,1)"])
def test_a_sweep_of_no_values_is_refused(sweep: str) -> None:
    with pytest.raises(ConfigError, match="allowed: values, interval") as error:
        space_of(*parse_overrides([sweep]))
    assert str(error.value).startswith(f"{sweep}: ")


def test_a_sweep_of_a_range() -> None:
    for sweep in parse_overrides(["a.e2=tag(log,int(interval(1,20)))", "a=interval(1.5,2.5)"]):
        assert space_of(sweep).to_internal_repr(2) == 2


def test_a_trial_that_is_behind_is_pruned_and_is_no_error(workplace: Workplace) -> None:
    """By a bound that no loss of a language model meets. The run ends as by any other rule."""
    outcome = workplace.sweep(
        "hydra/sweeper=optuna", "stage=sft", "sft.val_every=1", "sft.lr=interval(1e-4,1e-3)",
        "hydra.sweeper.metric=eval/loss", "hydra.sweeper.n_trials=1",
        "~hydra.sweeper.pruner.n_startup_trials",
        "hydra.sweeper.pruner._target_=optuna.pruners.ThresholdPruner",
        "hydra.sweeper.pruner.n_warmup_steps=0", "+hydra.sweeper.pruner.upper=-1",
    ).succeeded  # fmt: skip
    assert " pruned " in outcome.out
    assert "callbacks.trial" not in outcome.out
    (final,) = workplace.outputs.glob("default/mini/lr=*/sft/final")
    assert (final.parent / "metrics.csv").read_text().count("\n") < 10
    assert "<td>pruned</td>" in (workplace.outputs / "default/compare.html").read_text()
    storage = study.open_storage(str(workplace.outputs / "default/study.log"))
    (trial,) = optuna.load_study(study_name="sft", storage=storage).trials
    assert trial.state == TrialState.PRUNED
    assert list(trial.intermediate_values) == [1]
    directions = [found.direction for found in optuna.get_all_study_summaries(storage)]
    assert directions == [optuna.study.StudyDirection.MINIMIZE]  # that of eval/loss
