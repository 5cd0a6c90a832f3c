"""Write the course's pairs of dialogues beside this script: ``python data/dialogues.py``.

They are the quickstart's pairs in the form of Anthropic/hh-rlhf: two whole dialogues a row, which
differ in the last turn of the assistant.  Three in ten have two turns.  The dialogues depend only
on the seed: running the script again writes the same ones.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

if str(Path(__file__).resolve().parents[2] / "quickstart" / "data") not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "quickstart" / "data"))

import generate as quickstart
from demonstrators import demonstrate
from splits import split_prompts
from world import Prompt

FOLDER = Path(__file__).resolve().parent
SEED = 40
N_TRAIN, N_TEST = 12_000, 600
# Share of the dialogues in which another question was asked and answered before.
TWO_TURNS = 0.3


def generate() -> dict[str, list[dict[str, str]]]:
    """Return file name -> rows of all data files.

    The last question of a dialogue in test.jsonl.gz is in a wording that train.jsonl.gz lacks.
    """
    splits = split_prompts(random.Random(quickstart.SEED))
    train, unseen = splits.feedback, splits.held_out_wordings
    return {
        "train.jsonl.gz": _dialogues(train, train, N_TRAIN, SEED),
        "test.jsonl.gz": _dialogues(unseen, train, N_TEST, SEED + 1),
    }


def _dialogues(
    last: Sequence[Prompt], earlier: Sequence[Prompt], count: int, seed: int
) -> list[dict[str, str]]:
    """Return pairs of dialogues that end with a prompt of ``last``."""
    rng = random.Random(seed)
    rows = []
    for prompt in quickstart.take(last, count, rng):
        pair = quickstart.pair(prompt, rng)
        start = ""
        if rng.random() < TWO_TURNS:
            first = rng.choice([p for p in earlier if p.item != prompt.item])
            start = _turn(first.text, demonstrate(first, rng))
        sides = ("chosen", "rejected")
        rows.append({side: start + _turn(prompt.text, pair[side]) for side in sides})
    return rows


def _turn(question: str, response: str) -> str:
    return f"\n\nHuman: {question}\n\nAssistant: {response}"


if __name__ == "__main__":
    for file_name, rows in generate().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (FOLDER / file_name).write_bytes(gzip.compress(text.encode(), mtime=0))
