"""The sums of recipe=arithmetic."""

import json
import runpy
from pathlib import Path

from lightning_rlhf.verifiers import exact_match

DATA = Path(__file__).resolve().parents[2] / "recipes" / "arithmetic" / "data"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def test_the_files_are_reproduced_by_their_script() -> None:
    made = runpy.run_path(str(DATA / "sums.py"))["generate"]()
    assert made == {path.name: path.read_bytes() for path in DATA.glob("*.jsonl")}


def test_no_pair_of_numbers_stands_twice_in_either_order() -> None:
    prompts = [row["prompt"] for path in DATA.glob("*.jsonl") for row in rows(path.name)]
    assert len({frozenset(prompt.split("+")) for prompt in prompts}) == len(prompts)


def test_every_answer_adds_up_and_no_other_is_right() -> None:
    for path in DATA.glob("*.jsonl"):
        for row in rows(path.name):
            first, second = row["prompt"].split("+")
            answer = row.get("response") or row["answer"]
            columns = [column.split("=") for column in answer.split(" ")]
            assert (
                "+".join("".join(x[place] for x, _ in columns) for place in (0, 2)) == row["prompt"]
            )
            assert int("".join(total for _, total in columns)) == int(first) + int(second)
    row = rows("prompts_val.jsonl")[0]
    others = [row["answer"], row["answer"][:-1] + "9", row["answer"] + " ", "0+" + row["answer"]]
    assert exact_match([""] * 4, others, [row["answer"]] * 4) == [1, 0, 1, 0]
