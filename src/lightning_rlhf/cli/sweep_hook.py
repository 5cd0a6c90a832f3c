"""What Hydra is given for every command: imports SweepTable, which takes seconds, in a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

if TYPE_CHECKING:
    from lightning_rlhf.cli.sweep import SweepTable


class SweepHook(Callback):
    """SweepTable in a sweep, nothing elsewhere."""

    varied: ClassVar[tuple[str, ...]] = ()
    """Keys in which the jobs of the sweep differ."""

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
