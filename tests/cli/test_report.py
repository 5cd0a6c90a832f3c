"""report.html after each stage, `lightning-rlhf report` and `lightning-rlhf compare`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.evaluation.compare import keep_recipe, runs_of, write_report
from lightning_rlhf.runs.folders import CONFIG
from lightning_rlhf.runs.measured import RunFiles, unequal
from lightning_rlhf.stages.supervised import sample_held_out

from ..report.pages import check
from .conftest import STAGES, Workplace, tree


def test_every_stage_leaves_a_page(pipeline: Workplace) -> None:
    for stage in STAGES:
        path = pipeline.stage(stage) / "report.html"
        page = check(path)
        for text in (f"default/mini/{stage}", "Configuration", "transformers"):
            assert text in page.text
        assert "has not finished" not in page.text
        assert path.stat().st_size < 1_500_000
    assert any("\nadvantage " in title and "\nKL, nats " in title for title in page.values("title"))
    for heading in ("Reward against KL", "Reward against compute", "Held-out prompts", "sampling"):
        assert heading in page.text


def test_five_responses_to_held_out_prompts_after_sft(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal and the page; the weights and torch's generator stay as they were."""

    def state(roles: Any) -> torch.Tensor:
        weights = [p.detach().flatten() for p in roles.parameters()]
        return torch.cat([torch.get_rng_state(), *weights])

    def sampling(run: Any, roles: Any, data: Any, role: str) -> None:
        before = state(roles)
        sample_held_out(run, roles, data, role)
        assert torch.equal(state(roles), before)

    monkeypatch.setattr("lightning_rlhf.stages.supervised.sample_held_out", sampling)
    words = ("stage=sft", "sft.epochs=0.125")
    quiet = workplace.mini(*words, "run=quiet", "samples=false").succeeded.out
    out = workplace.mini(*words, "data.max_val_rows=null").succeeded.out
    path = workplace.stage("sft") / "samples" / "held_out.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert 3 <= len({one["prompt"] for one in found}) == len(found) <= 5  # of four rows
    page = check(workplace.stage("sft") / "report.html")
    for one in found:
        start = one["prompt"][:20]
        assert start in out
        assert start not in quiet
        assert one["demonstration"] in page.text


def test_the_same_page_again_and_one_of_all_stages(finished: Workplace) -> None:
    page = finished.stage("ppo") / "report.html"
    before = page.read_text()
    page.unlink()
    finished.call("report", str(finished.stage("ppo"))).succeeded  # noqa: B018
    assert page.read_text() == before
    finished.call("report", str(finished.stage("ppo").parent)).succeeded  # noqa: B018
    whole = check(finished.stage("ppo").parent / "report.html")
    stages = [link for link in whole.values("href") if link.startswith("#stage-")]
    assert stages == ["#stage-1", "#stage-2", "#stage-3"]


@pytest.mark.parametrize("command", ["report", "compare", "export"])
def test_a_page_or_folder_replaces_nothing_foreign(finished: Workplace, command: str) -> None:
    run = finished.stage("sft")
    page = run / "report.html"
    page.unlink()
    if command == "report":
        page.mkdir()
        (page / "mine").write_text("mine")
        words = []
    elif command == "compare":
        page.write_text("mine")
        words = [str(finished.stage("ppo")), "--stage=sft", f"--out={page}"]
    else:
        page.symlink_to("nowhere")
        words = ["--step=6", f"--out={page}"]
    before = tree(finished.folder)
    assert "report.html" in finished.call(command, str(run), *words).error
    assert tree(finished.folder) == before
    assert os.path.lexists(page)


def test_a_run_that_was_cut_off_has_a_page(finished: Workplace) -> None:
    shutil.rmtree(finished.stage("ppo") / "final")
    (finished.stage("ppo") / "diagnosis.json").write_text(
        json.dumps([{"rule": "r", "iteration": 2, "symptom": "<b>", "cause": "c", "remedy": "m"}])
    )
    finished.call("report", str(finished.stage("ppo"))).succeeded  # noqa: B018
    page = check(finished.stage("ppo") / "report.html")
    assert "The run has not finished" in page.text
    assert "The diagnosis has 1 finding." in page.text
    assert "Likely cause: c" in page.text


def test_steps_of_a_recipe_come_first_in_its_page(tmp_path: Path) -> None:
    """With their jobs, and without a step that is not there."""
    runs = [tmp_path / "r/mini" / name for name in ("sft", "round1/dpo", "round2/dpo")]
    for path in runs:
        path.mkdir(parents=True)
        tree = {"stage": path.name, "run": "r", "model": {"name": "mini"}}
        (path / CONFIG).write_text(json.dumps(tree | {"job": path.parent.name}))
    folder = tmp_path / "r/mini"
    assert runs_of(folder) == runs[:1]
    keep_recipe(folder, [*reversed(runs), folder / "rm"], None)
    assert runs_of(folder) == runs[::-1]
    page = check(write_report(folder))
    assert page.values("href") == ["#stage-1", "#stage-2", "#stage-3"]
    assert "Direct preference optimization (round2)" in page.text
    (folder / "steps.json").write_text("3")
    with pytest.raises(CheckpointError, match=r"steps\.json is damaged"):
        runs_of(folder)


def test_runs_of_other_rewards_or_held_out_data_are_named(tmp_path: Path) -> None:
    tree = {"reward.weight": 1, "reward.checkpoint": "a", "data.prompts.val": "v"}
    kinds = {
        "reward.weight": "rewards",
        "data.prompts.val": "held-out data",
        "reward.checkpoint": "",
    }
    for key, expected in kinds.items():
        curves, trees = {"eval/reward_mean": ([1], [0.5])}, (tree, tree | {key: "b"})
        found = unequal([RunFiles(tmp_path, one, None, curves, None) for one in trees])
        assert "".join(found) == expected
