"""Plugins of Hydra that choose the jobs of a sweep. Imports no slow library.

Hydra accepts plugins from modules of the namespace package `hydra_plugins` alone.
"""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # which is Hydra's default


class GridSweeper(BasicSweeper):
    """Sweeper whose jobs are all combinations of values, each checked before the first begins."""

    def sweep(self, arguments: list[str]) -> None:
        """Run all jobs. Raises the error of one that cannot be composed or has a wrong value."""
        from lightning_rlhf.cli.arguments import parse_overrides
        from lightning_rlhf.cli.sweep import Jobs
        from lightning_rlhf.runs.settings import read_settings

        sweep = Jobs(self, arguments, self.params)
        overrides = parse_overrides([*(f"{k}={x}" for k, x in self.params.items()), *arguments])
        jobs = [sweep.job(words) for words in self.split_arguments(overrides, None)[0]]
        for job in jobs:
            if job.cfg.stage is not None or job.cfg.recipe is None:
                read_settings(job.cfg)
        size = self.max_batch_size or len(jobs) or 1
        sweep.run(lambda: [sweep.launch(jobs[k : k + size]) for k in range(0, len(jobs), size)])


class OptunaSweeper(BasicSweeper):
    """Sweeper whose jobs are the trials of a study, which another command may go on with."""

    def __init__(self, **options: Any) -> None:
        """Take the keys of conf/hydra/sweeper/optuna.yaml."""
        super().__init__(None, options["params"])
        self.options = options

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials of the study that are left."""
        from lightning_rlhf.cli.arguments import parse_overrides
        from lightning_rlhf.cli.study import Trials, read_study_config
        from lightning_rlhf.cli.sweep import Jobs

        sweep = Jobs(self, arguments, self.params)
        given = parse_overrides(arguments)
        fixed = [str(o.input_line) for o in given if not o.is_sweep_override()]
        config = read_study_config(self.options, sweep.job(fixed).cfg)
        sweep.run(Trials(config, sweep).run)
