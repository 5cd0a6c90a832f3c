"""The shipped functions, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.io.user_code import file_of_module
from lightning_rlhf.rewards.functions import (
    exact_match,
    json_validity,
    length_band,
    regular_expression,
    repetition,
)


def words(count: int) -> str:
    return "  \n".join(["word"] * count)


def test_the_length_of_a_response_has_a_band() -> None:
    # 4 to 10 words: 0/4, 1/4, 3/4, 1, 1, 1, 2 - 11/10, 2 - 15/10, 2 - 20/10, below 0 is 0
    counts = [0, 1, 3, 4, 7, 10, 11, 15, 20, 40]
    found = length_band([], [words(n) for n in counts], shortest=4, longest=10)
    assert found == pytest.approx([0, 0.25, 0.75, 1, 1, 1, 0.9, 0.5, 0, 0], rel=1e-12)
    # 0 to 2 characters: 1, 1, 1, 2 - 3/2; an accent and an emoji are one each
    responses = ["", "é", "🎈 ", "a b"]
    found = length_band([], responses, shortest=0, longest=2, unit="characters")
    assert found == [1, 1, 1, 0.5]


def test_a_pattern_is_found_or_covers_the_whole() -> None:
    responses = ["4", "it is 4", "four", "4\n"]
    assert regular_expression([], responses, pattern=r"\d") == [1, 1, 0, 1]
    assert regular_expression([], responses, pattern=r"\d", fullmatch=True) == [1, 0, 0, 0]


def test_an_answer_is_matched() -> None:
    responses = [" Paris\n", "paris", "Paris.", ""]
    assert exact_match([], responses, ["Paris"] * 4) == [1, 0, 0, 0]
    assert exact_match([], responses, ["Paris"] * 4, ignore_case=True) == [1, 1, 0, 0]
    assert exact_match([], responses, ["Paris"] * 4, strip=False) == [0, 0, 0, 0]
    assert exact_match([], ["STRASSE"], ["Straße "], ignore_case=True) == [1]
    assert exact_match([], ["", "4"], [None, "4"]) == [None, 1]  # without an answer, no score


def test_an_answer_is_extracted() -> None:
    # The first "is" counts; without one there is no answer; a number is compared as text.
    responses = ["it is 4. Or is 5", "4", "it is four", "is "]
    pattern = r"is (\d)?"
    assert exact_match([], responses, [4, 4, 4, ""], extract=pattern) == [1, 0, 0, 0]
    # A row without an answer has no score.
    assert exact_match([], ["", "4"], [None, "4"]) == [None, 1]


def test_repetition_is_the_share_of_ngrams_that_were_there_before() -> None:
    responses = [
        "a b c d",  # abc bcd
        "a b a b a b",  # aba bab aba bab: 2 of 4 new
        "a a a a a",  # aaa three times: 1 of 3 new
        "a b",  # none
        "",
    ]
    assert repetition([], responses) == pytest.approx([0, -1 / 2, -2 / 3, 0, 0], rel=1e-12)
    # a b a b a b: 2 of 6 new
    assert repetition([], responses[1:2], n=1) == pytest.approx([-2 / 3], rel=1e-12)


def test_json_is_valid_or_not() -> None:
    right = ["{}", " [1, 2]\n", '"text"', "null", "1e3", '{"a": null, "b": 1}']
    wrong = ["", "{'a': 1}", "[1,]", "NaN", "-Infinity", "[Infinity]", "{} {}", "[" * 100_000]
    assert json_validity([], right) == [1] * 6
    assert json_validity([], wrong) == [0] * 8
    assert json_validity([], right, keys=["a", "b"]) == [0, 0, 0, 0, 0, 1]
    assert json_validity([], ['["a"]', '"a"', '{"b": "a"}'], keys=["a"]) == [0, 0, 0]


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pattern is '\(', no regular expression: miss"):
        regular_expression(["p"], ["r"], pattern="(")
    with pytest.raises(ConfigError, match=r"extract .* a pattern with a group"):
        exact_match(["p"], ["r"], ["a"], extract="is .*")


def test_the_file_of_a_module_is_found_without_importing_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "evil_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    (package / "inner.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert file_of_module("evil_package.inner") == package / "inner.py"
    assert file_of_module("evil_package") == package / "__init__.py"
    assert file_of_module("evil_package.missing.deep") is None
