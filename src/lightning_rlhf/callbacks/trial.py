"""A run as a trial of a study of Optuna, which ends it early where it promises little."""

from __future__ import annotations

from typing import Any

import optuna
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend

from lightning_rlhf.callbacks.checkpoints import trained
from lightning_rlhf.callbacks.contract import is_evaluation
from lightning_rlhf.callbacks.goal import require_metrics
from lightning_rlhf.callbacks.terminal import print_line

PRUNED = "pruned_at"
"""Name under which a trial keeps the step at which its pruner ended it."""


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
        require_metrics("hydra.sweeper.metric", [(self.metric, "max")], metrics)
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


def open_storage(place: str) -> BaseStorage:
    """Return the storage of a study: a database's by its address, else a file's."""
    if "://" in place:
        return get_storage(place)
    return JournalStorage(JournalFileBackend(place))


def trial_of(study: optuna.Study, storage: BaseStorage, number: int) -> optuna.trial.Trial:
    """Return a trial that has not ended, also one that another process began."""
    study_id = storage.get_study_id_from_name(study.study_name)
    trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
    return optuna.trial.Trial(study, trial_id)
