"""Reward models that are refused, in words that say why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlhf.core.config import PAIR
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RewardError

from .classifiers import DECODER, SHAPE, load, row, save_classifier, save_tokenizer


def test_a_language_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**SHAPE, **DECODER)).save_pretrained(folder)
    save_tokenizer(folder)
    with pytest.raises(CheckpointError) as error:
        load(str(folder))
    assert str(error.value) == (
        f"{folder} is a LlamaForCausalLM, which has no reward head; allowed: a model for "
        "sequence classification, or the final/ folder of a stage=rm run"
    )


def test_an_output_has_a_number_and_a_name(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", num_labels=3)
    assert [load(folder, label=label).label for label in (0, "LABEL_2")] == [0, 2]


@torch.no_grad()
def test_positions_of_roberta_are_counted_from_behind_its_padding(tmp_path: Path) -> None:
    """Of 48, with the pad token 0, the first is that of padding: 47 tokens can be read."""
    folder = save_classifier(tmp_path / "model", "roberta")
    with pytest.raises(
        ConfigError, match=r"reward\.max_tokens is 48; allowed: null, or at most 47, "
    ):
        load(folder)
    model = load(folder, max_tokens=47)
    # <s> user : p </s> assistant : r </s> are seven tokens besides the words.
    fits = model.encode(row("w1"), " ".join(["w2"] * 39))
    assert len(fits["input_ids"]) == 47
    assert model.read([fits]).isfinite().all()
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model.read([model.encode(row("w1"), " ".join(["w2"] * 40))])


def test_no_chat_template(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    save_tokenizer(tmp_path / "plain", None)
    with pytest.raises(ConfigError) as error:
        load(folder, tokenizer=str(tmp_path / "plain"))
    assert str(error.value).startswith(
        f"reward.chat_template is null, but the tokenizer of {tmp_path / 'plain'} has none; "
        "allowed: a Jinja file"
    )
    assert load(folder, tokenizer=str(tmp_path / "plain"), chat_template=PAIR).pair


def test_a_dialogue_that_the_template_refuses(tmp_path: Path) -> None:
    """Templates of some models know no system turn; PPO may meet one late."""
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('no system turns') if messages[0].role == 'system' }}x")
    classifier = load(save_classifier(tmp_path / "model"), chat_template=str(template))
    system = {"prompt": "", "messages": [{"role": "system", "content": "w1"}]}
    with pytest.raises(
        RewardError, match="refuses a dialogue with the turns system, assistant: no"
    ):
        classifier.encode(system, "w2")
