"""A sweep as a study of Optuna: trials, their jobs, and what an earlier command left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import quote

import optuna
from filelock import Timeout
from hydra.plugins.launcher import Launcher
from optuna.distributions import check_distribution_compatibility
from optuna.trial import FrozenTrial, TrialState

from lightning_rlhf.callbacks.goal import require_metrics
from lightning_rlhf.callbacks.trial import PRUNED, open_storage, trial_of
from lightning_rlhf.cli.job_result import JobResult
from lightning_rlhf.cli.overrides import key_of, parse_overrides
from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.cli.study_config import (
    DIRECTIONS,
    KEY,
    StudyConfig,
    seeded,
    shortened,
    space_of,
)
from lightning_rlhf.cli.sweep import NEUTRAL, ODD, TRIAL, folder_name
from lightning_rlhf.cli.sweep_hook import SweepHook
from lightning_rlhf.cli.sweep_results import SweepResults
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.io.lock import locked
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.changes import flatten
from lightning_rlhf.stages.folder.folders import FINAL
from lightning_rlhf.stages.measured import metrics_of
from lightning_rlhf.stages.process import STOPPED
from lightning_rlhf.stages.registry import STAGES

Batch = Sequence[Sequence[str]]
FIXED, RESULT = "overrides", "result"
"""Name under which a study stores its fixed overrides, and a trial the result of its job."""
STORAGE = "LIGHTNING_RLHF_STORAGE"
"""Environment variable from which the jobs read the address of a database, which may hold a
password: it stands in no command line and no file of a run."""


class Trials:
    """The trials of a study, each of which is a job of the sweep."""

    def __init__(self, config: StudyConfig, arguments: Sequence[str]) -> None:
        """Open the study, or make it.

        arguments: overrides of the command line.

        Raises ConfigError where nothing is to be chosen, or where the study has other overrides.
        """
        given = {key_of(word): word for word in arguments}
        params = [f"{key}={x}" for key, x in config.params.items() if key not in given]
        overrides = parse_overrides([*params, *arguments])
        assert config.direction is not None  # study_config.directed sets it
        self.config, self.direction = config, config.direction
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        self.space = {o.get_key_element(): space_of(o) for o in overrides if o.is_sweep_override()}
        if not self.space:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to choose; allowed: a sweep for at least one "
                "key, as 'ppo.kl_coef=tag(log,interval(0.01,0.5))' or seed=1,2,3"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.is_database = "://" in config.storage
        self.storage = config.storage
        if not self.is_database:
            self.storage = str(Path(config.storage).absolute())
        self.name = f"{config.study_name!r} in {without_secrets(self.storage)}"
        self.file = open_storage(self.storage)
        self.study = optuna.create_study(
            storage=self.file, study_name=config.study_name,
            direction=self.direction, load_if_exists=True,
        )  # fmt: skip
        self.study.sampler = seeded(config.sampler, len(self.study.trials))
        self.check_overrides()
        self.check_space()

    def check_overrides(self) -> None:
        """Raise ConfigError where the trials of the study had other values for what is fixed."""
        now = sorted(word for word in self.fixed if key_of(word) not in NEUTRAL)
        now += [f"{KEY}.{key}={getattr(self.config, key)}" for key in ("metric", "direction")]
        was = self.study.user_attrs.get(FIXED, now) if self.study.trials else now
        if was != now:
            old, new = (
                " ".join(word for word in one if word not in other)
                for one, other in ((was, now), (now, was))
            )
            of = (
                f"of {old}, not of {new}"
                if old and new
                else f"of {old}"
                if old
                else f"without {new}"
            )
            raise ConfigError(
                f"the study {self.name} has trials {of}; allowed: the same values, or "
                f"{KEY}.study_name=NAME for another study"
            )
        self.study.set_user_attr(FIXED, now)

    def check_space(self) -> None:
        """Raise ConfigError where Optuna cannot go on with these values after those of a trial."""
        for trial in self.study.trials:
            for key in trial.distributions.keys() & self.space.keys():
                try:
                    check_distribution_compatibility(trial.distributions[key], self.space[key])
                except ValueError as error:
                    raise ConfigError(
                        f"the study {self.name} chose {key} from "
                        f"{trial.distributions[key]}, not from {self.space[key]}; allowed: the "
                        f"same choices, or {KEY}.study_name=NAME for another study"
                    ) from error

    def run(self, launcher: Launcher, validate: Callable[[Batch], None]) -> None:
        """Run trials until the study has as many as it should, in batches of `n_jobs`.

        Trials that an earlier command began are the first ones; finished ones are not repeated.

        validate: raises an error where jobs cannot be composed.

        Raises ConfigError where another command runs trials of the study.
        """
        results = SweepHook.results
        assert results is not None
        results.name = folder_name(self.config.study_name, ODD)
        results.goal = self.config.metric, DIRECTIONS[self.direction]
        with self.held(results.sweep):
            self.run_trials(results, launcher, validate)
        if SweepHook.progress is not None:
            SweepHook.progress.stop()
        self.print_best()

    @contextmanager
    def held(self, sweep: Path) -> Iterator[None]:
        """Lock the study against other commands inside, which would take its running trials.

        The lock is a file beside that of the study, for a database in the folder `sweep`.
        """
        place = sweep / "database" if self.is_database else Path(self.storage)
        file = place.with_name(f".{place.name}.{quote(self.config.study_name, safe='')}.lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(file))
            except Timeout:
                raise ConfigError(
                    f"another command runs trials of the study {self.name}, and holds {file}; "
                    f"allowed: one at a time, with {KEY}.n_jobs and a launcher for several trials"
                ) from None
            yield

    def run_trials(
        self, results: SweepResults, launcher: Launcher, validate: Callable[[Batch], None]
    ) -> None:
        """Run the trials as `run` does, with the study locked."""
        left = [t.number for t in self.study.trials if not t.state.is_finished()]
        for finished in self.finished():
            results.write(len(results.read()), finished)
        while not results.is_stopped:
            begun = len(results.read())
            missing = min(self.config.n_jobs, self.config.n_trials - begun)
            if missing <= 0:
                break
            numbers = [left.pop(0) for _ in range(min(missing, len(left)))]
            numbers += [self.study.ask(self.space).number for _ in range(missing - len(numbers))]
            # Equal trials have one folder: the second one is launched when the first has ended.
            firsts = {tuple(self.chosen(n)): n for n in reversed(numbers)}.values()
            left = [n for n in numbers if n not in firsts] + left
            numbers = [n for n in numbers if n in firsts]
            jobs = [[*self.fixed, *self.chosen(n), *self.reporting(n)] for n in numbers]
            validate(jobs)
            launcher.launch(jobs, initial_job_idx=begun)
            for job, number in enumerate(numbers, start=begun):
                self.tell(number, results, job)

    def finished(self) -> Iterator[JobResult]:
        """Yield the results of finished trials.

        A failed one whose job has been run alone since counts as complete, once.
        """
        trials = [trial for trial in self.study.trials if trial.state.is_finished()]
        complete = [trial.params for trial in trials if trial.state == TrialState.COMPLETE]
        for trial in trials:
            result = JobResult(**trial.user_attrs[RESULT])
            if trial.state != TrialState.FAIL:
                yield result
            elif trial.params not in complete:
                yield self.repeated(trial, result)

    def repeated(self, trial: FrozenTrial, result: JobResult) -> JobResult:
        """Return the result of a failed trial; if its job has finished since, as a new trial."""
        final = Path(result.folder or "") / FINAL
        stage = STAGES.get(result.stage or "")
        if result.folder is None or stage is None or not final.is_dir():
            return result
        metrics = dict(metrics_of(final, stage))
        done = replace(result, status="done", failure=None, metrics=metrics)
        self.study.add_trial(
            optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions,
                value=self.value(done), user_attrs={RESULT: asdict(done)},
            )
        )  # fmt: skip
        return done

    def chosen(self, number: int) -> list[str]:
        """Return the overrides of a trial with the values that its sampler chose."""
        params = self.study.trials[number].params
        return [f"{key}={shortened(value)}" for key, value in params.items()]

    def reporting(self, number: int) -> list[str]:
        """Return the overrides by which the job of a trial reports to the study."""
        storage = self.storage
        if self.is_database:
            os.environ[STORAGE], storage = storage, f"${{oc.env:{STORAGE}}}"
        values = {
            "_target_": "lightning_rlhf.callbacks.trial.TrialReport", "storage": storage,
            "study_name": self.config.study_name, "number": number, "metric": self.config.metric,
            "pruner": dict(self.config.pruner or {}),
        }  # fmt: skip
        return [
            f"{TRIAL}.{key}={json.dumps(value, ensure_ascii=False)}"
            for key, value in flatten(values).items()
        ]

    def tell(self, number: int, results: SweepResults, job: int) -> None:
        """Report the result of a job to its trial; that of a stopped one remains unfinished."""
        result = results.read()[job]
        if result.status == STOPPED:
            return
        trial = trial_of(self.study, self.file, number)
        if result.status == "done" and (PRUNED in trial.user_attrs or self.is_pruned(result)):
            result = replace(result, status="pruned")
            results.write(job, result)
        trial.set_user_attr(RESULT, asdict(result))
        match result.status:
            case "done":
                self.study.tell(number, self.value(result))
            case "pruned":
                self.study.tell(number, state=TrialState.PRUNED)
            case _:
                self.study.tell(number, state=TrialState.FAIL)

    def is_pruned(self, result: JobResult) -> bool:
        """Return whether the run of a job was that of an earlier trial, which was pruned."""
        pruned = self.study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        return any(trial.user_attrs[RESULT]["folder"] == result.folder for trial in pruned)

    def value(self, result: JobResult) -> float:
        """Return the metric of a finished job. Raises ConfigError where it has none."""
        require_metrics(f"{KEY}.metric", [(self.config.metric, "max")], result.metrics)
        return result.metrics[self.config.metric]

    def print_best(self) -> None:
        """Print the best trial, if one is complete."""
        if self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            best = self.study.best_trial
            words, folder = " ".join(self.chosen(best.number)), best.user_attrs[RESULT]["folder"]
            print_line(f"best trial: {words}: {self.config.metric} {best.value:.4g}; {folder}")
