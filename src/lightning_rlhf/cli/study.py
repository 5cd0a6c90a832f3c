"""A sweep as a study of Optuna: its trials, their jobs, and how a run reports to its trial."""

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import optuna
from filelock import Timeout
from hydra.core.override_parser.types import IntervalSweep, Override, Sweep
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf
from optuna import distributions
from optuna.pruners import BasePruner, NopPruner
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.progress import is_evaluation, trained
from lightning_rlhf.cli.arguments import key_of, parse_overrides, without_secrets
from lightning_rlhf.cli.sweep import NEUTRAL, STOPPED, Job, Jobs, job_name, stopped_by
from lightning_rlhf.core import errors, validation
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.metrics import METRICS, require_metrics
from lightning_rlhf.evaluation.select import metric_of
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import locked
from lightning_rlhf.runs.folders import flatten
from lightning_rlhf.runs.settings import read_settings

KEY = "hydra.sweeper"
Direction = Literal["maximize", "minimize"]
DIRECTIONS: Mapping[Direction, Mode] = {"maximize": "max", "minimize": "min"}
"""Direction in the words of Optuna -> that in which a metric is better."""
FIXED, RESULT, PRUNED = "overrides", "result", "pruned_at"
"""Name under which a study stores what all its trials share, and a trial the result of its job and
the step at which its pruner ended it."""
STORAGE = "LIGHTNING_RLHF_STORAGE"
"""Environment variable from which the jobs read the address of a database, which may hold a
password: it stands in no command line and no file of a run."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class StudyConfig:
    """The section hydra.sweeper of `hydra/sweeper=optuna`."""

    metric: validation.Text
    """Metric of the evaluation that is optimised, and by which trials are pruned."""
    direction: Direction | None
    """Direction in which the metric is better; null for that of its definition."""
    n_trials: validation.PositiveInt
    """Number of trials of the study, over all commands."""
    n_jobs: validation.PositiveInt
    """Number of trials that are handed to the launcher together."""
    storage: validation.Text
    """Path of the study's file, or the address of a database."""
    study_name: validation.Text
    sampler: Mapping[str, Any]
    pruner: Mapping[str, Any] | None
    params: Annotated[Mapping[str, Any], Field(strict=False)]
    """Key of the configuration -> its sweep, besides those of the command line."""


def read_study_config(options: Mapping[str, Any], cfg: DictConfig) -> StudyConfig:
    """Return the checked section, with the direction in which its metric is better by default.

    cfg: configuration of a job without what is chosen for it.

    Raises ConfigError naming a key, also where the stage does not measure the metric, or where the
    direction is not known or contradicts the metric's definition. What a callback of the user's
    own, a report or a recipe measures is not known before the first trial ends.
    """
    plain: Any = OmegaConf.to_container(OmegaConf.create(dict(options)), resolve=True)
    study = validation.build(StudyConfig, plain, KEY)
    name, settings = study.metric, None
    better = METRICS[name].better if name in METRICS else None
    with suppress(errors.ConfigError):  # each job reports it, unless what is chosen mends it
        settings = None if cfg.stage is None and cfg.recipe is not None else read_settings(cfg)
    if settings is not None:
        stage = settings.definition
        better = dict(stage.goal).get(name, better)
        is_evaluated = stage.trains and not name.startswith("compute/")
        if (is_evaluated or name.startswith("eval/")) and not cfg.callbacks:
            metric_of(settings, KEY, name, "max")
    words = [word for word, mode in DIRECTIONS.items() if better in (None, mode)]
    direction = study.direction or (words[0] if better else None)
    errors.require(
        direction in words, f"{KEY}.direction", direction, f"{' or '.join(words)} for {name}"
    )
    return replace(study, direction=direction)


def space_of(override: Override) -> distributions.BaseDistribution:
    """Return the values among which a sweep of the command line chooses.

    interval(a,b) is a range of numbers, of whole ones as int(interval(a,b)), and by their logarithm
    as tag(log,interval(a,b)). Everything else is a list of choices.

    Raises ConfigError where Optuna refuses it, or for a tag that nothing reads.
    """
    value: Any = override.value()
    line = str(override.input_line).partition("=")[2]
    try:
        is_range = isinstance(value, IntervalSweep)
        if isinstance(value, Sweep) and value.tags - ({"log"} if is_range else set()):
            raise ValueError("a tag that nothing reads")
        if not is_range:
            return distributions.CategoricalDistribution([*override.sweep_string_iterator()])
        is_whole = isinstance(value.start, int)
        is_cut = is_whole and re.search(r"\d\.|\.\d|\d[eE]", line)
        if is_cut or not -math.inf < value.start <= value.end < math.inf:
            raise ValueError("no such range")
        kind: Any = distributions.IntDistribution if is_whole else distributions.FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)  # type: ignore[no-any-return]
    except ValueError as error:
        raise errors.ConfigError(
            f"{override.input_line}: {error}; allowed: values, interval(LOW,HIGH) of numbers, "
            "int(interval(LOW,HIGH)) of whole ones, tag(log,...) of either, with LOW above 0"
        ) from error


class Trials:
    """The trials of a study, each of which is a job of the sweep."""

    def __init__(self, config: StudyConfig, sweep: Jobs) -> None:
        """Open the study, or make it.

        Raises ConfigError where nothing is to be chosen, or where the study has trials of other
        values, choices or kinds of range.
        """
        given = {key_of(word) for word in sweep.words}
        params = [f"{key}={x}" for key, x in config.params.items() if key not in given]
        overrides = parse_overrides([*params, *sweep.words])
        assert config.direction is not None  # read_study_config sets it
        self.config, self.sweep = config, sweep
        sweep.goal = config.metric, DIRECTIONS[config.direction]
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        self.space = {o.get_key_element(): space_of(o) for o in overrides if o.is_sweep_override()}
        if not self.space:
            raise errors.ConfigError(
                "hydra/sweeper=optuna has nothing to choose; allowed: a sweep for at least one "
                "key, as 'ppo.kl_coef=tag(log,interval(0.01,0.5))' or seed=1,2,3"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sweep.folder.mkdir(parents=True, exist_ok=True)
        self.is_database = "://" in config.storage
        self.place = config.storage if self.is_database else str(Path(config.storage).absolute())
        self.name = f"{config.study_name!r} in {without_secrets(self.place)}"
        self.study = optuna.create_study(
            storage=open_storage(self.place), study_name=config.study_name,
            direction=config.direction, load_if_exists=True,
        )  # fmt: skip
        sampler = dict(config.sampler)
        if sampler.get("seed") is not None:  # the values of the first trials are not chosen again
            sampler["seed"] += len(self.study.trials)
        self.study.sampler = instantiate(sampler)
        now = sorted(word for word in self.fixed if key_of(word) not in NEUTRAL)
        for key, space in sorted(self.space.items()):  # choices, or the kind of a range
            kind = type(space).__name__, f"log={getattr(space, 'log', False)}"
            now.append(f"{key}={','.join(map(str, getattr(space, 'choices', kind)))}")
        now += [f"{KEY}.{key}={getattr(config, key)}" for key in ("metric", "direction")]
        was = self.study.user_attrs[FIXED] if self.study.trials else now
        if was != now:
            old = " ".join(word for word in was if word not in now) or "defaults"
            new = " ".join(word for word in now if word not in was) or "defaults"
            raise errors.ConfigError(
                f"the study {self.name} has trials of {old}, not of {new}; allowed: the same "
                f"values and choices, or {KEY}.study_name=NAME for another study"
            )
        self.study.set_user_attr(FIXED, now)

    def run(self) -> None:
        """Run trials until the study has as many as it should, in batches of `n_jobs`.

        Trials that an earlier command began are the first ones; finished ones are not repeated.

        Raises ConfigError where another command, which would take the running trials, holds the
        lock: a file beside that of the study, for a database in the folder of the sweep.
        """
        place = self.sweep.folder / "database" if self.is_database else Path(self.place)
        name = job_name([f"study={self.config.study_name}"], None)  # which a file may have
        file = place.with_name(f".{place.name}.{name}.lock")
        lock, config, results = ExitStack(), self.config, self.sweep.results
        try:
            lock.enter_context(locked(file))
        except Timeout:
            reason = f"another command runs trials of the study {self.name}, and holds {file}"
            ways = f"one at a time, with {KEY}.n_jobs and a launcher for several trials"
            raise errors.ConfigError(f"{reason}; allowed: {ways}") from None
        with lock:
            trials = self.study.trials
            left = [trial.number for trial in trials if not trial.state.is_finished()]
            results += [Job(**t.user_attrs[RESULT]) for t in trials if t.state.is_finished()]
            while stopped_by() is None and len(results) < config.n_trials:
                missing = min(config.n_jobs, config.n_trials - len(results))
                new = [self.study.ask(self.space).number for _ in range(missing - len(left))]
                numbers, left = [*left, *new][:missing], left[missing:]
                # Equal trials have one folder: the second is launched when the first has ended.
                firsts = {tuple(self.chosen(n)): n for n in reversed(numbers)}.values()
                left = [n for n in numbers if n not in firsts] + left
                numbers = [n for n in numbers if n in firsts]
                words = [[*self.fixed, *self.chosen(n)] for n in numbers]
                self.sweep.launch(list(map(self.sweep.job, words, map(self.report, numbers))))
                results[-len(numbers) :] = map(self.finish, numbers, results[-len(numbers) :])

    def chosen(self, number: int) -> list[str]:
        """Return the overrides of a trial with the values that its sampler chose, in 4 digits."""
        params = self.study.trials[number].params
        return [f"{k}={f'{x:.4g}' if isinstance(x, float) else x}" for k, x in params.items()]

    def report(self, number: int) -> list[str]:
        """Return the overrides by which the job of a trial reports to the study."""
        storage = self.place
        if self.is_database:
            os.environ[STORAGE], storage = storage, f"${{oc.env:{STORAGE}}}"
        values = {"_target_": f"{__name__}.TrialReport", "storage": storage, "number": number}
        values |= {key: getattr(self.config, key) for key in ("study_name", "metric")}
        words = flatten({**values, "pruner": dict(self.config.pruner or {})}).items()
        return [f"callbacks.trial.{k}={json.dumps(x, ensure_ascii=False)}" for k, x in words]

    def finish(self, number: int, job: Job) -> Job:
        """Report the result of a job to its trial, and return it; a stopped one stays unfinished.

        A job whose run was that of an earlier trial that was pruned is pruned too.
        """
        if job.status == STOPPED:
            return job
        trial = trial_of(self.place, self.config.study_name, number)
        pruned = self.study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        folders = [other.user_attrs[RESULT]["folder"] for other in pruned]
        if job.status == "done" and (PRUNED in trial.user_attrs or job.folder in folders):
            job = replace(job, status="pruned")
        plain = {key: x for key, x in vars(job).items() if key not in ("words", "cfg")}
        trial.set_user_attr(RESULT, plain)
        if job.status == "done":
            require_metrics(f"{KEY}.metric", [(self.config.metric, "max")], job.metrics)
            self.study.tell(number, job.metrics[self.config.metric])
        else:
            state = TrialState.PRUNED if job.status == "pruned" else TrialState.FAIL
            self.study.tell(number, state=state)
        return job


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
        pruner: BasePruner | None = None,
    ) -> None:
        """Set up the callback; the study is read in the first process of the run alone.

        storage: path of the study's file, or the address of a database.
        number: number of the trial in its study.
        pruner: rule by which a run is ended; None for none.
        """
        self.metric = metric
        self.trial = partial(trial_of, storage, study_name, number, pruner or NopPruner())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a resumed run at once whose trial was pruned."""
        is_pruned = trainer.is_global_zero and PRUNED in self.trial().user_attrs
        trainer.should_stop |= trainer.strategy.broadcast(is_pruned)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if not is_fitting or not is_evaluation(trainer) or trained(trainer) == 0:
            return
        metrics: dict[str, Any] = dict(trainer.callback_metrics)
        require_metrics(f"{KEY}.metric", [(self.metric, "max")], metrics)
        is_pruned = False
        if trainer.is_global_zero:
            trial, step = self.trial(), trained(trainer)
            trial.report(float(metrics[self.metric]), step)
            if is_pruned := trial.should_prune():
                trial.set_user_attr(PRUNED, step)
                print_line(f"pruned after step {step}: {self.metric} is behind other trials")
        trainer.should_stop |= trainer.strategy.broadcast(is_pruned)  # in all processes


def open_storage(place: str) -> optuna.storages.BaseStorage:
    """Return the storage of a study: a database's by its address, else a file's."""
    if "://" in place:
        return optuna.storages.get_storage(place)
    return optuna.storages.JournalStorage(JournalFileBackend(place))


def trial_of(
    place: str, study_name: str, number: int, pruner: BasePruner | None = None
) -> optuna.trial.Trial:
    """Return a trial that has not ended, also one that another process began."""
    storage = open_storage(place)
    study = optuna.load_study(study_name=study_name, storage=storage, pruner=pruner)
    study_id = storage.get_study_id_from_name(study_name)
    trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
    return optuna.trial.Trial(study, trial_id)
