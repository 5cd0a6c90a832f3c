"""Write the recipe's sums beside this script: ``python data/sums.py``.

A sum has two numbers of three digits from 0 to 4, so that no column has a carry; its answer works
it out column by column.  The sums depend only on the seed: running the script again writes
identical files.
"""

from __future__ import annotations

import json
import random
from itertools import combinations_with_replacement, product
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SEED = 20
DIGITS = "01234"
COUNTS = {"worked_train": 26, "worked_val": 200, "prompts_train": 4_000, "prompts_val": 400}
"""File -> number of its sums; a pair of numbers stands in one file alone, in either order."""


def generate() -> dict[str, bytes]:
    """Return file name -> content of all data files."""
    rng = random.Random(SEED)
    numbers = ["".join(digits) for digits in product(DIGITS, repeat=3)]
    pairs = list(combinations_with_replacement(numbers, 2))
    rng.shuffle(pairs)
    files = {}
    for name, count in COUNTS.items():
        taken, pairs = pairs[:count], pairs[count:]
        rows = [row(*rng.sample(pair, 2), worked=name.startswith("worked")) for pair in taken]
        files[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return files


def row(first: str, second: str, *, worked: bool) -> dict[str, str]:
    """Return a sum with its answer, as a demonstration where it is worked."""
    columns = zip(first, second, strict=True)
    answer = " ".join(f"{a}+{b}={int(a) + int(b)}" for a, b in columns)
    return {"prompt": f"{first}+{second}", "response" if worked else "answer": answer}


if __name__ == "__main__":
    for file_name, content in generate().items():
        (FOLDER / file_name).write_bytes(content)
