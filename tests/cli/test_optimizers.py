"""The section `optimizer`: the shipped ones and a class of the user's own, in runs that resume."""

from collections.abc import Callable

import pytest
import torch

from lightning_rlhf.callbacks.files import numbered

from .conftest import Workplace, weights


@pytest.mark.parametrize(("words", "state"), [
    (["optimizer=muon", "optimizer.momentum=0.9"], ["exp_avg", "exp_avg_sq", "momentum_buffer"]),
    *(pytest.param(*case, marks=pytest.mark.matrix) for case in (
        (["optimizer=adamw8bit"], ["__bnb_optimizer_quant_state__"]),
        (["optimizer._target_=torch.optim.Adagrad", "optimizer.lr_decay=0.1"], ["sum"]),
    )),
])  # fmt: skip
def test_a_run_resumes_bit_for_bit(
    workplace: Workplace, cut: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch,
    words: list[str], state: list[str],
) -> None:  # fmt: skip
    """Of all weights, with a warm-up and a decay of the matrices; adamw is in the other tests."""
    command = ["stage=sft", *words, "sft.weight_decay=0.1", "sft.warmup_fraction=0.5"]
    workplace.mini(*command, "run=whole").succeeded  # noqa: B018
    cut("step", 3)
    assert "PowerCut" in workplace.mini(*command).err
    monkeypatch.undo()
    assert "optimizer._target_ was" in workplace.mini("stage=sft", "resume=true").error
    workplace.mini(*command, "resume=true").succeeded  # noqa: B018
    assert weights(workplace.stage("sft")) == weights(workplace.stage("sft", "whole"))
    last = torch.load(numbered(workplace.stage("sft") / "checkpoints")[-1], weights_only=True)
    held = {name for one in last["optimizer_states"][0]["state"].values() for name in one}
    assert sorted(held - {"step"}) == state


@pytest.mark.parametrize(("words", "said"), [
    (["optimizer.momentum=0.5"], "optimizer: AdamW.__init__() got an unexpected keyword argument"),
    (["optimizer._target_=torch.nn.ParameterList"], "a class of kind torch.optim.Optimizer"),
    (["~optimizer._target_", "optimizer.amsgrad=true"], "optimizer._target_ is 'missing'; allowed"),
    (["optimizer.lr=1"], "optimizer.lr is 1, but it is not to be set: sft.lr is the learning rate"),
    (["optimizer.weight_decay=1"], "to be set: sft.weight_decay is that of all matrices"),
    (["optimizer.params=[]"], "to be set: sft.finetune and model.lora say what is trained"),
    (["optimizer._target_=torch.optim.Muon"], "optimizer: Muon only supports 2D parameters"),
])  # fmt: skip
def test_what_cannot_be_an_optimizer_is_one_message(
    workplace: Workplace, words: list[str], said: str
) -> None:
    assert said in workplace.mini("stage=sft", *words).error
    assert not workplace.stage("sft").exists()
