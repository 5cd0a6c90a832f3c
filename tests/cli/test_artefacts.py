"""What a user takes away: loaded by other programs, merged, moved and described."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.evaluation.build_rewards import text_scorer
from lightning_rlhf.models.build_roles import start_from
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.runs.console import HOME
from lightning_rlhf.runs.folders import trained_as
from lightning_rlhf.stages.final import license_of

from .conftest import Workplace


@pytest.fixture(scope="module")
def place(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """All stages, with ppo/final_merged, rm/final_merged and, in bfloat16, ppo/half."""
    found = pipeline.copied(tmp_path_factory.mktemp("artefacts") / "work")
    for stage in ("ppo", "rm"):
        found.call("export", f"outputs/default/mini/{stage}/final", "--merge").succeeded  # noqa: B018
    half = ["--merge", "--dtype", "bfloat16", "--out", "outputs/default/mini/ppo/half"]
    found.call("export", "outputs/default/mini/ppo/final", *half).succeeded  # noqa: B018
    return found


def with_name(code: str, name: str) -> str:
    return re.sub(r'^name = "[^"]*"', f'name = "{name}"', code, flags=re.MULTILINE)


def prompt(folder: Path) -> torch.Tensor:
    turns = [{"role": "user", "content": "What is the capital of Peru?"}]
    encoded = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


@torch.no_grad()
def test_merged_weights_are_the_policy(place: Workplace) -> None:
    """To fp32 rounding; in bfloat16 each weight keeps 8 bits, so that logits are near."""
    final = place.stage("ppo") / "final"
    tokens = prompt(final)
    expected = AutoModelForCausalLM.from_pretrained(final).eval()(tokens).logits
    sft = AutoModelForCausalLM.from_pretrained(place.stage("sft") / "final").eval()(tokens).logits
    assert (expected - sft).abs().max() > 1e-3  # the adapter has an effect to be found
    for name, tolerance in (("final_merged", 1e-5), ("half", 0.05)):
        folder = place.stage("ppo") / name
        assert sorted(f.name for f in folder.glob("*.safetensors")) == ["model.safetensors"]
        assert not (folder / "adapter_config.json").exists()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        torch.testing.assert_close(model(tokens).logits, expected, atol=tolerance, rtol=0)
    stored = load_file(place.stage("ppo") / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored  # tied to the embedding


def test_a_merged_policy_is_a_start_for_the_stages_here(place: Workplace) -> None:
    """Its fingerprint is that of the rounded weights."""
    final = find(str(place.stage("ppo") / "half"), "policy.checkpoint")
    config, _ = trained_as(final)
    start_from(config, final, trainable=False, seed=0)  # compares the fingerprint


@torch.no_grad()
def test_the_code_in_a_reward_models_card_gives_the_scores_that_ppo_pays(place: Workplace) -> None:
    """To 1e-5, of the adapter and merged, with padding on either side."""
    question = "What is the capital of Australia?"
    said = ["It is Canberra.", "Sydney", "I do not know, ask someone else."]
    turns = [{"role": "user", "content": question}]
    ours = text_scorer(str(place.stage("rm") / "final"), [])([turns] * 3, said, {})
    assert max(ours) - min(ours) > 1e-2
    for name in ("final", "final_merged"):
        code = snippet(place.stage("rm") / name, place.stage("rm") / name)
        names: dict[str, Any] = {}
        exec(code, names)
        assert names["rewards"].tolist() == pytest.approx(ours[:2], abs=1e-5)
        [(mean, std)] = re.findall(r"\(scores - (\S+)\) / (\S+)", code)
        rows = {"input_ids": [names["tokens"](question, text) for text in said]}
        for side in ("left", "right"):
            batch = names["tokenizer"].pad(rows, padding_side=side, return_tensors="pt")
            scores = names["model"](**batch).logits[:, 0]
            assert ((scores - float(mean)) / float(std)).tolist() == pytest.approx(ours, abs=1e-5)


def snippet(folder: Path, name: Path) -> str:
    """The Python code of a model card, for the folder `name`."""
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return with_name(code, str(name))


def test_the_code_in_a_policys_card_runs(place: Workplace, capsys: Any) -> None:
    exec(snippet(place.stage("ppo") / "final", place.stage("ppo") / "final"), {})
    assert capsys.readouterr().out.strip()


# Moved.


def test_a_run_goes_on_where_its_folder_was_moved(
    place: Workplace, tmp_path: Path, pipeline: Workplace
) -> None:
    """The old place is gone; nothing in the folder leads there, except a path that PEFT needs."""
    moved = pipeline.copied(tmp_path / "moved")
    for stage in ("rm", "ppo"):  # as if they had been written where nothing is now
        for file in (moved.stage(stage) / "final").rglob("adapter_config.json"):
            config = json.loads(file.read_text())
            config["base_model_name_or_path"] = "/gone/outputs/default/mini/sft/final"
            file.write_text(json.dumps(config))
        manifest = json.loads((moved.stage(stage) / "final" / "manifest.json").read_text())
        assert not [path for path in manifest["parents"].values() if Path(path).is_absolute()]
    moved.mini("stage=ppo", "job=again", "ppo.iterations=1").succeeded  # noqa: B018
    moved.call("export", "outputs/default/mini/ppo/final", "--merge").succeeded  # noqa: B018
    here, there = (
        load_file(w.stage("ppo") / "final_merged" / "model.safetensors") for w in (moved, place)
    )
    assert all(torch.equal(here[name], there[name]) for name in there)
    elsewhere = moved.folder / "elsewhere"
    shutil.copytree(moved.stage("ppo") / "final", elsewhere)  # without its run, and so its base
    error = moved.call("export", str(elsewhere), "--merge").error
    assert str(elsewhere) in error


def test_the_code_in_the_documentation(place: Workplace, capsys: Any) -> None:
    """The scores in docs/artefacts.md, standardised, are those that PPO maximises."""
    page = (HOME / "docs" / "artefacts.md").read_text()
    names: dict[str, Any] = {}
    for example, stage in (("policy", "ppo"), ("reward", "rm")):
        [code] = re.findall(rf"<!-- example: {example} -->\n```python\n(.*?)```", page, re.DOTALL)
        exec(with_name(code, str(place.stage(stage) / "final")), names)
    assert capsys.readouterr().out.strip()
    turns = [{"role": "user", "content": "What is the capital of Australia?"}]
    final = str(place.stage("rm") / "final")
    ours = text_scorer(final, [])([turns] * 2, ["It is Canberra.", "Sydney"], {})
    std = find(final, "x").reward_moments()[1]
    gap = float(names["scores"][0] - names["scores"][1]) / std  # the constant cancels
    assert gap == pytest.approx(ours[0] - ours[1], abs=1e-5)


# Described.


def test_every_final_has_a_model_card(place: Workplace) -> None:
    kinds = {"sft": ("transformers", "text-generation"), "rm": ("peft", "text-classification"),
             "ppo": ("peft", "text-generation")}  # fmt: skip
    for stage, kind in kinds.items():
        folder = place.stage(stage) / "final"
        card = ModelCard.load(folder / "README.md")
        assert (card.data.library_name, card.data.pipeline_tag) == kind
        assert {"lightning-rlhf", stage} <= set(card.data.tags)
        assert f'name = "outputs/default/mini/{stage}/final"' in card.text
        assert str(place.folder) not in card.text
    metrics = find(str(folder), "x").require_manifest("ppo").metrics
    [row] = re.findall(r"\| `eval/reward_mean` \| (\S+) \| (\S+) to (\S+) \| (\S+) \|", card.text)
    value, low, high, before = map(float, row)
    assert value == pytest.approx(metrics["eval/reward_mean"], rel=1e-3)
    assert before == pytest.approx(metrics["start/eval/reward_mean"], rel=1e-3)
    assert low <= value <= high


def test_the_license_is_that_of_the_first_folder_that_states_one(tmp_path: Path) -> None:
    card, config, broken = (tmp_path / name for name in ("card", "config", "broken"))
    for folder in (card, config, broken):
        folder.mkdir()
    (card / "README.md").write_text("---\nlicense: other\nlicense_name: llama3.2\n---\n# A\n")
    (config / "config.json").write_text('{"license": "apache-2.0"}')
    (broken / "README.md").write_text("---\nlicense: [\n---\n")
    named = {"license": "other", "license_name": "llama3.2"}
    assert license_of(broken, None, card, config) == named
    assert license_of(broken, config) == {"license": "apache-2.0"}
    assert license_of(tmp_path) == {}


def test_merges_that_are_refused(place: Workplace, tmp_path: Path) -> None:
    final = "outputs/default/mini/ppo/final"
    assert "final_merged'; allowed: a folder" in place.call("export", final, "--merge").error
    plain = tmp_path / "plain"
    shutil.copytree(place.stage("sft") / "final", plain)
    (plain / "manifest.json").unlink()
    assert "has no manifest.json" in place.call("export", str(plain), "--merge").error
    other = place.copied(tmp_path / "work")
    shutil.copy(
        other.stage("rm") / "final_merged" / "model.safetensors",
        other.stage("sft") / "final" / "model.safetensors",
    )
    error = other.call("export", final, "--merge", "--out", "again").error
    assert "gives other logits than it gave" in error
    assert not (other.folder / "again").exists()
