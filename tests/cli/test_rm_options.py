"""stage=rm with margins, with an ensemble of heads, and with data that have problems."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_rlhf.core.validation import build
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message
from lightning_rlhf.models.build_roles import load_reward
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.models.loading import load_tokenizer

from .conftest import Workplace
from .others import until_called


def pairs(place: Workplace, split: str = "train") -> Path:
    return place.folder / "data" / f"preferences_{split}.jsonl"


def rewrite(file: Path, change: Any) -> None:
    """Every row as `change(its number, row)` makes it."""
    read = [json.loads(line) for line in file.read_text().splitlines()]
    changed = [json.dumps(change(i, row)) + "\n" for i, row in enumerate(read)]
    file.write_text("".join(changed))


# Data with problems.


def test_problems_of_the_data_are_reported_before_training(finished: Workplace) -> None:
    """The first three pairs again at the end, the next two swapped, each chosen made longer."""
    file = pairs(finished)
    rewrite(file, lambda i, row: row | {"chosen": f"{row['chosen']}{' Yes, yes, yes.' * 2}"})
    lines = file.read_text().splitlines(keepends=True)
    swapped = [json.loads(line) for line in lines[3:5]]
    swapped = [r | {"chosen": r["rejected"], "rejected": r["chosen"]} for r in swapped]
    file.write_text("".join(lines + lines[:3]) + "".join(json.dumps(r) + "\n" for r in swapped))
    out = until_called(finished, "stage=rm", "job=bad", "data.on_bad_row=skip")
    (said,) = [line for line in out.splitlines() if line.startswith("preference pairs to look at")]
    assert "duplicates of an earlier pair: 3 of" in said
    assert "contradictions of an earlier pair: 2 of" in said
    assert "taking the longer response is right in " in said
    assert out.index(said) < out.index("preference pairs to validate on")


# An ensemble.


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace) -> Workplace:
    """In which job=three has a reward model of three heads, and job=penalised a PPO run on it with
    a penalty for uncertainty."""
    place = pipeline.copied(tmp_path_factory.mktemp("ensemble") / "work")
    place.mini("stage=rm", "job=three", "rm.heads=3").succeeded  # noqa: B018
    final = place.outputs / "default" / "mini" / "three" / "rm" / "final"
    reward = (f"reward.checkpoint={final}", "reward.uncertainty_coef=2")
    place.mini("stage=ppo", "job=penalised", *reward, "ppo.iterations=1").succeeded  # noqa: B018
    return place


def before_training(place: Workplace, job: str) -> list[dict[str, Any]]:
    folder = place.outputs / "default" / "mini" / job / "ppo" / "samples"
    return [json.loads(line) for line in (folder / "eval_000000.jsonl").open()]


def test_an_ensemble_hands_over_all_its_heads(ensemble: Workplace) -> None:
    final = ensemble.outputs / "default" / "mini" / "three" / "rm" / "final"
    head = load_file(final / "roles/reward_head.safetensors")
    (weight,) = [tensor for tensor in head.values() if tensor.dim() == 2]
    assert weight.shape == (3, 32)
    assert len({tuple(row) for row in weight.tolist()}) == 3


def heads_of(final: Path, sample: dict[str, Any], *, ended: bool) -> tuple[list[float], int]:
    """Raw rewards of the three heads for a sample, and the number of its tokens."""
    written = find(str(final), "").require_manifest("rm")
    model = build(ModelConfig, written.config["model"], "model")
    chat = ChatFormat(load_tokenizer(model, final), {})
    response = chat.response_tokens(sample["response"])[: None if ended else -1]
    row = torch.tensor([[*chat.prompt_tokens((Message("user", sample["prompt"]),)), *response]])
    with torch.no_grad():
        roles = load_reward(find(str(final), ""), model)
        (heads,) = roles.rewards(row, torch.ones_like(row, dtype=torch.bool)).tolist()
    assert len(heads) == 3
    return heads, len(response)


def test_uncertainty_is_penalised_by_the_spread_of_the_heads(ensemble: Workplace) -> None:
    """score = (mean of the heads - mean - coef * their population deviation) / std."""
    samples = before_training(ensemble, "penalised")
    final = ensemble.outputs / "default" / "mini" / "three" / "rm" / "final"
    written = find(str(final), "").require_manifest("rm")
    # A response that was cut has no end token; one that reads back as it was written will do.
    found = [(*heads_of(final, sample, ended=False), sample) for sample in samples]
    heads, sample = next((h, s) for h, length, s in found if length == s["tokens"])
    assert not sample["ended"]
    scaled = (statistics.fmean(heads) - written.reward_mean) / written.reward_std
    spread = statistics.pstdev(heads) / written.reward_std
    assert spread > 0.01
    assert sample["score"] == pytest.approx(scaled - 2 * spread, abs=1e-4)


def test_uncertainty_is_penalised_for_a_model_that_reads_text_too(ensemble: Workplace) -> None:
    """The format check holds what was written down, the mean of the heads, against itself."""
    final = ensemble.outputs / "default" / "mini" / "three" / "rm" / "final"
    text = ("reward=model", f"reward.name_or_path={final}", "reward.normalization=stored")
    command = ("stage=ppo", "job=text", *text, "reward.uncertainty_coef=2", "ppo.iterations=1")
    outcome = ensemble.mini(*command, "debug=true").succeeded
    assert "differ by 0.000 of their standard deviation" in outcome.out
    written = find(str(final), "").require_manifest("rm")
    for sample in before_training(ensemble, "text"):
        heads, _ = heads_of(final, sample, ended=True)
        raw = statistics.fmean(heads) - written.reward_mean - 2 * statistics.pstdev(heads)
        assert sample["score"] == pytest.approx(raw / written.reward_std, abs=1e-4)
