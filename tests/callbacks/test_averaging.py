"""The average of the weights against its recurrence by hand, and who has it when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_rlhf.callbacks.stopping import AVERAGE, WeightAverage
from lightning_rlhf.core.errors import ConfigError

from .conftest import Fit


class Counter(LightningModule):
    """Its weight grows by 1 with each optimizer step, of which a batch has two."""

    def __init__(self, name: str = "roles") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        setattr(self, name, nn.Linear(1, 1, bias=False))
        self.name = name
        nn.init.zeros_(self.counted)
        self.critic_roles = nn.Linear(1, 1, bias=False)
        self.validated: list[float] = []
        self.trained: list[float] = []

    @property
    def counted(self) -> nn.Parameter:
        return getattr(self, self.name).weight

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(-self.counted.sum() - self.critic_roles.weight.sum())
            self.optimizers().step()
        self.trained.append(self.counted.item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.counted.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Saved(Callback):
    """Writes a checkpoint after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{args[-1]}.ckpt")


# decay 0.75, weights 1, 2, 3, ...: 1; 0.75 + 0.25 * 2 = 1.25; 0.9375 + 0.75 = 1.6875;
# 1.265625 + 1 = 2.265625; 1.69921875 + 1.25 = 2.94921875; 2.2119140625 + 1.5 = 3.7119140625.
AVERAGES = [1.25, 2.265625, 3.7119140625]


def test_the_average_is_that_by_hand(fit: Fit, tmp_path: Path) -> None:
    """Two validation batches after each training batch, and before the first of them."""
    module = Counter()
    options = {"val_check_interval": 1, "num_sanity_val_steps": 1}
    fit(module, [WeightAverage(0.75), Saved(tmp_path)], [], batches=3, **options)
    assert module.trained == [2.0, 4.0, 6.0]  # no validation changes what is trained
    assert module.validated == [0.0, *(x for average in AVERAGES for x in (average, average))]
    assert module.counted.item() == AVERAGES[-1]
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    for number, average in enumerate(AVERAGES):
        found = torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
        assert found["state_dict"]["roles.weight"].item() == 2.0 * (number + 1)
        assert found[AVERAGE]["roles.weight"].item() == average
        assert found[AVERAGE].keys() == {"roles.weight"}  # not of a critic of its own


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_a_resumed_average_goes_on(fit: Fit, tmp_path: Path, finished: int) -> None:
    """After the last batch too, where nothing is left to train."""
    fit(Counter(), [WeightAverage(0.75), Saved(tmp_path)], [], batches=3)
    module = Counter()
    path = tmp_path / f"{finished - 1}.ckpt"
    fit(module, [WeightAverage(0.75)], [], batches=3, ckpt_path=path)
    assert module.counted.item() == AVERAGES[-1]
    assert module.trained == [4.0, 6.0][finished - 1 :]


def test_an_exception_in_a_validation_leaves_the_trained_weights() -> None:
    module, average = Counter(), WeightAverage(0.75)
    for number in (4.0, 8.0):
        nn.init.constant_(module.counted, number)
        average.update(module)
    nothing: Any = SimpleNamespace()
    average.on_validation_epoch_start(nothing, module)
    assert module.counted.item() == 5.0  # 0.75 * 4 + 0.25 * 8
    average.on_exception(nothing, module, KeyboardInterrupt())
    assert module.counted.item() == 8.0
    average.on_exception(nothing, module, KeyboardInterrupt())
    assert module.counted.item() == 8.0


def test_a_module_without_roles_is_refused(fit: Fit) -> None:
    with pytest.raises(ConfigError, match="null for Counter, which trains no weights in `roles`"):
        fit(Counter("model"), [WeightAverage(0.75)], [], batches=1)
