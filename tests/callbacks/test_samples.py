from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lightning_rlhf.callbacks.evaluation import Samples, console_table, keep_until, markdown

from .conftest import FakePPO, Fit

SAMPLE = {
    "iteration": 4, "prompt": "a [bold] | pipe\nline", "response": "x" * 30, "score": 1.234,
    "kl": 0.5, "ended": False,
}  # fmt: skip


@pytest.mark.parametrize(("characters", "tables"), [(50, 2), (None, 0)])
def test_samples_are_printed_and_kept_every_few_iterations(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    characters: int | None, tables: int,
) -> None:  # fmt: skip
    samples = Samples(every_n_iterations=2, count=1, characters=characters, run_dir=tmp_path)
    fit(FakePPO(), [samples], [], batches=5)
    lines = (tmp_path / "samples" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [2, 4]
    # The first response of the batch answers prompt 1, scores 2 + 2 and has a KL of 0.6 nats.
    first = json.loads(lines[0])
    assert first.pop("kl") == pytest.approx(0.6)
    assert first == {
        "iteration": 2, "prompt": "train question 1 [b]?", "response": "t1 t2 t3", "score": 4.0,
        "ended": True,
        "per_token": {
            "text": ["t1", "t2", "t3"], "kl": [0.1, 0.2, 0.3], "advantage": [1.0, 0.0, -1.0],
        },
    }  # fmt: skip
    assert capsys.readouterr().out.count("samples of iteration") == tables


def test_text_is_cut_for_reading_and_never_taken_for_markup() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(console_table([SAMPLE], characters=20))
    shown = console.export_text()
    assert "a [bold] | pipe" in shown
    assert "x" * 19 + "…" in shown
    assert "x" * 20 not in shown


def test_markdown_keeps_one_row_a_sample() -> None:
    lines = markdown([SAMPLE]).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith(r"| 4 | a [bold] \| pipe line |")


def test_a_resumed_run_forgets_later_samples(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"iteration": k}) + "\n" for k in (1, 2, 3)) + '{"itera')
    keep_until(path, 2)
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]
