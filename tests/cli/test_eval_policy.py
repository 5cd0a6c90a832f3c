"""stage=eval_policy: policies against each other and against the SFT model."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.report import estimates
from lightning_rlhf.runs.measured import with_intervals

from ..report.pages import check
from .conftest import Workplace, given, rows, tree

JUDGE = """
def halves(row, response, ended):
    return {"even": float(len(response) % 2 == 0), "gold": float(len(response))}
"""


class Evaluated:
    """What one run of the stage left."""

    def __init__(self, place: Workplace, out: str) -> None:
        self.place, self.out = place, out
        self.folder = place.stage("eval_policy", "evaluated")
        final = self.folder / "final"
        self.page = (final / "evaluation.md").read_text()
        self.numbers: dict[str, Any] = json.loads((final / "evaluation.json").read_text())
        self.samples = [json.loads(x) for x in (final / "samples.jsonl").read_text().splitlines()]

    def of(self, policy: str, decoding: str) -> list[dict[str, Any]]:
        return [x["responses"][policy] for x in self.samples if x["decoding"] == decoding]

    def compared(self, policy: str, other: str, number: str, decoding: str) -> dict[str, Any]:
        wanted = {"policy": policy, "other": other, "number": number, "decoding": decoding}
        (found,) = (c for c in self.numbers["comparisons"] if c.items() >= wanted.items())
        return found


FINAL, LAST, EARLIER, SAME = "ppo", "ppo step 3", "ppo step 2", "mini/sft"


@pytest.fixture(scope="module")
def evaluated(pipeline: Workplace) -> Evaluated:
    """The policy of PPO as `final/` and as two of its checkpoints, and the SFT model once more."""
    (pipeline.folder / "data" / "judge.py").write_text(JUDGE)
    ppo = pipeline.stage("ppo")
    before = tree(ppo)
    policies = [f"{ppo}/{name}" for name in ("final", "checkpoints/000003.ckpt",
                                             "checkpoints/000002.ckpt")]  # fmt: skip
    policies.append(f"{pipeline.stage('sft')}/final")
    outcome = pipeline.mini(
        "stage=eval_policy", "run=evaluated", f"eval_policy.policies=[{','.join(policies)}]",
        "eval_policy.samples_per_prompt=2", "eval_policy.batch_size=3", *given(pipeline),
        "data.judge=data/judge.py:halves", "eval_policy.best_of=3",
    )  # fmt: skip
    assert tree(ppo) == before
    return Evaluated(pipeline, outcome.succeeded.out)


def test_every_policy_is_shown_by_the_shortest_name_that_is_its_own(evaluated: Evaluated) -> None:
    policies = ["sft", FINAL, LAST, EARLIER, SAME, "best of 3"]
    assert list(evaluated.numbers["policies"]) == policies
    assert evaluated.numbers["sources"][SAME].endswith("mini/sft/final")
    assert all(f" {policy} " in evaluated.out.replace("\n", " ") for policy in policies)
    assert not any(text in evaluated.out for text in ("was trained with", "next:"))
    lines = (evaluated.place.folder / "data" / "prompts_val.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    found = Counter((x["prompt"], x["decoding"]) for x in evaluated.samples)
    assert found == {(p, d): n for p in prompts for d, n in (("sampled", 2), ("greedy", 1))}
    page = check(evaluated.folder / "report.html")
    assert f"{EARLIER} - {FINAL}" in page.text


def test_a_checkpoint_is_the_policy_of_its_step(evaluated: Evaluated) -> None:
    """The last one is final/, up to the rounding of merged SFT weights."""
    for decoding in ("sampled", "greedy"):
        final, last, earlier = (evaluated.of(p, decoding) for p in (FINAL, LAST, EARLIER))
        assert [x["response"] for x in final] == [x["response"] for x in last]
        assert [x["kl"] for x in final] == pytest.approx([x["kl"] for x in last], abs=1e-4)
        assert [x["kl"] for x in earlier] != pytest.approx([x["kl"] for x in last], abs=1e-4)


def test_the_sft_model_differs_in_nothing_from_itself(evaluated: Evaluated) -> None:
    """The same random numbers for every policy: not even the samples differ."""
    assert evaluated.of(SAME, "sampled") == evaluated.of("sft", "sampled")
    assert all(abs(sample["kl"]) < 1e-4 for sample in evaluated.of(SAME, "sampled"))
    found = evaluated.compared(SAME, "sft", "reward", "sampled")
    assert (found["difference"], found["interval"]) == (0, [0, 0])
    assert (found["win_rate"], found["ties"], found["prompts"]) == (0.5, 1, 4)


def test_numbers_are_those_of_the_samples(evaluated: Evaluated) -> None:
    for policy, decoding in ((FINAL, "sampled"), ("sft", "greedy")):
        samples, found = evaluated.of(policy, decoding), evaluated.numbers["policies"][policy]
        found = found[decoding]
        assert found["eval/reward_mean"] == pytest.approx(fmean(x["score"] for x in samples))
        assert found["eval/ended"] == fmean(x["ended"] for x in samples)
        tokens = sum(x["tokens"] for x in samples)
        nats = -sum(x["ref_logprob"] for x in samples) / tokens
        assert found["eval/response_perplexity"] == pytest.approx(math.exp(nats))
        words = [word for x in samples for word in x["response"].split()]
        assert found["eval/distinct_1"] == len(set(words)) / len(words)
        assert found["eval/judge/gold"] == fmean(len(x["response"]) for x in samples)
    assert "eval/kl" not in evaluated.numbers["policies"][FINAL]["greedy"]


def test_differences_and_wins_are_of_the_same_prompt(evaluated: Evaluated) -> None:
    numbers = {"reward": lambda x: x["score"], "judge/gold": lambda x: x["judge"]["gold"]}
    for number, read in numbers.items():
        a, b = ([read(x) for x in evaluated.of(p, "sampled")] for p in (EARLIER, FINAL))
        found = evaluated.compared(EARLIER, FINAL, number, "sampled")
        assert found["difference"] == pytest.approx(fmean(a) - fmean(b), abs=1e-12)
        wins = [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in zip(a, b, strict=True)]
        assert found["win_rate"] == fmean(wins)
        low, high = found["interval"]
        assert low <= found["difference"] <= high


def test_pass_at_k_is_of_scores_of_0_and_1_alone(evaluated: Evaluated) -> None:
    found = evaluated.numbers["policies"][FINAL]["sampled"]
    assert sorted(n for n in found if "pass@" in n) == [
        "eval/pass@1/judge/even",
        "eval/pass@2/judge/even",
    ]
    even = [x["judge"]["even"] for x in evaluated.of(FINAL, "sampled")]
    assert found["eval/pass@1/judge/even"] == fmean(even)
    pairs = zip(even[::2], even[1::2], strict=True)
    passed_twice = [float(any(pair)) for pair in pairs]
    assert found["eval/pass@2/judge/even"] == fmean(passed_twice)
    interval = estimates.single(estimates.rate_interval(np.array(passed_twice), seed=0))
    found = evaluated.numbers["pass_intervals"][FINAL]
    assert found["eval/pass@2/judge/even"] == pytest.approx(interval)
    # In a table of its own on the page, and not on the console, for a part that is not gold.
    before, passed = evaluated.page.split("\n## pass@k\n")
    assert "pass@" not in before
    [row] = [line for line in passed.splitlines() if line.startswith("| pass@2/judge/even | ")]
    assert estimates.interval_text(interval) in row.replace("\\", "")
    # And where a recipe looks for the interval of what it promises: of the first policy.
    first, metric = [*evaluated.numbers["policies"]][1], "eval/pass@2/judge/even"
    known = with_intervals(evaluated.numbers["metrics"], evaluated.folder)[metric].interval
    assert [*(known or ())] == evaluated.numbers["pass_intervals"][first][metric]
    assert "pass@" not in evaluated.out


def test_metrics_are_those_of_the_first_policy_against_sft(evaluated: Evaluated) -> None:
    metrics, found = evaluated.numbers["metrics"], evaluated.numbers["policies"][FINAL]["sampled"]
    assert metrics.items() >= found.items()
    gain = evaluated.compared(FINAL, "sft", "reward", "sampled")
    assert metrics["eval/reward_gain"] == gain["difference"]
    assert [metrics["eval/win_rate_low"], metrics["eval/win_rate_high"]] == gain["win_interval"]
    (row,) = rows(evaluated.folder)
    assert float(row["eval/win_rate"]) == pytest.approx(metrics["eval/win_rate"])


def test_perplexity_is_that_of_transformers(evaluated: Evaluated) -> None:
    """exp of the mean of AutoModelForCausalLM's own loss, with labels for the response."""
    folder = evaluated.place.stage("ppo") / "final"
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    nats = tokens = 0
    for line in (evaluated.place.folder / "data" / "sft_val.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False
        )
        prompt, response = (
            tokenizer(text, add_special_tokens=False).input_ids
            for text in (prompt, row["response"] + "<|end|>")
        )
        labels = torch.tensor([[-100] * len(prompt) + response])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([prompt + response]), labels=labels).loss
        nats, tokens = nats + float(loss) * len(response), tokens + len(response)
    found = evaluated.numbers["policies"][FINAL]["sampled"]["eval/perplexity"]
    assert found == pytest.approx(math.exp(nats / tokens), rel=1e-5)


def test_the_best_of_responses_of_the_sft_model(evaluated: Evaluated) -> None:
    """Its KL is measured from scores, which cannot be above the bound."""
    best, sft = (evaluated.numbers["policies"][p]["sampled"] for p in ("best of 3", "sft"))
    assert len(evaluated.of("best of 3", "sampled")) == 2 * 4
    assert best["eval/reward_mean"] > sft["eval/reward_mean"]
    assert best["eval/best_of_kl_bound"] == pytest.approx(math.log(3) - 2 / 3)
    assert 0 < best["eval/kl"] <= best["eval/best_of_kl_bound"]
    assert "eval/best_of_kl_bound" not in sft
    assert evaluated.of("best of 3", "greedy") == evaluated.of("sft", "greedy")


def edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ppo/final", "base model is 'from_config, seed 7', here it is 'from_config, seed 0'"),
        (
            "ppo/checkpoints/000003.ckpt",
            r"000003.ckpt.*its SFT model \(policy.checkpoint\) is '0123456789abcdef', here",
        ),
        ("rm/final", "rm/final is a reward model or another"),
        ("sft/checkpoints/000006.ckpt", "this is one of stage=sft"),
    ],
)
def test_what_is_no_policy_is_named_before_a_model_loads(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch, policy: str, message: str
) -> None:
    ppo = finished.stage("ppo")
    edited(ppo / "final" / "manifest.json", base_seed=7)
    edited(ppo / "parents.json", sft="0123456789abcdef")
    monkeypatch.setattr("lightning_rlhf.models.loading.load_causal_lm", pytest.fail)
    word = f"eval_policy.policies=[{ppo.parent / policy}]"
    error = finished.mini("stage=eval_policy", word).error
    assert re.search(message, error), error
    assert not finished.stage("eval_policy").exists()
