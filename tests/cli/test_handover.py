"""What one stage leaves for the next, and for everybody else: it fits, or it is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel

from lightning_rlhf.runs.console import RECIPES

from .conftest import Workplace, tree

TOKENIZER = RECIPES / "quickstart" / "tokenizer"


def final(place: Workplace, stage: str, run: str = "default") -> Path:
    return place.stage(stage, run) / "final"


# Refused.


def test_a_reward_model_of_another_chat_template(finished: Workplace) -> None:
    """The same vocabulary and the same weights, but a policy with another chat template."""
    policy, reward = finished.folder / "copy", final(finished, "rm")
    shutil.copytree(final(finished, "sft"), policy)
    template = policy / "chat_template.jinja"
    template.write_text(template.read_text().replace("'<|assistant|>'", "' <|assistant|>'"))
    before, parents = tree(finished.outputs), [f"policy.checkpoint={policy}"]
    parents.append(f"reward.checkpoint={reward}")
    error = finished.mini("run=next", "stage=ppo", *parents).error
    assert "another chat template than the policy's" in error
    assert str(reward) in error
    assert tree(finished.outputs) == before


def test_a_reward_that_is_measured_to_be_flat(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of zeros gives every sample its bias: a standard deviation of exactly 0."""

    def train(self: Any, run: Any, module: Any, metrics: Any) -> dict[str, float]:
        torch.nn.init.constant_(module.roles.heads["reward"].linear.weight, 0.0)
        return {}

    monkeypatch.setattr("lightning_rlhf.stages.supervised.RM.summarise", train)
    sft = final(finished, "sft")
    command = ("run=next", "stage=rm", f"policy.checkpoint={sft}", "rm.epochs=0.125")
    error = finished.mini(*command).error
    assert not (finished.stage("rm", "next") / "final").exists()
    assert "standard deviation 0.0" in error
    assert "rm.lr" in error


# Taken over.


def test_training_goes_on_from_what_ppo_left(finished: Workplace) -> None:
    """A policy is one of the two things that may be given as policy.checkpoint, and is not deleted
    by the run that starts from it."""
    ppo = ["stage=ppo", "reward=random", "ppo.iterations=1"]
    finished.mini("stage=sft", "run=first", "sft.finetune=lora", "sft.epochs=0.125").succeeded  # noqa: B018
    assert "means nothing" in finished.mini(*ppo, "run=first").succeeded.out
    policy = final(finished, "ppo", "first")
    start = f"policy.checkpoint={policy}"
    finished.mini(*ppo, "run=next", start, "ppo.lr=1e-30").succeeded  # noqa: B018
    before, after = (
        load_file(folder / "roles/fingerprint.safetensors")
        for folder in (policy, final(finished, "ppo", "next"))
    )
    torch.testing.assert_close(after["self"], before["self"], atol=1e-5, rtol=0)
    assert (before["self"] - before["below"]).abs().max() > 1e-3  # there was something to lose

    error = finished.mini(*ppo, "run=first", "overwrite=true", start).error
    assert str(policy) in error
    assert "job=NAME to keep both" in error
    assert policy.is_dir()


def test_resume_notices_that_a_foreign_parent_changed(finished: Workplace) -> None:
    """One without a manifest, which is known by its files alone."""
    foreign = finished.folder / "foreign"
    shutil.copytree(final(finished, "sft"), foreign)
    (foreign / "manifest.json").unlink()
    command = ["stage=rm", "run=next", f"policy.checkpoint={foreign}", "rm.epochs=0.125"]
    finished.mini(*command).succeeded  # noqa: B018
    shutil.rmtree(final(finished, "rm", "next"))
    finished.mini(*command, "resume=true").succeeded  # noqa: B018
    shutil.rmtree(final(finished, "rm", "next"))
    save_file({}, foreign / "model.safetensors")
    assert "are others now" in finished.mini(*command, "resume=true").error


# Loaded by other programs.


class ForcedTokens(LogitsProcessor):
    """Makes `tokens` the only probable ones, one for each row."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -1e9)
        for row, token in enumerate(self.tokens):
            forced[row, token] = 0.0
        return forced


def decoded(model: PreTrainedModel, *tokens: int, **options: Any) -> list[list[int]]:
    """Four tokens of generate() with nothing but its folder."""
    prompts = torch.tensor([[5, 6, 7]] * len(tokens))
    generated = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False,
        logits_processor=[ForcedTokens(*tokens)], **options,
    )  # fmt: skip
    assert torch.equal(generated[:, :3], prompts)
    return generated[:, 3:].tolist()


def test_generate_stops_where_responses_were_taught_to_stop(finished: Workplace) -> None:
    """At the template's end of turn, and at an eos token that is another one, with no argument.

    Rows that ended are filled up with the pad token while the last row goes on.
    """
    shutil.copytree(TOKENIZER, finished.folder / "tokenizer")
    file = finished.folder / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|system|>"}))
    command = ("stage=sft", "run=next", "model.tokenizer=tokenizer", "sft.epochs=0.125")
    finished.mini(*command).succeeded  # noqa: B018
    folder = final(finished, "sft", "next")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, eos, pad, other = tokenizer.convert_tokens_to_ids(
        ["<|end|>", "<|system|>", "<|pad|>", "<|user|>"]
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert decoded(model, end, eos, other) == [
        [end, pad, pad, pad], [eos, pad, pad, pad], [other] * 4,
    ]  # fmt: skip
    assert decoded(model, end, eos) == [[end], [eos]]
    # What the folder says it is that ends them.
    assert decoded(model, end, eos, eos_token_id=None) == [[end] * 4, [eos] * 4]


def test_the_policys_adapter_generates_on_top_of_its_sft_model(pipeline: Workplace) -> None:
    model = AutoModelForCausalLM.from_pretrained(final(pipeline, "ppo"))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    end, pad = tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>"])
    assert decoded(model, end, 5) == [[end, pad, pad, pad], [5] * 4]
