"""The course's pairs of dialogues, and its judge of the last turn."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf.callbacks.evaluation import load_judge
from lightning_rlhf.data.formats import native
from lightning_rlhf.data.rows import Messages, prompt_row

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DATA = RECIPES / "course" / "data"
FILES = ("train", "test")
HH = re.compile(r"(\n\nHuman: [^\n]+\n\nAssistant: [^\n]+)+")
"""Whole dialogues in the form of Anthropic/hh-rlhf."""

judge = load_judge(f"{RECIPES / 'quickstart' / 'judge.py'}:judge")


def rows(split: str) -> list[dict[str, str]]:
    text = gzip.decompress((DATA / f"{split}.jsonl.gz").read_bytes()).decode("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def prompts(split: str) -> list[Messages]:
    return [native(row, "preferences").prompt for row in rows(split)]


def test_the_files_are_reproduced_by_their_script() -> None:
    code = "import dialogues, json; print(json.dumps(dialogues.generate()))"
    made = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=DATA))
    assert made == {f"{split}.jsonl.gz": rows(split) for split in FILES}
    assert {path.name for path in DATA.glob("*.gz")} == set(made)


@pytest.mark.parametrize("split", FILES)
def test_rows_are_pairs_of_whole_dialogues(split: str) -> None:
    for row in rows(split):
        assert list(row) == ["chosen", "rejected"]
        sides = [HH.fullmatch(side) for side in row.values()]
        assert all(sides), row
        # Both sides are the same up to the last turn of the assistant, and differ in it.
        (start, chosen), (other, rejected) = (
            side.rsplit("\n\nAssistant: ", 1) for side in row.values()
        )
        assert start == other
        assert chosen != rejected


def test_held_out_questions_are_in_no_turn_of_the_training_data() -> None:
    asked = {turn.content for prompt in prompts("train") for turn in prompt if turn.role == "user"}
    assert asked.isdisjoint(prompt[-1].content for prompt in prompts("test"))


def test_the_judge_reads_the_last_question() -> None:
    asked = "\n\nHuman: What is the capital of France?\n\nAssistant: Paris."
    start = f"{asked}\n\nHuman: What color is coal?\n\nAssistant: "
    pair = {"chosen": f"{start}Black.", "rejected": f"{start}White."}
    row = prompt_row(native(pair, "preferences").prompt)
    # Right (+1) and curt (-0.3); an answer to the first question alone is wrong.
    assert judge(row, "Black.", True)["gold"] == pytest.approx(0.7)
    assert judge(row, "Paris.", True)["correct"] == 0
