"""record=true, lightning-rlhf replay, and the batch of a run that ends as not finite."""

import itertools
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_rlhf.core import losses
from lightning_rlhf.core.records import Demonstrations, Experience, PPOTerms
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.data.rollouts import (
    LAST_BATCH,
    PER_TOKEN,
    file_of,
    read_recorded,
    recorded_iterations,
)
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import SFTModule
from lightning_rlhf.runs.console import HOME

from .conftest import Workplace, given, rows, tree, weights

RECORDING = ("stage=ppo", "run=recorded", "record=true", "ppo.checkpoint_every=2")


@pytest.fixture(scope="module")
def experiences() -> list[Experience]:
    """Experience of each iteration of the recorded run, filled by `place`."""
    return []


@pytest.fixture(scope="module")
def place(pipeline: Workplace, experiences: list[Experience]) -> Workplace:
    """The pipeline's workplace with run=recorded, of three iterations."""
    training_step = PPOModule.training_step

    def noted(self: PPOModule, *arguments: Any) -> Any:
        found = training_step(self, *arguments)
        experiences.append(found[RESULT].experience)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PPOModule, "training_step", noted)
        pipeline.mini(*RECORDING, *given(pipeline)).succeeded  # noqa: B018
    return pipeline


@pytest.fixture
def run(tmp_path: Path, place: Workplace) -> Path:
    """A copy of the recorded run."""
    folder = tmp_path / "outputs" / "recorded" / "mini" / "ppo"
    shutil.copytree(place.stage("ppo", "recorded"), folder, symlinks=True)
    return folder


# Recorded.


def test_the_columns_are_the_experience_bit_for_bit(
    place: Workplace, experiences: list[Experience]
) -> None:
    folder = place.stage("ppo", "recorded")
    assert recorded_iterations(folder) == [1, 2, 3]
    for iteration, experience in enumerate(experiences, start=1):
        path = file_of(folder, iteration)
        table, found = pandas.read_parquet(path), read_recorded(path)
        width = experience.mask.shape[1] - experience.response_mask.shape[1]
        assert len(found) == len(table) == len(experience.score) == 8
        for i, (row, real) in enumerate(zip(found, experience.response_mask, strict=True)):
            for column, field in PER_TOKEN.items():
                expected = getattr(experience, field)[i][real]
                assert row[column] == expected.tolist() == table[column][i].tolist()
            prompt = experience.tokens[i, :width][experience.mask[i, :width]]
            assert row["prompt_tokens"] == prompt.tolist()
            assert row["response_tokens"] == experience.responses[i][real].tolist()
            assert row["response"] in "".join(row["token_texts"])
            assert row["index"] == experience.index[i]
            assert row["ended"] == experience.ended[i]
            assert row["score"] == experience.score[i]
            assert row["parts"] == {"head": experience.component_scores[i, 0]}
        samples = pandas.read_json(folder / "samples" / "train.jsonl", lines=True)
        samples = samples[samples["iteration"] == iteration]
        for name in ("prompt", "response"):
            assert list(table[name][:4]) == list(samples[name])


def test_a_recorded_run_is_the_same_run(place: Workplace) -> None:
    plain, recorded = place.stage("ppo"), place.stage("ppo", "recorded")
    assert weights(recorded) == weights(plain)
    assert rows(recorded) == rows(plain)
    assert not (plain / "rollouts").exists()


def test_the_example_in_the_docs_reads_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code = re.search(r"```python\n(.*?)```", (HOME / "docs" / "replay.md").read_text(), re.DOTALL)
    assert code is not None
    monkeypatch.chdir(run.parents[3])
    path = "outputs/default/tiny/ppo/rollouts/000040.parquet"
    assert path in code[1]
    names: dict[str, Any] = {}
    exec(code[1].replace(path, "outputs/recorded/mini/ppo/rollouts/000002.parquet"), names)
    tokens = sum(len(row["response_tokens"]) for row in read_recorded(file_of(run, 2)))
    assert len(names["tokens"]) == tokens
    assert len(capsys.readouterr().out.splitlines()) > 8


def test_a_resumed_run_deletes_the_files_after_its_checkpoint(place: Workplace, run: Path) -> None:
    """Iteration 3, which is behind the checkpoint, and 9, which the run never had."""
    before = tree(run / "rollouts")
    shutil.copy(file_of(run, 3), file_of(run, 9))
    shutil.rmtree(run / "final")
    file_of(run, 3).write_bytes(b"")
    again = [*RECORDING, f"outputs={run.parents[2]}", "resume=2"]
    place.mini(*again, *given(place)).succeeded  # noqa: B018
    assert tree(run / "rollouts") == before


# Shown.


def test_the_newest_iteration_is_shown_without_torch(place: Workplace, run: Path) -> None:
    """In the order of the sums of |advantage|; the page loads nothing and runs nothing."""
    shown = (
        "import sys\nfrom lightning_rlhf.cli.replay import replay\n"
        f"replay([{str(run)!r}, '--responses', '8'])\nassert 'torch' not in sys.modules\n"
    )
    out = place.process([sys.executable, "-c", shown])
    found = read_recorded(file_of(run, 3))
    order = sorted(range(8), key=lambda i: -sum(map(abs, found[i]["advantages"])))
    page = (run / "replay_3.html").read_text()
    for text in (out.succeeded.out, page):
        assert [int(n) for n in re.findall(r"response (\d+): score", text)] == order
    assert f"page: {run / 'replay_3.html'}" in out.out.replace("\n", "")
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    assert "default-src 'none'" in page
    assert page.count("--advantage: rgb") == sum(len(row["token_texts"]) for row in found)
    first = found[order[0]]
    for name in ("advantages", "kl", "rewards", "returns", "values"):
        assert f"<td>{first[name][0]:+z.3f}</td>" in page
        assert f"{first[name][0]:+z.3f}" in out.out


def test_faults_are_reported_and_a_number_that_is_none_comes_first(
    place: Workplace, run: Path
) -> None:
    assert "one of 1, 2, 3" in place.call("replay", str(run), "--iteration", "4").error
    table = pq.read_table(file_of(run, 2))
    found = table.to_pylist()
    found[5]["prompt"] = "<script>alert(1)</script>\u202e\x1b[31m"
    found[5]["kl"][0] = math.nan
    pq.write_table(pa.Table.from_pylist(found, schema=table.schema), file_of(run, 2))
    outcome = place.call("replay", str(run), "--iteration", "2", "--responses", "1").succeeded
    page = (run / "replay_2.html").read_text()
    assert "<script" not in page
    for text in (outcome.out, page):
        assert re.findall(r"response (\d+): score", text) == ["5"]
        assert not {"\u202e", "\x1b"} & {*text}
    pq.write_table(table.drop(["kl"]), file_of(run, 3))
    before = tree(run)
    assert place.call("replay", str(run)).error.startswith(f"{file_of(run, 3)} cannot be read")
    assert tree(run) == before


# Not finite.

LINE = 9
"""Line of the training data of which no update can be made."""
LONG = 40
"""Tokens that no other response of the demonstrations has."""


def numbers_named(message: str) -> list[int]:
    """The rows of the data that a message names."""
    [named] = re.findall(r"(?:not finite|its rows): line ([\d, ]+) of data/", message)
    return [int(number) for number in named.split(", ")]


def test_the_batch_is_kept_and_the_error_names_file_step_and_line(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a response whose log-probabilities are spoiled. A resumed run deletes the batch."""
    file = finished.folder / "data" / "sft_train.jsonl"
    lines = file.read_text().splitlines()
    lines[LINE - 1] = json.dumps({**json.loads(lines[LINE - 1]), "response": " no" * (LONG + 5)})
    file.write_text("\n".join(lines) + "\n")
    scores = SFTModule.scores

    def spoiled(self: SFTModule, batch: Demonstrations, *known: Any) -> Any:
        is_spoiled = (batch.target_mask.sum(dim=1) > LONG).any()
        return torch.where(is_spoiled, torch.nan, 1.0) * scores(self, batch, *known)

    monkeypatch.setattr(SFTModule, "scores", spoiled)
    folder = finished.outputs / "default" / "mini" / "bad" / "sft"
    words = ["stage=sft", "job=bad", "data.long_responses=cut"]
    words += ["sft.checkpoint_every=10", "sft.val_every=6", "sft.max_nonfinite=1"]
    error = finished.mini(*words).error
    path = folder / LAST_BATCH
    assert str(path.relative_to(finished.folder)) in error
    assert numbers_named(error) == [LINE]
    [checkpoint] = (folder / "checkpoints").iterdir()
    assert f"step {int(checkpoint.stem) + 1} " in error
    table = pandas.read_parquet(path)
    assert list(table["number"][~table["loss"].map(math.isfinite)]) == [LINE]
    for _, row in table.iterrows():
        source = json.loads(lines[row["number"] - 1])
        for text in ("prompt", "response"):
            assert source[text].strip()[:100] in row[text]
            assert len(row[f"{text}_tokens"]) > 0
    monkeypatch.undo()
    finished.mini(*words, "resume=true").succeeded  # noqa: B018
    assert not path.exists()


BREAKING = (
    "stage=ppo", "run=next", "ppo.max_nonfinite=2", "ppo.checkpoint_every=10",
    "ppo.microbatch_size=4",  # a minibatch: one loss is one update
)  # fmt: skip


def test_the_iteration_that_ends_ppo_is_kept_and_shown(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that records nothing, from the second of the four updates of iteration 2."""
    calls, whole = itertools.count(1), losses.ppo_terms

    def spoiled(*arguments: Any, **keys: Any) -> PPOTerms:
        terms = whole(*arguments, **keys)
        return replace(terms, loss=terms.loss * (torch.nan if next(calls) > 5 else 1.0))

    monkeypatch.setattr(losses, "ppo_terms", spoiled)
    folder, command = finished.stage("ppo", "next"), [*BREAKING, *given(finished)]
    error = finished.mini(*command).error
    assert "2 updates in a row (ppo.max_nonfinite)" in error
    assert str(file_of(folder, 2).relative_to(finished.folder)) in error
    assert recorded_iterations(folder) == [2]
    found = read_recorded(file_of(folder, 2))
    assert numbers_named(error) == sorted({row["index"] + 1 for row in found})
    shown = re.search(r"`lightning-rlhf (replay [^`]+)`", error)
    assert shown is not None
    assert "response" in finished.call(*shown[1].split()).succeeded.out
    monkeypatch.undo()
    finished.mini(*command, "resume=auto").succeeded  # noqa: B018
    assert recorded_iterations(folder) == []
