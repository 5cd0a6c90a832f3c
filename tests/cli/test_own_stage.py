"""A stage from outside the package: run, cut off and resumed, in a recipe, and what is refused."""

import json
import shutil

import pytest

from lightning_rlhf.cli.commands import settings_of
from lightning_rlhf.core.errors import ConfigError

from .conftest import PRESETS, Outcome, Workplace, rows, weights

STAGE = '''
"""Hinge loss on the margin of DPO (Liu et al. 2023, https://arxiv.org/abs/2309.06657)."""
from pydantic.dataclasses import dataclass

import lightning as L
import torch
from torch.nn.functional import relu

from lightning_rlhf.callbacks.metrics import FileRows
from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.core.validation import STRICT, PositiveFloat
from lightning_rlhf.models.config import REFERENCE
from lightning_rlhf.modules.optim import trainable_state
from lightning_rlhf.stages.supervised import Supervised

@dataclass(frozen=True, kw_only=True, config=STRICT)
class SLiCConfig(SupervisedConfig):
    beta: PositiveFloat

class SLiCModule(L.LightningModule):
    strict_loading = False
    def __init__(self, roles, config, replicas):
        super().__init__()
        self.roles, self.config = roles, config
    def logprob(self, tokens, mask):  # the prompt's is the same on both sides
        logprobs = self.roles.head(self.roles.hidden(tokens[:, :-1])).log_softmax(-1)
        mask = mask[:, 1:].to(logprobs.device)
        return (logprobs.gather(-1, tokens[:, 1:, None])[..., 0] * mask).sum(-1)
    def margin(self, batch):
        chosen, rejected = (batch.chosen, batch.chosen_mask), (batch.rejected, batch.rejected_mask)
        with torch.no_grad(), self.roles.use_role(REFERENCE):
            reference = self.logprob(*chosen) - self.logprob(*rejected)
        return self.config.beta * (self.logprob(*chosen) - self.logprob(*rejected) - reference)
    def training_step(self, batch, batch_idx):
        loss = relu(1 - self.margin(batch)).mean()
        self.log("update/slic_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        loss = relu(1 - self.margin(batch)).mean()
        self.log("eval/slic_loss", loss, batch_size=len(batch))
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.config.lr)
    def state_dict(self, *args, **kwargs):
        return trainable_state(self)

class SLiC(Supervised):
    name = "slic"
    title = "Sequence likelihood calibration"
    config = SLiCConfig
    data = "preferences"
    module_class = SLiCModule
    metrics = FileRows
    goal = (("eval/slic_loss", "min"),)
'''
SECTION = """
# @package slic
defaults: [sft@_here_, _self_]
definition: mine/slic.py:SLiC
beta: 0.1
"""
SMALL = ["epochs=0.75", "batch_size=4", "microbatch_size=2", "val_every=2", "checkpoint_every=1"]
SMALL = [f"slic.{word}" for word in SMALL]
RECIPE = f"""
title: Sequence likelihood calibration
stages: [sft, slic]
program: null
overrides: [+stages=slic, model=mini, data=small, {", ".join(SMALL)}]
promises: [{{stage: slic, metric: eval/slic_loss, at_most: 1.1}}]
next: ["Compare with PPO."]
"""
OWN = ("--config-dir", "mine")


@pytest.fixture
def place(finished: Workplace) -> Workplace:
    """A workplace with run=default of all stages, and the stage in a folder of the user's own."""
    mine = finished.folder / "mine"
    mine.mkdir()
    for group in ("model", "data", "stage_model"):
        (mine / group).symlink_to(PRESETS / group)
    (mine / "stages").mkdir()
    (mine / "stages" / "slic.yaml").write_text(SECTION.lstrip())
    (mine / "slic.py").write_text(STAGE.lstrip())
    (mine / "small").mkdir()
    (mine / "small" / "recipe.yaml").write_text(RECIPE.lstrip())
    return finished


def slic(place: Workplace, *overrides: str) -> Outcome:
    return place.call(
        *OWN, "+stages=slic", "model=mini", "data=small", "stage=slic", *SMALL, *overrides
    )


def test_it_runs_resumes_and_is_in_a_recipe(place: Workplace) -> None:
    slic(place).succeeded  # noqa: B018
    folder = place.stage("slic")
    unbroken, table = weights(folder), rows(folder)
    # The policy starts as the reference, where every margin is 0 and the loss is 1.
    losses = [float(row["eval/slic_loss"]) for row in table]
    assert losses == pytest.approx([1.0] * 3, abs=0.02)
    assert len({*losses}) == 3
    assert (folder / "curves.png").is_file()
    written = json.loads((folder / "final" / "manifest.json").read_text())
    assert written["stage"] == "slic"
    assert written["parents"] == {"sft": "../../sft/final"}
    assert written["config"]["slic"]["definition"] == "mine/slic.py:SLiC"

    shutil.rmtree(folder / "final")
    (folder / "checkpoints" / "000006.ckpt").unlink()
    assert "slic.lr was 0.0002, is 0.5" in slic(place, "resume=true", "slic.lr=0.5").error
    out = slic(place, "resume=true").succeeded.out
    assert "going on from outputs/default/mini/slic/checkpoints/000005.ckpt" in out
    assert weights(folder) == unbroken
    assert rows(folder) == table

    out = place.call(*OWN, "recipe=mine/small").succeeded.out
    assert "slic: done already" in out
    assert "what it promises" in out
    with pytest.raises(
        ConfigError, match=r"slic.definition is 'mine/slic.py:SLiC'.*--code FILE.py:SLiC"
    ):
        settings_of(folder)


def test_a_stage_without_a_goal_hands_over_its_last_step(place: Workplace) -> None:
    file = place.folder / "mine" / "slic.py"
    file.write_text(file.read_text().replace('    goal = (("eval/slic_loss", "min"),)\n', ""))
    error = slic(place, "final=best").error
    assert error == (
        "slic.final is 'best', and stage=slic names no metric of its evaluations (Stage.goal); "
        "allowed with a metric in slic.best.metric"
    )
    assert "slic.stop.patience is 2, and " in slic(place, "slic.stop.patience=2").error
    assert not place.stage("slic").exists()
    slic(place).succeeded  # noqa: B018
    folder = place.stage("slic")
    ending = json.loads((folder / "ending.json").read_text())
    assert (ending["step"], ending["last_step"], ending["metrics"]) == (6, 6, {})
    assert not (folder / "checkpoints" / "best.ckpt").exists()
