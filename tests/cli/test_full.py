"""finetune=full of PPO and DPO: a run leaves a model of its own, which every stage takes."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rlhf.cli.chat import load_chat_model
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.models.roles import probe_tokens

from ..matrix import matrix
from .conftest import Workplace, given, rows, tree, weights

FULL = ("stage=ppo", "run=full", "ppo.finetune=full", "ppo.critic=adapter", "record=true")
VOWELS = """def share(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in responses]"""


@pytest.fixture(scope="module")
def place(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A copy of the pipeline's workplace in which run=full trained all weights from `sft/`."""
    place = pipeline.copied(tmp_path_factory.mktemp("full") / "work")
    place.mini(*FULL, *given(place), "preflight=strict").succeeded  # noqa: B018
    return place


def fingerprint(final: Path) -> dict[str, Tensor]:
    return load_file(final / "roles" / "fingerprint.safetensors")


same = partial(torch.allclose, atol=1e-5, rtol=0)


@torch.no_grad()
def test_final_is_a_whole_model(place: Workplace) -> None:
    """To transformers, to a chat and to stage=eval_policy, where it is its last checkpoint."""
    folder = place.stage("ppo", "full")
    own, before = fingerprint(folder / "final"), fingerprint(place.stage("sft") / "final")["self"]
    assert same(own["below"], before)
    assert (own["self"] - before).abs().max() > 1e-3
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert same(model(probe_tokens(model)).logits[0, -1], own["self"])
    loaded = load_chat_model("full", find(str(folder / "final"), "x"), torch.device("cpu"))
    assert same(loaded.roles.probe(loaded.role), own["self"])
    policies = f"eval_policy.policies=[{folder}/final,{folder}/checkpoints/000003.ckpt]"
    place.mini("stage=eval_policy", "run=full", policies, *given(place)).succeeded  # noqa: B018
    samples = (place.stage("eval_policy", "full") / "final" / "samples.jsonl").read_text()
    for _, final, kept in (json.loads(x)["responses"].values() for x in samples.splitlines()):
        assert final == kept


def test_it_is_resumed_exported_and_replayed_bit_for_bit(place: Workplace) -> None:
    folder = place.stage("ppo", "full")
    final, recorded, table = weights(folder), tree(folder / "rollouts"), rows(folder)
    shutil.rmtree(folder / "final")
    place.mini(*FULL, *given(place), "resume=2").succeeded  # noqa: B018
    assert (weights(folder), tree(folder / "rollouts"), rows(folder)) == (final, recorded, table)
    place.call("replay", str(folder)).succeeded  # noqa: B018
    out = place.folder / "out" / "final"
    place.call("export", str(folder), "--step", "3", "--out", str(out)).succeeded  # noqa: B018
    assert weights(out.parent) == final


def test_it_learns_what_is_rewarded(place: Workplace) -> None:
    """At a temperature that makes some tokens of a model that knows little likelier than others."""
    (place.folder / "vowels.py").write_text(VOWELS)
    words = ["ppo.iterations=8", "ppo.rollout_batch_size=64", "ppo.minibatch_size=32", "run=learns"]
    words += ["ppo.microbatch_size=32", "ppo.checkpoint_every=8", "ppo.temperature=0.1"]
    words += ["reward=function", "reward.path=vowels.py:share", "ppo.missing_eos=none"]
    words += ["ppo.kl_coef=0", "ppo.lr_schedule=constant", "ppo.finetune=full", given(place)[0]]
    place.mini("stage=ppo", *words).succeeded  # noqa: B018
    found = [float(row["reward_mean"]) for row in rows(place.stage("ppo", "learns"))[1:]]
    assert found[-1] > found[0] + 0.15


@pytest.mark.parametrize("stage", matrix(["ppo", "dpo"], "ppo"))
def test_it_starts_from_an_adapter_that_is_merged(place: Workplace, stage: str) -> None:
    """A step of no length: the model is still the SFT model, which has an adapter."""
    run, sft = f"run=from_{stage}", place.stage("sft", f"from_{stage}") / "final"
    place.mini("stage=sft", run, "sft.finetune=lora", "sft.epochs=0.125").succeeded  # noqa: B018
    steps = "dpo.epochs=0.125" if stage == "dpo" else "ppo.iterations=1"
    words = [f"{stage}.finetune=full", f"{stage}.lr=1e-30", steps, "reward=random"]
    place.mini(f"stage={stage}", run, *words, "preflight=strict").succeeded  # noqa: B018
    own, before = map(fingerprint, (place.stage(stage, f"from_{stage}") / "final", sft))
    assert same(own["self"], before["self"])
    assert same(own["below"], before["self"])
    assert (before["self"] - before["below"]).abs().max() > 1e-3  # the adapter does something
