"""What a stage says of the rows that it leaves out or cuts, and what it keeps torch from saying."""

import json
import re
import shlex

import pytest

from .conftest import ROWS, Workplace
from .others import until_called

LONG = json.dumps({"prompt": "word " * 100, "response": "b", "chosen": "b", "rejected": "c"})
"""Its prompt has more than the 64 tokens of data.max_prompt_tokens."""


@pytest.mark.parametrize(
    ("data", "override", "line", "used"),
    [("val", "data.long_prompts=cut", LONG, 1), ("train", "data.on_bad_row=skip", "{", 0)],
)
def test_rows_left_out_or_cut_are_counted(
    workplace: Workplace, data: str, override: str, line: str, used: int
) -> None:
    """In a line for the rows to train on and in another for those to validate on."""
    with (workplace.folder / "data" / f"prompts_{data}.jsonl").open("a") as file:
        file.write(line + "\n")
    words = ["stage=ppo", override, "policy.checkpoint=base", "reward=random"]
    out = until_called(workplace, *words, name="lightning_rlhf.models.build_roles.start_from")
    train, val = out.splitlines()[-2:]  # the first names the device
    counts = {"train": [ROWS["prompts_train"]], "val": [ROWS["prompts_val"]]}
    counts[data] = [counts[data][0] + used, 1]
    assert [int(n) for n in re.findall(r"\d+", train)] == counts["train"]
    assert [int(n) for n in re.findall(r"\d+", val)] == counts["val"]


def test_a_stage_ends_with_the_next_command(workplace: Workplace) -> None:
    """It runs as it is printed: keys of the stage itself are left out, those of all are kept."""
    command = ["stage=sft", "sft.epochs=0.125", "run=chain", "seed=7", "overwrite=true"]
    out = workplace.mini(*command).succeeded.out
    for stage, shorter in (("rm", ["rm.epochs=0.125"]), ("ppo", [])):
        words = shlex.split(out.splitlines()[-1].removeprefix("next: "))
        assert {f"stage={stage}", "run=chain", "seed=7"} <= {*words}
        assert not {"sft.epochs=0.125", "rm.epochs=0.125", "overwrite=true"} & {*words}
        if shorter:
            words = words[words.index("train.py") + 1 :]
            out = workplace.call(*words, *shorter).succeeded.out
