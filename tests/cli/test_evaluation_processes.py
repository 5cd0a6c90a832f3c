"""The stages that do not train, in several processes: the files, scores and metrics of one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ..matrix import matrix
from .conftest import Outcome, Workplace, given, tree
from .test_processes import in_processes

ROUNDING = 1e-5
"""Difference that the order of sums makes in a score or a metric, relative to it or to 1."""
ASKED = """
import os

def note(name, lines):
    with open(os.environ["ASKED"] + name, "a") as file:
        file.writelines(line.replace("\\n", " ") + "\\n" for line in lines)

def score(prompts, responses):
    note("reward", [f"{p}|{r}" for p, r in zip(prompts, responses)])
    return [float(len(r)) for r in responses]

def judge(row, response, ended):
    note("judge", [f"{row['prompt']}|{response}"])
    return {"gold": float(len(response))}
"""
RANK = (
    "stage=rank", "rank.samples_per_prompt=4", "rank.batch_size=8", "rank.max_prompts=7",
    "rank.stop_strings=[e,a,o]", "rank.accept_above=10",
)  # fmt: skip
POLICY = (
    "stage=eval_policy", "eval_policy.samples_per_prompt=2", "eval_policy.batch_size=3",
    "eval_policy.best_of=3", "data.demonstrations.val=data/sft_val.jsonl",
)  # fmt: skip
REWARD = ("stage=eval_reward", "eval_reward.samples=20", "eval_reward.batch_size=8")
OWN = ("reward=function", "reward.path=data/asked.py:score")
JUDGED = ("data.judge=data/asked.py:judge",)
CASES = [
    ("rank", (*RANK, *OWN, *JUDGED, "rank.policy={policy}"), 2),
    ("eval_policy", (*POLICY, *OWN, *JUDGED, "eval_policy.policies=[{policy}]"), 3),
    ("eval_reward", (*REWARD, *OWN), 3),
]


@pytest.fixture(scope="module")
def place(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = pipeline.copied(tmp_path_factory.mktemp("evaluation") / "work")
    (place.folder / "data" / "asked.py").write_text(ASKED)
    return place


def run(place: Workplace, name: str, size: int, words: Sequence[str], folder: Path) -> Outcome:
    """`python train.py words run=name` in so many processes."""
    words = (*words, f"run={name}{size}", given(place)[0])
    if size == 1:
        return place.mini(*words).succeeded
    return in_processes(place, size, *words, folder=folder).succeeded


def assert_close(found: Any, expected: Any, where: str) -> None:
    """Equal JSON, but for rounding, the name of the run and its settings."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            if key not in ("title", "config", "versions"):
                assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_close(found[number], value, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING), where
    else:
        assert found == expected, where


def assert_same_files(found: Path, expected: Path) -> None:
    """The same files; those in JSON with the same content, but for rounding."""
    assert tree(found).keys() == tree(expected).keys()
    for file in expected.glob("final/*.json*"):
        texts = ((folder / "final" / file.name).read_text() for folder in (found, expected))
        split = str.splitlines if file.suffix == ".jsonl" else lambda text: [text]
        assert_close(*([json.loads(x) for x in split(text)] for text in texts), file.name)


@pytest.mark.parametrize(("stage", "words", "size"), matrix(CASES, *CASES[:2]))
def test_processes_leave_the_files_of_one_and_ask_once(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str,
    words: Sequence[str], size: int,
) -> None:  # fmt: skip
    """Reward and judge are asked once a response; the first process alone prints and writes."""
    words = [word.replace("{policy}", str(place.stage("ppo") / "final")) for word in words]
    asked, printed = {}, {}
    for count in (1, size):
        monkeypatch.setenv("ASKED", f"{tmp_path}/{count}_")
        printed[count] = run(place, stage, count, words, tmp_path).out
        asked[count] = {
            file.name.split("_")[1]: sorted(file.read_text().splitlines())
            for file in tmp_path.glob(f"{count}_*")
            if file.suffix != ".pt"
        }
    assert asked[size] == asked[1]
    assert f"in {size} processes" in printed[size]
    assert_same_files(place.stage(stage, f"{stage}{size}"), place.stage(stage, f"{stage}1"))


def test_fewer_prompts_than_processes(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASKED", f"{tmp_path}/")
    run(place, "few", 3, (*RANK, *OWN, "rank.max_prompts=1", "rank.policy=null"), tmp_path)
    asked = (tmp_path / "reward").read_text().splitlines()
    assert 1 <= len(asked) <= 4
    assert len({line.split("|")[0] for line in asked}) == 1
