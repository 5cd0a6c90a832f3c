"""stage=dpo: what it leaves, cut off and resumed, where its policy is taken, what is refused."""

import json
import math
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM

from lightning_rlhf.cli.chat import load_chat_model
from lightning_rlhf.models.build_roles import start_from
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.runs.folders import trained_as

from .conftest import Workplace, rows, weights

STAGE = "stage=dpo"


@pytest.fixture(scope="module")
def trained(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A copy of the workplace of all stages, with run=default of stage=dpo."""
    place = pipeline.copied(tmp_path_factory.mktemp("dpo") / "work")
    place.mini(STAGE, "preflight=strict").succeeded  # noqa: B018
    return place


def test_what_it_leaves(trained: Workplace) -> None:
    folder = trained.stage("dpo")
    written = json.loads((folder / "final" / "manifest.json").read_text())
    assert written["stage"] == "dpo"
    assert written["parents"] == {"sft": "../../sft/final"}
    assert {"eval/dpo_loss", "eval/accuracy", "eval/sft_loss"} <= written["metrics"].keys()
    for name in ("curves.png", "report.html", "checkpoints/best.ckpt", "checkpoints/000006.ckpt"):
        assert (folder / name).stat().st_size > 0, name
    table = rows(folder)
    first = {name: float(cell) for name, cell in table[0].items()}
    assert first["eval/dpo_loss"] == pytest.approx(math.log(2), abs=1e-6)
    margin = first["eval/reward_chosen"] - first["eval/reward_rejected"]
    assert first["eval/reward_margin"] == pytest.approx(margin, abs=1e-6)
    assert first["eval/logps_chosen"] < 0
    policy = AutoPeftModelForCausalLM.from_pretrained(folder / "final")
    assert policy.active_adapters == ["default"]


def test_resumed_it_ends_with_the_same_bits(trained: Workplace) -> None:
    folder = trained.stage("dpo")
    before = weights(folder), rows(folder)
    shutil.rmtree(folder / "final")
    out = trained.mini(STAGE, "resume=5").succeeded.out
    assert "going on from outputs/default/mini/dpo/checkpoints/000005.ckpt" in out
    assert (weights(folder), rows(folder)) == before


@torch.no_grad()
def test_an_adapter_trained_on_an_adapter_names_the_base_of_both(trained: Workplace) -> None:
    """Its logits are those of its training: in PEFT, as a start, in a chat and merged."""
    first, sft = (trained.stage(stage) / "final" for stage in ("dpo", "sft"))
    trained.mini(STAGE, "job=second", f"policy.checkpoint={first}", "dpo.epochs=0.25").succeeded  # noqa: B018
    final = find(str(trained.outputs / "default" / "mini" / "second" / "dpo" / "final"), "x")
    assert final.base_folder == str(sft.resolve())
    config, _ = trained_as(final)
    start_from(config, final, trainable=False, seed=0)  # compares both fingerprints
    loaded = load_chat_model("second", final, torch.device("cpu"))
    assert (loaded.role, loaded.roles.adapters("reference")) == ("policy", ("sft",))
    policy = AutoPeftModelForCausalLM.from_pretrained(final.path).eval()
    tokens = torch.arange(16)[None]
    with loaded.roles.use_role("policy"):
        ours = loaded.roles.causal_lm(tokens).logits
    torch.testing.assert_close(policy(tokens).logits, ours, atol=1e-5, rtol=0)
    trained.call("export", str(final.path), "--merge").succeeded  # noqa: B018


def test_kto_learns_from_labels_of_single_responses(trained: Workplace) -> None:
    """Of each pair one side alone, good and bad in turn."""
    lines = (trained.folder / "data" / "preferences_train.jsonl").read_text().splitlines()
    pairs, file = map(json.loads, lines), trained.folder / "labels.jsonl"
    labels = [
        {"prompt": pair["prompt"], "response": pair["rejected" if i % 2 else "chosen"]}
        | {"label": i % 2 == 0}
        for i, pair in enumerate(pairs)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in labels))
    words = ("dpo.loss_type=kto", f"data.preferences.train={file}", "dpo.epochs=3", "dpo.lr=1e-2")
    out = trained.mini(STAGE, "job=kto", *words).succeeded.out
    assert f"{len(lines)} labelled responses" in out
    table = rows(trained.outputs / "default" / "mini" / "kto" / "dpo")
    *_, last = (row for row in table if "update/dpo_loss" in row)
    assert float(last["update/dpo_loss"]) < 0.45  # 1/2 at the start
    assert float(last["update/accuracy"]) > 0.9
    names = ("chosen", "rejected", "margin", "reference")
    chosen, rejected, margin, reference = (float(last[f"update/reward_{x}"]) for x in names)
    assert margin == pytest.approx(chosen - rejected)
    assert chosen > reference > 0 > rejected
    assert margin > 0.5
