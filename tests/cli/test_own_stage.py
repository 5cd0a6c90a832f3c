"""A stage from outside the package: run, cut off and resumed, in a recipe, and what is refused."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.replay.plan import settings_of

from .conftest import PRESETS, Outcome, Workplace, rows, weights

STAGE = '''
"""Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290)."""
from pydantic.dataclasses import dataclass

import lightning as L
import torch
from torch.nn.functional import logsigmoid

from lightning_rlhf.callbacks.metric_rows import Rows
from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.core.validation import STRICT, PositiveFloat
from lightning_rlhf.models.build_roles import add_policy, start_from
from lightning_rlhf.models.roles import POLICY, REFERENCE, SFT
from lightning_rlhf.modules.optim import trainable_state
from lightning_rlhf.stages.launch import fit, hand_over, make_ready
from lightning_rlhf.stages.stage import Stage
from lightning_rlhf.stages.supervised import read_batches

@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPOConfig(SupervisedConfig):
    beta: PositiveFloat

class DPO(L.LightningModule):
    strict_loading = False
    def __init__(self, roles, config):
        super().__init__()
        self.roles, self.config = roles, config
    def logprob(self, tokens, mask):  # the prompt's is the same on both sides
        logprobs = self.roles.head(self.roles.hidden(tokens[:, :-1])).log_softmax(-1)
        return (logprobs.gather(-1, tokens[:, 1:, None])[..., 0] * mask[:, 1:]).sum(-1)
    def margin(self, batch):
        chosen, rejected = (batch.chosen, batch.chosen_mask), (batch.rejected, batch.rejected_mask)
        with torch.no_grad(), self.roles.use_role(REFERENCE):
            reference = self.logprob(*chosen) - self.logprob(*rejected)
        return self.config.beta * (self.logprob(*chosen) - self.logprob(*rejected) - reference)
    def training_step(self, batch, batch_idx):
        loss = -logsigmoid(self.margin(batch)).mean()
        self.log("update/dpo_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        loss = -logsigmoid(self.margin(batch)).mean()
        self.log("eval/dpo_loss", loss, batch_size=len(batch))
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.config.lr)
    def state_dict(self, *args, **kwargs):
        return trainable_state(self)

def run(settings, config):
    ready = make_ready(settings)
    roles = start_from(settings.model, ready.parents[SFT], trainable=False, seed=settings.seed)
    add_policy(roles, settings.model, settings.seed)
    metrics = fit(ready, DPO(roles, config), read_batches(ready), [Rows()])
    return hand_over(ready, roles, POLICY, metrics, head=None)

STAGE = Stage(name="dpo", title="Direct preference optimization", config=DPOConfig,
              data="preferences", run=run, goal=(("eval/dpo_loss", "min"),))
'''
SECTION = """
# @package dpo
defaults: [sft@_here_, _self_]
definition: mine/dpo.py:STAGE
beta: 0.1
"""
SMALL = ["epochs=0.75", "batch_size=4", "microbatch_size=2", "val_every=2", "checkpoint_every=1"]
SMALL = [f"dpo.{word}" for word in SMALL]
RECIPE = f"""
title: Direct preference optimization
stages: [sft, dpo]
program: null
overrides: [+stages=dpo, model=mini, data=small, {", ".join(SMALL)}]
promises: [{{stage: dpo, metric: eval/dpo_loss, at_most: 1.0}}]
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
    (mine / "stages" / "dpo.yaml").write_text(SECTION.lstrip())
    (mine / "dpo.py").write_text(STAGE.lstrip())
    (mine / "small").mkdir()
    (mine / "small" / "recipe.yaml").write_text(RECIPE.lstrip())
    return finished


def dpo(place: Workplace, *overrides: str) -> Outcome:
    return place.call(
        *OWN, "+stages=dpo", "model=mini", "data=small", "stage=dpo", *SMALL, *overrides
    )


def test_a_stage_takes_less_than_60_lines() -> None:
    lines = [line for line in (STAGE + SECTION).splitlines() if line.strip()]
    assert len(lines) < 60


def test_it_runs_resumes_and_is_in_a_recipe(place: Workplace) -> None:
    dpo(place).succeeded  # noqa: B018
    folder = place.stage("dpo")
    unbroken, table = weights(folder), rows(folder)
    # The policy starts as the reference, where every margin is 0 and the loss is log 2.
    losses = [float(row["eval/dpo_loss"]) for row in table]
    assert losses == pytest.approx([math.log(2)] * 3, abs=0.02)
    assert len({*losses}) == 3
    assert (folder / "curves.png").is_file()
    written = json.loads((folder / "final" / "manifest.json").read_text())
    assert written["stage"] == "dpo"
    assert written["parents"] == {"sft": "../../sft/final"}
    assert written["config"]["dpo"]["definition"] == "mine/dpo.py:STAGE"

    shutil.rmtree(folder / "final")
    (folder / "checkpoints" / "000006.ckpt").unlink()
    assert "dpo.lr was 0.0002, is 0.5" in dpo(place, "resume=true", "dpo.lr=0.5").error
    out = dpo(place, "resume=true").succeeded.out
    assert "going on from outputs/default/mini/dpo/checkpoints/000005.ckpt" in out
    assert weights(folder) == unbroken
    assert rows(folder) == table

    out = place.call(*OWN, "recipe=mine/small").succeeded.out
    assert "dpo: done already" in out
    assert "what it promises" in out
    with pytest.raises(ConfigError, match=r"dpo.definition is 'mine/dpo.py:STAGE'.*--trust-remote"):
        settings_of(folder)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["dpo.definition=mine/dpo.py:RUN"], "has no stage 'RUN', it has ['STAGE']"),
        (["dpo.definition=mine/other.py:STAGE"], "there is no file"),
        (["dpo.beta=much"], "dpo.beta"),
        (["++dpo.betta=1"], "dpo.betta is not a known key; did you mean dpo.beta?"),
        (["dpo.lr=-1"], "dpo.lr is -1"),
        (["data.preferences.train=null"], "data.preferences.train is not set"),
        (["policy.checkpoint=nowhere/at/all"], "policy.checkpoint"),
        (["run=dpo"], "a name other than sft, rm, ppo, eval"),
    ],
)
def test_its_mistakes_are_told_as_those_of_the_other_stages(
    place: Workplace, overrides: list[str], told: str
) -> None:
    assert told in dpo(place, *overrides).error
    assert not place.stage("dpo").exists()


def test_a_stage_without_a_goal_hands_over_its_last_step(place: Workplace) -> None:
    file = place.folder / "mine" / "dpo.py"
    file.write_text(file.read_text().replace(', goal=(("eval/dpo_loss", "min"),)', ""))
    error = dpo(place, "final=best").error
    assert error == (
        "dpo.final is 'best', and stage=dpo names no metric of its evaluations (Stage.goal); "
        "allowed with a metric in dpo.best.metric"
    )
    assert "dpo.stop.patience is 2, and " in dpo(place, "dpo.stop.patience=2").error
    assert not place.stage("dpo").exists()
    dpo(place).succeeded  # noqa: B018
    folder = place.stage("dpo")
    ending = json.loads((folder / "ending.json").read_text())
    assert (ending["step"], ending["last_step"], ending["metrics"]) == (6, 6, {})
    assert not (folder / "checkpoints" / "best.ckpt").exists()


def test_a_stage_of_the_package_is_not_defined_anew(place: Workplace) -> None:
    error = place.mini("stage=sft", "++sft.definition=mine/dpo.py:STAGE").error
    assert error == (
        "sft.definition is 'mine/dpo.py:STAGE', but sft is a stage of the package; allowed: "
        "another name for a stage of your own"
    )


def test_a_stage_that_no_section_defines_is_refused(place: Workplace) -> None:
    assert "dpo" in place.mini("stage=dpo").error
