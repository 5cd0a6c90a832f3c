"""Plugins of Hydra that choose the jobs of a sweep. Imports no slow library.

Hydra accepts plugins from modules of the namespace package `hydra_plugins` alone.
"""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # which is Hydra's default
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class GridSweeper(BasicSweeper):
    """Sweeper whose jobs are all combinations of values, each checked before the first begins."""

    def sweep(self, arguments: list[str]) -> None:
        """Run all jobs. Raises the error of one that cannot be composed or has a wrong value."""
        from lightning_rlhf.cli.arguments import parse_overrides
        from lightning_rlhf.cli.sweep import Jobs, job_settings

        sweep = Jobs(self, arguments, self.params)
        overrides = parse_overrides([*(f"{k}={x}" for k, x in self.params.items()), *arguments])
        jobs = [sweep.job(words) for words in self.split_arguments(overrides, None)[0]]
        for job in jobs:
            job_settings(job.cfg)
        size = self.max_batch_size or max(len(jobs), 1)

        def launch_all() -> None:
            for start in range(0, len(jobs), size):
                sweep.launch(jobs[start : start + size])

        sweep.run(launch_all)


class OptunaSweeper(Sweeper):
    """Sweeper whose jobs are the trials of a study, which another command may go on with."""

    def __init__(self, **options: Any) -> None:
        """Take the keys of conf/hydra/sweeper/optuna.yaml."""
        self.options = options
        self.launcher: Launcher | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials of the study that are left."""
        from lightning_rlhf.cli.arguments import parse_overrides
        from lightning_rlhf.cli.study import Trials, read_study_config
        from lightning_rlhf.cli.sweep import Jobs

        given = parse_overrides(arguments)
        fixed = [str(o.input_line) for o in given if not o.is_sweep_override()]
        swept = [o for o in given if o.key_or_group == "stage" and o.is_sweep_override()]
        stages = [f"stage={name}" for o in swept for name in o.sweep_string_iterator()]
        jobs = [[*fixed, stage] for stage in stages] or [fixed]
        sweep = Jobs(self, arguments, self.options["params"])
        config = read_study_config(self.options, [sweep.compose(job) for job in jobs])
        sweep.run(Trials(config, sweep).run)
