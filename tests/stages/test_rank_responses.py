"""Training data from scored responses."""

from dataclasses import replace
from typing import Any

from lightning_rlhf.core.config import RankConfig
from lightning_rlhf.evaluation.evaluate_policy import rank_samples

CONFIG = RankConfig(
    policy=None, samples_per_prompt=2, temperature=1.0, max_response_tokens=48, stop_strings=(),
    rollout="native", batch_size=8, prompts="train", max_prompts=None, pairs="best_worst",
    min_margin=0.0, accept_above=1.0,
)  # fmt: skip
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def sample(index: int, response: str, score: float, **values: Any) -> dict[str, Any]:
    turns = SYSTEM if index == 1 else [{"role": "user", "content": f"Question {index}"}]
    return {"index": index, "messages": turns, "response": response, "ended": True,
            "score": score} | values  # fmt: skip


SAMPLES = [
    sample(0, "good", 2.0), sample(0, "bad", -1.0), sample(0, "fair", 0.5),
    sample(0, "good", 2.0), sample(0, "endless", 9.0, ended=False),
    sample(1, "so", 0.25), sample(1, "because", 0.25), sample(1, " ", 3.0),
    sample(2, "cut", 1.0, ended=False),
]  # fmt: skip


def ranked(**changes: Any) -> tuple[Any, Any]:
    return rank_samples(SAMPLES, replace(CONFIG, **{"accept_above": None} | changes))


def test_best_and_worst() -> None:
    found, left_out = ranked(accept_above=0.5)
    assert found["preferences"] == [
        {"prompt": "Question 0", "chosen": "good", "rejected": "bad", "margin": 3.0}
    ]
    assert found["demonstrations"] == [
        {"prompt": "Question 0", "response": "good", "score": 2.0},
        {"prompt": SYSTEM, "response": "so", "score": 0.25},  # the first of equal scores
    ]
    assert [x["response"] for x in found["accepted"]] == ["good", "fair"]
    assert left_out == {
        "repeated response": 1, "cut at max_response_tokens": 2,
        "field 'response' is empty or blank": 1,
    }  # fmt: skip


def test_all_pairs_of_a_margin() -> None:
    two = [(x["chosen"], x["rejected"], x["margin"]) for x in ranked(pairs="all")[0]["preferences"]]
    assert two == [("good", "fair", 1.5), ("good", "bad", 3.0), ("fair", "bad", 1.5)]
    assert len(ranked(pairs="all", min_margin=1.5)[0]["preferences"]) == 3
    (only,) = ranked(pairs="all", min_margin=1.6)[0]["preferences"]
    assert (only["chosen"], only["rejected"]) == ("good", "bad")


def test_responses_that_differ_in_white_space_make_no_pair() -> None:
    found, left_out = rank_samples([sample(0, "yes", 1.0), sample(0, "yes ", 0.0)], CONFIG)
    assert found["preferences"] == []
    assert left_out == {"chosen and rejected are identical": 1}
