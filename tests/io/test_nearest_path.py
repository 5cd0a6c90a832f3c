"""Suggestions for a path that does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.io.user_code import nearest_path


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("sft", "ppo"):
        (tmp_path / f"outputs/default/tiny/{stage}/final").mkdir(parents=True)
    (tmp_path / "outputs/default/tiny/ppo/checkpoints").mkdir()
    (tmp_path / "outputs/default/tiny/ppo/checkpoints/000005.ckpt").touch()
    (tmp_path / "outputs/default/tiny/notes.txt").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("outputs/default/tiny/sftt/final", "; the nearest is outputs/default/tiny/sft/final"),
        ("outptus/default/tiny/sft/final", "; the nearest is outputs/default/tiny/sft/final"),
        ("outputs/defalt/tiny/rm/final", "; the nearest is outputs/default"),
        ("./outputs/default/tiny/sft/finl", "; the nearest is outputs/default/tiny/sft/final"),
        ("outputs/default/tiny/dpx", "; outputs/default/tiny holds ppo, sft"),
        (
            "outputs/default/tiny/ppo/checkpoints/000006.ckpt",
            "; the nearest is outputs/default/tiny/ppo/checkpoints/000005.ckpt",
        ),
        ("outputs/default/tiny/sft/x", "; outputs/default/tiny/sft holds final"),
        ("org/name", ""),
        ("/nowhere-here/x", ""),
        ("outputs/default", ""),
    ],
)
def test_the_first_missing_part_is_compared_with_what_is_beside_it(
    missing: str, words: str
) -> None:
    assert nearest_path(missing) == words
