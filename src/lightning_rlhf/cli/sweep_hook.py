"""Hydra callback that shows the table of a sweep; it imports no slow library in other modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

if TYPE_CHECKING:
    from lightning_rlhf.cli.sweep import SweepTable


class SweepHook(Callback):
    """Hydra callback that collects the results of a sweep in a SweepTable.

    SweepTable is imported in sweeps alone, since that takes seconds.
    """

    varied: ClassVar[tuple[str, ...]] = ()
    """Keys whose values differ between the jobs of the sweep."""

    def __init__(self) -> None:
        self._table: SweepTable | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from lightning_rlhf.cli.sweep import SweepTable, varied_keys

        SweepHook.varied = varied_keys(config)
        self._table = SweepTable()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if self._table is not None:
            self._table.add(job_return)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        assert self._table is not None
        self._table.show()
