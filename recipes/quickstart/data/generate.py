"""Write the quickstart's data files beside this script: ``python data/generate.py``.

The files depend only on the seed: running the script again writes identical files.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demonstrators import confuse, demonstrate, reply, sample_style
from judge import judge
from splits import split_prompts
from world import Prompt

FOLDER = Path(__file__).resolve().parent
SEED = 20
N_SFT_TRAIN, N_SFT_VAL = 14_000, 400
N_PREFERENCES_TRAIN, N_PREFERENCES_VAL = 12_000, 600
# A reply that is better by d is preferred with probability 1 / (1 + exp(-BETA d)).
BETA = 2.0
# Source of a pair -> its share: replies of two people; a right and a wrong reply of one style; a
# reply of a person and a confused one.
PAIR_SHARES = {"people": 0.40, "right_wrong": 0.35, "confused": 0.25}


def generate() -> dict[str, bytes]:
    """Return file name -> content of all data files."""
    splits = split_prompts(random.Random(SEED))
    feedback, unseen = splits.feedback, splits.held_out_wordings
    rows = {
        "sft_train.jsonl": _demonstrations(splits.demonstrations, N_SFT_TRAIN, SEED + 1),
        "sft_val.jsonl": _demonstrations(unseen, N_SFT_VAL, SEED + 2),
        "preferences_train.jsonl": _preferences(feedback, N_PREFERENCES_TRAIN, SEED + 3),
        "preferences_val.jsonl": _preferences(unseen, N_PREFERENCES_VAL, SEED + 4),
        "prompts_train.jsonl": [{"prompt": p.text} for p in feedback],
        "prompts_val.jsonl": [{"prompt": p.text} for p in unseen],
        "prompts_val_fact.jsonl": [{"prompt": p.text} for p in splits.held_out_facts],
    }
    return {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in file_rows).encode()
        for name, file_rows in rows.items()
    }


def take(prompts: Sequence[Prompt], count: int, rng: random.Random) -> list[Prompt]:
    """Return ``count`` prompts in random order, with frequencies that differ by at most one."""
    taken: list[Prompt] = []
    while len(taken) < count:
        taken += rng.sample(prompts, len(prompts))
    return taken[:count]


def _demonstrations(prompts: Sequence[Prompt], count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [
        {"prompt": prompt.text, "response": demonstrate(prompt, rng)}
        for prompt in take(prompts, count, rng)
    ]


def _preferences(prompts: Sequence[Prompt], count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [pair(prompt, rng) for prompt in take(prompts, count, rng)]


def pair(prompt: Prompt, rng: random.Random) -> dict[str, str]:
    """Return one labelled pair; pairs of replies with equal scores are redrawn."""
    source = rng.choices(list(PAIR_SHARES), weights=list(PAIR_SHARES.values()))[0]
    while True:
        first, second = _replies(prompt, source, rng)
        row = {"prompt": prompt.text}
        gold = [judge(row, text, True)["gold"] for text in (first, second)]
        if abs(margin := gold[0] - gold[1]) > 1e-9:
            break
    if rng.random() >= 1 / (1 + math.exp(-BETA * margin)):
        first, second = second, first
    return {"prompt": prompt.text, "chosen": first, "rejected": second}


def _replies(prompt: Prompt, source: str, rng: random.Random) -> tuple[str, str]:
    if source == "people":
        return demonstrate(prompt, rng), demonstrate(prompt, rng)
    if source == "confused":
        return demonstrate(prompt, rng), confuse(prompt, rng)
    style, frame_seed = sample_style(rng), rng.getrandbits(32)
    right = reply(prompt.item, style, "right", random.Random(frame_seed))
    return right, reply(prompt.item, style, "wrong", random.Random(frame_seed))


if __name__ == "__main__":
    for file_name, content in generate().items():
        (FOLDER / file_name).write_bytes(content)
