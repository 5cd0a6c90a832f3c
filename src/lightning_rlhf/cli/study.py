"""A sweep as a study of Optuna: its trials, their jobs, and how a run reports to its trial."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import optuna
from filelock import Timeout
from hydra.core.override_parser.types import IntervalSweep, Override, Sweep
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.progress import is_evaluation, trained
from lightning_rlhf.cli.arguments import key_of, parse_overrides, without_secrets
from lightning_rlhf.cli.sweep import (
    NEUTRAL,
    ODD,
    JobResult,
    Jobs,
    folder_name,
    job_place,
    job_settings,
    stopped_by,
)
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.metrics import METRICS, require_metrics
from lightning_rlhf.core.validation import STRICT, PositiveInt, Text, build
from lightning_rlhf.evaluation.select import metric_of
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import locked
from lightning_rlhf.runs.folders import flatten
from lightning_rlhf.runs.process import STOPPED
from lightning_rlhf.runs.stage import find_stage

KEY = "hydra.sweeper"
Direction = Literal["maximize", "minimize"]
DIRECTIONS: Mapping[Direction, Mode] = {"maximize": "max", "minimize": "min"}
"""Direction in the words of Optuna -> that in which a metric is better."""
FIXED, RESULT, PRUNED = "overrides", "result", "pruned_at"
"""Name under which a study stores its fixed overrides, and a trial the result of its job and the
step at which its pruner ended it."""
STORAGE = "LIGHTNING_RLHF_STORAGE"
"""Environment variable from which the jobs read the address of a database, which may hold a
password: it stands in no command line and no file of a run."""
FIELDS = {field.name for field in fields(JobResult)}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StudyConfig:
    """The section hydra.sweeper of `hydra/sweeper=optuna`."""

    metric: Text
    """Metric of the evaluation that is optimised, and by which trials are pruned."""
    direction: Direction | None
    """Direction in which the metric is better; null for that of its definition."""
    n_trials: PositiveInt
    """Number of trials of the study, over all commands."""
    n_jobs: PositiveInt
    """Number of trials that are handed to the launcher together."""
    storage: Text
    """Path of the study's file, or the address of a database."""
    study_name: Text
    sampler: Mapping[str, Any]
    pruner: Mapping[str, Any] | None
    params: Annotated[Mapping[str, Any], Field(strict=False)]
    """Key of the configuration -> its sweep, besides those of the command line."""


def read_study_config(options: Mapping[str, Any], cfgs: Sequence[DictConfig]) -> StudyConfig:
    """Return the checked section, with the direction in which its metric is better by default.

    cfgs: for each stage of the command, the configuration of a job without what is chosen for it.

    Raises ConfigError naming a key, also where a stage does not measure the metric, or where the
    direction is not known, is not the same in all stages, or contradicts the metric's definition.
    """
    plain: Any = OmegaConf.to_container(OmegaConf.create(dict(options)), resolve=True)
    study = build(StudyConfig, plain, KEY)
    better = {direction_of(study.metric, cfg) for cfg in cfgs} - {None}
    words = [word for word, mode in DIRECTIONS.items() if better in ({mode}, set())]
    direction = study.direction or (words[0] if better and words else None)
    allowed = f"{' or '.join(words)} for {study.metric}" if words else (
        f"one metric of all stages, and {study.metric} is better in another direction in each"
    )  # fmt: skip
    require(direction in words, f"{KEY}.direction", direction, allowed)
    return replace(study, direction=direction)


def direction_of(name: str, cfg: DictConfig) -> Mode | None:
    """Return the direction in which a metric is better, None where that is not defined.

    Raises ConfigError where the stage, of a recipe the last one, does not measure the metric. What
    a callback of the user's own, a report or a recipe measures is not known before.
    """
    better = METRICS[name].better if name in METRICS else None
    try:
        settings = job_settings(cfg)
    except ConfigError:  # each job reports it, unless what is chosen mends it
        return better
    stage = find_stage(job_place(cfg)[0]) if settings is None else settings.definition
    if stage is None:
        return better
    is_final = name.startswith("eval/") or (stage.trains and not name.startswith("compute/"))
    if settings is not None and is_final and not cfg.callbacks:
        metric_of(settings, KEY, name, "max")
    return dict(stage.goal).get(name, better)


def space_of(override: Override) -> optuna.distributions.BaseDistribution:
    """Return the values among which a sweep of the command line chooses.

    interval(a,b) is a range of numbers, of whole ones as int(interval(a,b)), and by their logarithm
    as tag(log,interval(a,b)). Everything else is a list of choices.

    Raises ConfigError where there is no value to choose, where a logarithm has none, where a range
    of whole numbers has other ends, which Hydra cuts off, or for a tag that nothing reads.
    """
    value, line = override.value(), str(override.input_line)
    read = {"log"} if isinstance(value, IntervalSweep) else set[str]()
    if isinstance(value, Sweep) and not value.tags <= read:
        raise ConfigError(f"{line} has a tag; allowed: log alone, as tag(log,interval(LOW,HIGH))")
    if not isinstance(value, IntervalSweep):
        choices = list(override.sweep_string_iterator())
        require(bool(choices), "a sweep", line, "one of a value or more")
        return optuna.distributions.CategoricalDistribution(choices)
    low, high, is_log = value.start, value.end, "log" in value.tags
    assert low is not None
    assert high is not None
    is_cut = isinstance(low, int) and re.search(r"\d\.|\.\d|\d[eE]", line.partition("=")[2])
    if not -math.inf < low <= high < math.inf or (is_log and low <= 0) or is_cut:
        raise ConfigError(
            f"{line} is no range; allowed: interval(LOW,HIGH), with LOW above 0 in tag(log,...) "
            "and whole numbers in int(...)"
        )
    if isinstance(low, int) and isinstance(high, int):
        return optuna.distributions.IntDistribution(low, high, log=is_log)
    return optuna.distributions.FloatDistribution(low, high, log=is_log)


class Trials:
    """The trials of a study, each of which is a job of the sweep."""

    def __init__(self, config: StudyConfig, sweep: Jobs) -> None:
        """Open the study, or make it.

        Raises ConfigError where nothing is to be chosen, or where the study has other overrides.
        """
        given = {key_of(word) for word in sweep.words}
        params = [f"{key}={x}" for key, x in config.params.items() if key not in given]
        overrides = parse_overrides([*params, *sweep.words])
        assert config.direction is not None  # read_study_config sets it
        self.config, self.sweep = config, sweep
        sweep.name = folder_name(config.study_name, ODD)
        sweep.goal = config.metric, DIRECTIONS[config.direction]
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        self.space = {o.get_key_element(): space_of(o) for o in overrides if o.is_sweep_override()}
        if not self.space:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to choose; allowed: a sweep for at least one "
                "key, as 'ppo.kl_coef=tag(log,interval(0.01,0.5))' or seed=1,2,3"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sweep.folder.mkdir(parents=True, exist_ok=True)
        self.is_database = "://" in config.storage
        place = config.storage if self.is_database else str(Path(config.storage).absolute())
        self.storage, self.name = place, f"{config.study_name!r} in {without_secrets(place)}"
        self.file = open_storage(place)
        self.study = optuna.create_study(
            storage=self.file, study_name=config.study_name,
            direction=config.direction, load_if_exists=True,
        )  # fmt: skip
        sampler = dict(config.sampler)
        if sampler.get("seed") is not None:  # the values of the first trials are not chosen again
            sampler["seed"] += len(self.study.trials)
        self.study.sampler = instantiate(sampler)
        self.check_same()

    def check_same(self) -> None:
        """Raise ConfigError where trials of the study had other values or other choices."""
        now = sorted(word for word in self.fixed if key_of(word) not in NEUTRAL)
        now += [f"{KEY}.{key}={getattr(self.config, key)}" for key in ("metric", "direction")]
        was = self.study.user_attrs.get(FIXED, now) if self.study.trials else now
        old = [word for word in was if word not in now]
        new = [word for word in now if word not in was]
        for trial in self.study.trials:
            for key in trial.distributions.keys() & self.space.keys():
                try:
                    optuna.distributions.check_distribution_compatibility(
                        trial.distributions[key], self.space[key]
                    )
                except ValueError:
                    old.append(f"{key} from {trial.distributions[key]}")
                    new.append(str(self.space[key]))
        if old or new:
            raise ConfigError(
                f"the study {self.name} has trials of {' '.join(old) or 'defaults'}, not of "
                f"{' '.join(new) or 'defaults'}; allowed: the same values and choices, or "
                f"{KEY}.study_name=NAME for another study"
            )
        self.study.set_user_attr(FIXED, now)

    def run(self) -> None:
        """Run trials until the study has as many as it should, in batches of `n_jobs`.

        Trials that an earlier command began are the first ones; finished ones are not repeated.

        Raises ConfigError where another command, which would take the running trials, holds the
        lock: a file beside that of the study, for a database in the folder of the sweep.
        """
        place = self.sweep.folder / "database" if self.is_database else Path(self.storage)
        file = place.with_name(f".{place.name}.{quote(self.config.study_name, safe='')}.lock")
        try:
            with locked(file):
                self.run_trials()
        except Timeout:
            raise ConfigError(
                f"another command runs trials of the study {self.name}, and holds {file}; "
                f"allowed: one at a time, with {KEY}.n_jobs and a launcher for several trials"
            ) from None
        if self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            best = self.study.best_trial
            words, folder = " ".join(self.chosen(best.number)), best.user_attrs[RESULT]["folder"]
            print_line(f"best trial: {words}: {self.config.metric} {best.value:.4g}; {folder}")

    def run_trials(self) -> None:
        """Run the trials as `run` does, with the study locked."""
        results = self.sweep.results
        left = [t.number for t in self.study.trials if not t.state.is_finished()]
        results += [
            JobResult(**{key: x for key, x in t.user_attrs[RESULT].items() if key in FIELDS})
            for t in self.study.trials
            if t.state.is_finished()
        ]
        while stopped_by() is None:
            missing = min(self.config.n_jobs, self.config.n_trials - len(results))
            if missing <= 0:
                break
            numbers = [left.pop(0) for _ in range(min(missing, len(left)))]
            numbers += [self.study.ask(self.space).number for _ in range(missing - len(numbers))]
            # Equal trials have one folder: the second one is launched when the first has ended.
            firsts = {tuple(self.chosen(n)): n for n in reversed(numbers)}.values()
            left = [n for n in numbers if n not in firsts] + left
            numbers = [n for n in numbers if n in firsts]
            jobs = [self.sweep.job([*self.fixed, *self.chosen(n)], self.report(n)) for n in numbers]
            self.sweep.launch(jobs)
            results[-len(jobs) :] = map(self.told, numbers, results[-len(jobs) :])

    def chosen(self, number: int) -> list[str]:
        """Return the overrides of a trial with the values that its sampler chose, in 4 digits."""
        params = self.study.trials[number].params
        return [f"{k}={f'{x:.4g}' if isinstance(x, float) else x}" for k, x in params.items()]

    def report(self, number: int) -> list[str]:
        """Return the overrides by which the job of a trial reports to the study."""
        storage = self.storage
        if self.is_database:
            os.environ[STORAGE], storage = storage, f"${{oc.env:{STORAGE}}}"
        values = {
            "_target_": f"{__name__}.TrialReport", "storage": storage,
            "study_name": self.config.study_name, "number": number, "metric": self.config.metric,
            "pruner": dict(self.config.pruner or {}),
        }  # fmt: skip
        return [
            f"callbacks.trial.{key}={json.dumps(value, ensure_ascii=False)}"
            for key, value in flatten(values).items()
        ]

    def told(self, number: int, result: JobResult) -> JobResult:
        """Report the result of a job to its trial, and return it; a stopped one stays unfinished.

        A job whose run was that of an earlier trial that was pruned is pruned too.
        """
        if result.status == STOPPED:
            return result
        trial = trial_of(self.study, self.file, number)
        pruned = self.study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        folders = [other.user_attrs[RESULT]["folder"] for other in pruned]
        if result.status == "done" and (PRUNED in trial.user_attrs or result.folder in folders):
            result = replace(result, status="pruned")
        trial.set_user_attr(RESULT, asdict(result))
        if result.status == "done":
            require_metrics(f"{KEY}.metric", [(self.config.metric, "max")], result.metrics)
            self.study.tell(number, result.metrics[self.config.metric])
        else:
            state = TrialState.PRUNED if result.status == "pruned" else TrialState.FAIL
            self.study.tell(number, state=state)
        return result


class TrialReport(Callback):
    """Reports a metric of every evaluation to a trial; ends the run where the pruner says so.

    The run ends as by any rule: it is evaluated and writes `final/`. Evaluations before the first
    step do not count.
    """

    def __init__(
        self,
        *,
        storage: str,
        study_name: str,
        number: int,
        metric: str,
        pruner: optuna.pruners.BasePruner | None = None,
    ) -> None:
        """Set up the callback; the study is read in the first process of the run alone.

        storage: path of the study's file, or the address of a database.
        number: number of the trial in its study.
        pruner: rule by which a run is ended; None for none.
        """
        self.storage, self.study_name, self.number = storage, study_name, number
        self.metric = metric
        self.pruner = pruner or optuna.pruners.NopPruner()

    def trial(self) -> optuna.trial.Trial:
        """Return the trial of the run."""
        storage = open_storage(self.storage)
        study = optuna.load_study(study_name=self.study_name, storage=storage, pruner=self.pruner)
        return trial_of(study, storage, self.number)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a resumed run at once whose trial was pruned."""
        self.end(trainer, trainer.is_global_zero and PRUNED in self.trial().user_attrs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        if not is_evaluation(trainer) or trained(trainer) == 0:
            return
        metrics: dict[str, Any] = dict(trainer.callback_metrics)
        require_metrics(f"{KEY}.metric", [(self.metric, "max")], metrics)
        is_pruned = False
        if trainer.is_global_zero:
            trial, step = self.trial(), trained(trainer)
            trial.report(float(metrics[self.metric]), step)
            is_pruned = trial.should_prune()
            if is_pruned:
                trial.set_user_attr(PRUNED, step)
                print_line(f"pruned after step {step}: {self.metric} is behind other trials")
        self.end(trainer, is_pruned)

    def end(self, trainer: Trainer, is_pruned: bool) -> None:
        """End the run after this step in all processes, where the first one's trial is pruned."""
        if trainer.strategy.broadcast(is_pruned):
            trainer.should_stop = True


def open_storage(place: str) -> optuna.storages.BaseStorage:
    """Return the storage of a study: a database's by its address, else a file's."""
    if "://" in place:
        return optuna.storages.get_storage(place)
    return optuna.storages.JournalStorage(JournalFileBackend(place))


def trial_of(
    study: optuna.Study, storage: optuna.storages.BaseStorage, number: int
) -> optuna.trial.Trial:
    """Return a trial that has not ended, also one that another process began."""
    study_id = storage.get_study_id_from_name(study.study_name)
    trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
    return optuna.trial.Trial(study, trial_id)
