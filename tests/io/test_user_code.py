"""Functions, classes and other objects that the configuration names, and paths that are missing."""

import sys
from pathlib import Path

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.io.user_code import load_function, nearest_path

RULES = """\
from pathlib import Path
LIMIT = 3
class Scorer: ...
upper = str.upper
def _hidden(): ...
def score(): return LIMIT
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "rules.py"
    file.write_text(RULES)
    return file


def test_a_function_of_a_file_also_in_the_home_folder_and_of_a_module(
    rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is the one that was imported already, not a copy."""
    monkeypatch.setenv("HOME", str(rules.parent))
    for source in (f"{rules}:score", "~/rules.py:score"):
        assert load_function(source, "reward.function")() == 3
    assert load_function("lightning_rlhf.io.user_code:load_function", "key") is load_function


def test_what_fails_while_it_is_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what would end the process; what failed once is not taken for loaded."""
    (tmp_path / "failing.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    for where in (f"{tmp_path}/failing.py", "failing") * 2:
        with pytest.raises(ConfigError, match=rf"; {where} fails at failing.py:1: SystemExit\(\)"):
            load_function(f"{where}:score", "reward.function")


def test_files_that_are_called_alike_do_not_meet(tmp_path: Path) -> None:
    """Each keeps its own classes, which pickle and dataclasses look up by the module's name."""
    for folder in ("a", "b"):
        file = tmp_path / folder / "rules.py"
        file.parent.mkdir()
        file.write_text(f"def score(): return {folder!r}\n")
    first, second = (load_function(f"{tmp_path / x / 'rules.py'}:score", "key") for x in "ab")
    assert (first(), second()) == ("a", "b")
    assert vars(sys.modules[first.__module__])["score"] is first


def test_a_file_is_executed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rules.py"
    file.write_text("state = []\ndef add(): state.append(0)\ndef count(): return len(state)\n")
    monkeypatch.chdir(tmp_path)
    load_function("rules.py:add", "key")()
    assert load_function(f"{file}:count", "key")() == 1


def test_the_first_missing_part_is_compared_with_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("sft", "ppo"):
        (tmp_path / f"outputs/{stage}/final").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert nearest_path("outputs/sftt/final") == "; the nearest is outputs/sft/final"
    assert nearest_path("outputs/zzz") == nearest_path("org/name") == ""
