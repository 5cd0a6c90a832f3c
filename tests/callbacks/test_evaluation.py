"""Samples of training and evaluations: what is shown, kept and measured of them."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.callbacks.evaluation import Evaluation, Samples, load_judge
from lightning_rlhf.callbacks.loggers import MetricsFile
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.core.errors import RLHFError

from .conftest import FakePPO, Fit
from .test_metric_callbacks import column


@pytest.mark.parametrize(("characters", "shown"), [(8, ["train q…"] * 2), (None, [])])
def test_samples_are_printed_and_kept_every_few_iterations(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    characters: int | None, shown: list[str],
) -> None:  # fmt: skip
    samples = Samples(tmp_path, 2, 1, characters)
    fit(FakePPO(), [samples], [], batches=5)
    lines = (tmp_path / "samples" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [2, 4]
    # The first response of the batch answers prompt 1, scores 2 + 2 and has a KL of 0.6 nats.
    first = json.loads(lines[0])
    assert first.pop("kl") == pytest.approx(0.6)
    assert first == {
        "iteration": 2, "prompt": "train question 1 [b]?", "response": "t1 t2 t3", "score": 4.0,
        "ended": True,
        "per_token": {
            "text": ["t1", "t2", "t3"], "kl": [0.1, 0.2, 0.3], "advantage": [1.0, 0.0, -1.0],
        },
    }  # fmt: skip
    assert re.findall("train q.", capsys.readouterr().out) == shown


def test_a_resumed_run_deletes_later_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"iteration": k}) + "\n" for k in (1, 2, 3)) + '{"itera')
    samples = Samples(tmp_path, 1)
    trainer: Any = SimpleNamespace(is_global_zero=True)
    samples.on_train_start(trainer, SimpleNamespace(iteration=2))
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


def judge(row: Mapping[str, Any], response: str, ended: bool) -> dict[str, float | None]:
    return {"gold": float(len(response)), "correct": 1.0 if ended else None}


def test_every_sample_is_kept_and_the_means_are_over_them(fit: Fit, tmp_path: Path) -> None:
    # Two validation batches of the same two responses: "t1 t2 t3" (ended) and "t4".
    # KL: -1 + 1.5 = 0.5 and -2 + 1 = -1. Scores k + 1 and k in iteration k. Reference: -3.5 and -1
    # nats over 3 and 1 tokens. Of 8 words 4 differ, of 4 pairs 2. Every score is above that of
    # iteration 0.
    evaluation = Evaluation(judge, tmp_path)
    fit(
        FakePPO(), [evaluation], [MetricsFile(tmp_path)],
        batches=4, val_check_interval=2, num_sanity_val_steps=-1,
    )  # fmt: skip
    files = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert files == ["eval_000000.jsonl", "eval_000002.jsonl", "eval_000004.jsonl"]
    lines = (tmp_path / "samples" / "eval_000002.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[1]) == {
        "index": 1, "prompt": "val question 1 [b]?", "response": "t4", "ended": False,
        "tokens": 1, "score": 2.0, "parts": {"head": 1.0}, "kl": -1.0, "ref_logprob": -1.0,
        "judge": {"gold": 2.0, "correct": None},
    }  # fmt: skip
    expected = {
        "eval/reward_mean": 4.5, "eval/kl": -0.25, "eval/response_tokens": 2.0, "eval/ended": 0.5,
        "eval/judge/correct": 1.0, "eval/judge/gold": 5.0,
        "eval/response_perplexity": pytest.approx(math.exp(4.5 / 4)), "eval/distinct_1": 0.5,
        "eval/distinct_2": 0.5, "eval/win_rate": 1.0,
    }  # fmt: skip
    assert evaluation.last == expected
    assert evaluation.first == {**expected, "eval/reward_mean": 0.5, "eval/win_rate": 0.5}


def test_what_a_reward_says_is_in_the_samples_and_its_cost_in_the_metrics(
    fit: Fit, tmp_path: Path
) -> None:
    module = FakePPO(("short", "taste"))
    judge = SimpleNamespace(
        explain=lambda decoded: ["rude", None],  # of both batches of two responses
        function=SimpleNamespace(spent=lambda: {"judge_tokens": 7}),
    )
    module.collector.reward = replace(module.collector.reward, sources=(abs, judge))
    callbacks = [Samples(tmp_path, 1, 2), Evaluation(None, tmp_path), PPOMetrics()]
    fit(module, callbacks, [MetricsFile(tmp_path)], batches=2)
    for name in ("train", "eval_000002"):
        lines = (tmp_path / "samples" / f"{name}.jsonl").read_text().splitlines()
        found = [json.loads(line).get("verdicts") for line in lines]
        assert found == [{"taste": "rude"}, None] * 2
    assert column(tmp_path, "compute/judge_tokens") == {1: 7.0, 2: 14.0}


def test_a_resumed_run_compares_with_the_sft_samples_in_their_file(
    fit: Fit, tmp_path: Path
) -> None:
    """Scores of iteration 0 raised in the file: the first of two responses no longer wins."""
    first = Evaluation(None, tmp_path)
    fit(FakePPO(), [first], [], batches=1, num_sanity_val_steps=-1)
    file = tmp_path / "samples" / "eval_000000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[::2]:
        line["score"] += 9
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed, module = Evaluation(None, tmp_path), FakePPO()
    module.iteration = 1
    resumed.load_state_dict(first.state_dict())
    fit(module, [resumed], [], batches=1)
    assert resumed.last is not None
    assert resumed.last["eval/win_rate"] == 0.5
    assert resumed.first == first.first


@pytest.mark.parametrize("body", ["import sys; sys.exit(0)", "return {'gold': '1'}"])
def test_a_judge_that_fails_on_a_response_is_named(fit: Fit, tmp_path: Path, body: str) -> None:
    """Its author is to look into it, and not into the program."""
    file = tmp_path / "rules.py"
    file.write_text(f"def gold(row, response, ended):\n    {body}\n")
    with pytest.raises(RLHFError, match=str(file)):
        fit(FakePPO(), [Evaluation(load_judge(f"{file}:gold"), tmp_path)], [], batches=1)
