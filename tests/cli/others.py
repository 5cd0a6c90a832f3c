"""Reward models that are no kin of model=mini: another vocabulary, another way to write dialogues.

What they say is computed here from their files by transformers and peft, one text at a time.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lightning_rlhf.core.errors import RLHFError

from .conftest import SHIPPED, Workplace

TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}"
    "{{ '[end]' if turn.role == 'assistant' else '\\n' }}{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)
TEXT = "[start][user]{prompt}\n[assistant]{response}[end]"
"""What TEMPLATE makes of a prompt and its response."""
OTHER = ("model.name=other", "run=other")


def until_called(
    place: Workplace, *words: str, name: str = "lightning_rlhf.stages.preflight.preflight"
) -> str:
    """What a command says before this is called: preflight, before it trains, or another."""

    def enough(*_: object, **__: object) -> None:
        raise RLHFError("enough")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(name, enough)
        outcome = place.mini(*words)
    assert outcome.err.splitlines()[-1] == "error: enough", outcome.err
    return outcome.out


def save_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Pieces of words of its own, learned from the demonstrations."""
    rows = [json.loads(line) for line in (SHIPPED / "sft_val.jsonl").open(encoding="utf-8")]
    special = ["[pad]", "[start]", "[end]", "[user]", "[assistant]", "[system]"]
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    pieces.train_from_iterator((row["prompt"] for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[pad]", bos_token="[start]", eos_token="[end]"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def train(place: Workplace) -> Path:
    """The `final/` of a reward model of another vocabulary, on an SFT model of its own."""
    save_tokenizer(place.folder / "other")
    same = [*OTHER, "model.tokenizer=other", "data.max_prompt_tokens=200"]
    same += ["data.max_response_tokens=200"]
    place.mini("stage=sft", *same, "sft.epochs=0.125").succeeded  # noqa: B018
    place.mini("stage=rm", *same).succeeded  # noqa: B018
    return place.outputs / "other" / "other" / "rm" / "final"


def save_classifier(folder: Path) -> Path:
    """As a sequence classifier comes from the hub."""
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.2, num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def samples(place: Workplace, run: str) -> list[dict[str, Any]]:
    """The responses to held-out prompts before training, with their scores."""
    with (place.stage("ppo", run) / "samples" / "eval_000000.jsonl").open() as file:
        return [json.loads(line) for line in file]


def tokens(folder: Path, sample: dict[str, Any]) -> torch.Tensor:
    text = TEXT.format(prompt=sample["prompt"], response=sample["response"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])


@torch.no_grad()
def own_scores(final: Path, said: Sequence[dict[str, Any]]) -> list[float]:
    """Of a `final/` of `train`: adapter, head, and the scale in its manifest."""
    manifest = json.loads((final / "manifest.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(final / manifest["parents"]["sft"])
    model = PeftModel.from_pretrained(model, final / "roles").eval()
    head = load_file(final / "roles/reward_head.safetensors")
    found = []
    for sample in said:
        ids = tokens(final, sample)
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        raw = float(hidden @ head["linear.weight"][0] + head["linear.bias"][0])
        found.append((raw - manifest["reward_mean"]) / manifest["reward_std"])
    return found


@torch.no_grad()
def classifier_scores(folder: Path, said: Sequence[dict[str, Any]]) -> list[float]:
    """Of a folder of `save_classifier`."""
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    return [float(model(tokens(folder, sample)).logits[0, 0]) for sample in said]
