"""Train the quickstart's tokenizer on its training data: ``python tokenizer/train.py``.

It is a byte-level BPE, which can encode any text, saved in the Hugging Face format in the folder of
this script; the handwritten ``chat_template.jinja`` in that folder is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent
DATA = FOLDER.parent / "data"
TRAINING_FILES = ("sft_train.jsonl", "preferences_train.jsonl")
# Training stops below this number when every word of the data is one token.
MAX_TOKENS = 2_000
# Responses have at most 48 tokens and prompts at most 30; the rest is reserve.
MAX_LENGTH = 256
END, PAD = "<|end|>", "<|pad|>"
ROLE_MARKERS = ["<|system|>", "<|user|>", "<|assistant|>"]


def training_texts(data: Path) -> Iterator[str]:
    """Yield every prompt and reply of the training files, in order."""
    for name in TRAINING_FILES:
        for line in (data / name).read_text(encoding="utf-8").splitlines():
            yield from json.loads(line).values()


def train_tokenizer(data: Path) -> Tokenizer:
    """Return a byte-level BPE of at most ``MAX_TOKENS`` tokens, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TOKENS,
        special_tokens=[PAD, END, *ROLE_MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(data), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, chat_template: str) -> None:
    """Write the files that ``AutoTokenizer.from_pretrained(folder)`` reads."""
    tokens = {"eos_token": END, "pad_token": PAD, "additional_special_tokens": ROLE_MARKERS}
    options = {"clean_up_tokenization_spaces": False, "model_max_length": MAX_LENGTH}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, **tokens, **options
    ).save_pretrained(folder)


if __name__ == "__main__":
    template = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    save_tokenizer(train_tokenizer(DATA), FOLDER, template)
