"""Sources of a stage, held-out prompts, and the bounds of the configuration."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlhf.data.config import DataConfig, Split
from lightning_rlhf.data.readers import draw_rows, load

MakeConfig = Callable[..., DataConfig]
Jsonl = Callable[..., str]


@pytest.fixture
def forty(jsonl: Jsonl) -> str:
    """40 rows of 20 prompts."""
    return jsonl(*({"prompt": f"p{i % 20}", "response": f"r{i}"} for i in range(40)))


def test_a_quarter_of_the_prompts_is_held_out_with_all_their_rows(
    make_config: MakeConfig, forty: str
) -> None:
    config = make_config(demonstrations=Split(train=forty, val=None), val_fraction=0.25)
    split = load("demonstrations", config, seed=0)
    assert (len(split.train), len(split.val)) == (30, 10)  # 5 of 20 prompts, two rows each
    assert not {r.prompt for r in split.train.rows} & {r.prompt for r in split.val.rows}
    responses = [r.response for r in (*split.train.rows, *split.val.rows)]
    assert sorted(responses) == sorted(f"r{i}" for i in range(40))
    numbers = (*split.train.numbers, *split.val.numbers)  # lines from 1: r0 stands in line 1
    assert responses == [f"r{number - 1}" for number in numbers]
    others = [load("demonstrations", config, seed).val.rows for seed in (0, 1)]
    assert others[0] == split.val.rows != others[1]


def test_neither_side_is_empty(make_config: MakeConfig, forty: str) -> None:
    for fraction, held_out in ((0.001, 1), (0.999, 19)):
        config = make_config(prompts=Split(train=forty, val=None), val_fraction=fraction)
        split = load("prompts", config, seed=0)
        assert (len(split.train), len(split.val)) == (20 - held_out, held_out)


def test_a_large_validation_set_is_sampled(make_config: MakeConfig, forty: str) -> None:
    config = make_config(demonstrations=Split(train=forty, val=forty), max_val_rows=7)
    val = load("demonstrations", config, seed=0).val
    assert len(val) == 40  # which of them fit is not known yet
    samples = [draw_rows(val, 7, seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    numbers = [int(row.response[1:]) for row in samples[0].rows]
    assert [number - 1 for number in samples[0].numbers] == numbers
    assert numbers != list(range(7))
    assert samples[0].left_out == {"over data.max_val_rows": 33}
    assert draw_rows(val, 40, 0) is draw_rows(val, None, 0) is val


def test_texts_are_held_out_one_by_one(make_config: MakeConfig, tmp_path: Path) -> None:
    """All of them have the same prompt, none."""
    file = tmp_path / "mine.txt"
    file.write_text("".join(f"text {i}\n\n" for i in range(20)))
    config = make_config(demonstrations=Split(train=str(file), val=None), val_fraction=0.25)
    split = load("demonstrations", config, seed=0)
    assert (len(split.train), len(split.val)) == (15, 5)
    assert split.train.numbers[0] % 2 == 1  # every other line is blank
