"""What is said of two configurations that differ."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_rlhf.cli.changes import abridged, changes


def test_each_key_with_its_value_then_and_now(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"stage": "sft", "sft": {"lr": 0.1}, "model": {"name": "a"}}))
    now = {"stage": "sft", "sft": {"lr": 0.2}, "data": {"name": "b"}, "model": {"name": "a"}}
    assert changes(now, file) == [
        'data.name was not there, is "b"',
        "sft.lr was 0.1, is 0.2",
    ]


def test_of_long_values_the_place_where_they_differ_is_shown() -> None:
    path = "/data/" + "folder/" * 20
    one, other = abridged(f"{path}run-a/{path}", f"{path}run-b/{path}")
    # The same 6 + 20 x 7 + 4 = 150 signs, less a third of the 60 that are shown.
    assert one == "..." + (path + "run-a/" + path)[130:190] + "..."
    assert "run-a" in one
    assert "run-b" in other
    assert one.replace("run-a", "run-b") == other
    assert abridged("1", "2" * 70) == ["1", "2" * 60 + "..."]
