"""Sequence classifiers of random weights, whose tokenizer has one token a word."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lightning_rlhf.core.config import ClassifierConfig
from lightning_rlhf.models.classifier import Classifier, load_classifier

WORDS = [f"w{i}" for i in range(50)]
IDS = {
    word: i
    for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", *WORDS])
}
TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %} {{ turn.role }} : {{ turn.content }} "
    "{{ eos_token }}{% endfor %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 48, "initializer_range": 0.1,
    "pad_token_id": 0, "num_labels": 1,
}  # fmt: skip
DECODER = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": lambda **k: LlamaForSequenceClassification(LlamaConfig(**(SHAPE | DECODER | k))),
    "roberta": lambda **k: RobertaForSequenceClassification(RobertaConfig(**(SHAPE | k))),
    "bert": lambda **k: BertForSequenceClassification(BertConfig(**(SHAPE | k))),
}


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """One token a word; called on text, it puts <s> before it by itself."""
    words = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", IDS["<s>"]), ("</s>", IDS["</s>"])],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<pad>", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save_classifier(folder: Path, family: str = "llama", **changes: Any) -> str:
    """Its folder."""
    torch.manual_seed(1)
    FAMILIES[family](**changes).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def load(folder: str, **changes: Any) -> Classifier:
    options: dict[str, Any] = {
        "name_or_path": folder, "revision": None, "tokenizer": None, "chat_template": None,
        "label": None, "dtype": "float32", "quantization": "none", "attn_implementation": None,
        "trust_remote_code": False, "max_tokens": 48,
    }  # fmt: skip
    config = ClassifierConfig(**(options | changes))
    return load_classifier(config, "reward", torch.device("cpu"))


def row(prompt: str) -> Mapping[str, Any]:
    return {"prompt": prompt, "messages": [{"role": "user", "content": prompt}]}
