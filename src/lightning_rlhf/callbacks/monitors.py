"""The check that a metric which decides something was logged."""

from __future__ import annotations

from collections.abc import Collection

import lightning as L
from lightning.pytorch.callbacks import Callback

from lightning_rlhf.core.errors import ConfigError


def require_logged(what: str, name: str, logged: Collection[str]) -> None:
    """Raise ConfigError unless the metric is among those that were logged.

    what: description of the setting that names the metric.
    """
    if name not in logged:
        allowed = ", ".join(sorted(logged)) or "none, as no metric was logged"
        raise ConfigError(f"{what} is {name!r}, which was not logged; allowed: {allowed}")


class CheckMonitors(Callback):
    """Callback that checks the metric of every EarlyStopping. Place it before them."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in trainer.early_stopping_callbacks:
            if callback is not None and callback.strict:
                what = f"the metric that {type(callback).__name__} monitors"
                require_logged(what, callback.monitor, trainer.callback_metrics)
