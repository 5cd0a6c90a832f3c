"""Reward models that are refused, in words that say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

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


def test_a_head_without_weights(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    model = LlamaForSequenceClassification.from_pretrained(folder)
    state = {k: v for k, v in model.state_dict().items() if k != "score.weight"}
    model.save_pretrained(folder, state_dict=state)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == f"{folder} lacks weights: score.weight; they would be random"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "reward.label is None; allowed: {}"),
        (3, "reward.label is 3; allowed: {}"),
        ("GOOD", "reward.label is 'GOOD'; allowed: {}"),
    ],
)
def test_an_output_that_is_not_there(tmp_path: Path, label: Any, message: str) -> None:
    folder = save_classifier(tmp_path / "model", num_labels=3)
    with pytest.raises(ConfigError) as error:
        load(folder, label=label)
    allowed = f"0 to 2 or LABEL_0, LABEL_1, LABEL_2, the outputs of {folder}"
    assert str(error.value) == message.format(allowed)


def test_an_output_has_a_number_and_a_name(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", num_labels=3)
    assert [load(folder, label=label).label for label in (0, "LABEL_2")] == [0, 2]


def test_more_tokens_than_positions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(save_classifier(tmp_path / "model"), max_tokens=49)
    assert str(error.value) == (
        "reward.max_tokens is 49; allowed: null, or at most 48, the model's max_position_embeddings"
    )


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


def test_a_template_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(save_classifier(tmp_path / "model"), chat_template="nowhere.jinja")
    assert str(error.value) == (
        "reward.chat_template is 'nowhere.jinja', and there is no such file; allowed: a Jinja "
        "file, pair, null for the tokenizer's own"
    )


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
