"""What pydantic refuses, as one line: the key, what was found, what is allowed."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core.errors import ConfigError, naming_own_keys
from lightning_rlhf.core.validation import (
    LARGEST,
    MOST,
    STRICT,
    Count,
    Options,
    PositiveFloat,
    PositiveInt,
    Text,
    allowed,
    build,
    check_divides,
    check_value,
    described,
    refuse_unknown,
    rule,
)

ListOfText = Annotated[tuple[Text, ...], Field(strict=False), described("a list of texts")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Inner:
    rank: PositiveInt
    names: ListOfText

    def __post_init__(self) -> None:
        rule(self.rank != 13, "rank", self.rank, "any other")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Outer:
    rate: PositiveFloat
    end: PositiveFloat | None
    size: Count
    kind: Literal["a", "b"] | None
    loud: bool
    options: Options
    inner: Inner
    inners: Annotated[tuple[Inner, ...], Field(strict=False)]


INNER: dict[str, Any] = {"rank": 1, "names": ["x", "y"]}
GIVEN: dict[str, Any] = {
    "rate": 2,
    "end": None,
    "size": 3,
    "kind": "a",
    "loud": False,
    "options": {"a": [1]},
    "inner": INNER,
    "inners": [INNER],
}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a smaller ppo.lr, ppo.kl_coef=0.1", "a smaller mine.lr, mine.kl_coef=0.1"),
        ("ppo.jsonl, line 2", "ppo.jsonl, line 2"),
        ("outputs/ppo.lr and my_ppo.lr", "outputs/ppo.lr and my_ppo.lr"),
    ],
)
def test_keys_of_ppo_alone_become_those_of_a_stage_derived_from_it(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error, naming_own_keys("mine", ("lr", "kl_coef")):
        raise ConfigError(text)
    assert str(error.value) == told


def refusal(node: Any, key: str = "out") -> str:
    with pytest.raises(ConfigError) as error:
        build(Outer, node, key)
    return str(error.value)


def test_a_section_is_built_with_the_sections_in_it() -> None:
    built = build(Outer, GIVEN, "out")
    assert built.inner == Inner(rank=1, names=("x", "y"))
    assert built.inners == (built.inner,)
    assert built.rate == 2.0
    assert isinstance(built.rate, float)
    assert build(Outer, GIVEN | {"inner": built.inner}, "out") == built


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0}, "out.rate is 0; allowed: a number and > 0"),
        ({"rate": True}, "out.rate is True; allowed: a number and > 0"),
        ({"rate": "1e-5"}, "out.rate is '1e-5'; allowed: a number and > 0"),
        ({"end": -math.inf}, "out.end is -inf; allowed: a number and > 0, or null"),
        ({"size": 0}, "out.size is 0; allowed: a whole number and >= 1"),
        (
            {"size": MOST + 1},
            "out.size is 1000001; allowed: a whole number and >= 1 and <= 1000000",
        ),
        ({"kind": ["a"]}, "out.kind is ['a']; allowed: a, b, or null"),
        ({"loud": 1}, "out.loud is 1; allowed: true, false"),
        ({"options": {1: 2}}, "out.options is {1: 2}; allowed: a mapping of names to values"),
        ({"inner": 5}, "out.inner is 5; allowed: a mapping of keys to values"),
        ({"inner": INNER | {"rank": 0}}, "out.inner.rank is 0; allowed: a whole number and >= 1"),
        ({"inner": INNER | {"rank": 13}}, "out.inner.rank is 13; allowed: any other"),
        ({"inner": INNER | {"names": "xy"}}, "out.inner.names is 'xy'; allowed: a list of texts"),
        ({"inner": INNER | {"names": [""]}}, "out.inner.names is ''; allowed: a list of texts"),
        (
            {"inner": INNER | {"rnak": 1}},
            "out.inner.rnak is not a known key; did you mean out.inner.rank?",
        ),
        (
            {"inners": [INNER, INNER | {"rank": 0}]},
            "out.inners[1].rank is 0; allowed: a whole number and >= 1",
        ),
    ],
)  # fmt: skip
def test_a_value_that_is_refused(changes: dict[Any, Any], message: str) -> None:
    assert refusal(GIVEN | changes) == message


def test_the_first_of_several_is_reported_and_the_others_are_named() -> None:
    several = GIVEN | {"rate": 0, "size": 0, "kind": "c", "loud": 1, "inner": INNER | {"rank": 0}}
    assert refusal(several) == (
        "out.rate is 0; allowed: a number and > 0 (and 4 more: out.size, out.kind, out.loud, ...)"
    )


def test_an_unknown_key_is_reported_before_what_it_left_out() -> None:
    misspelt = {("rait" if key == "rate" else key): value for key, value in GIVEN.items()}
    assert refusal(misspelt | {"end": 0}) == (
        "out.rait is not a known key; did you mean out.rate? (and 2 more: out.rate, out.end)"
    )


@pytest.mark.parametrize("node", [None, 5, ["rate"], "rate"])
def test_what_is_no_section(node: Any) -> None:
    assert refusal(node) == f"out is {node!r}; allowed: a mapping of keys to values"


def test_no_other_value_is_shown_by_the_error_or_its_causes() -> None:
    with pytest.raises(ConfigError) as error:
        build(Outer, {"options": {"token": "s3cret"}}, "out")
    assert error.value.__cause__ is None
    assert error.value.__context__ is None
    assert "s3cret" not in str(error.value)


def test_numbers_of_numpy_are_floats_and_no_integers() -> None:
    assert build(Outer, GIVEN | {"rate": np.float64(0.5)}, "out").rate == 0.5
    assert refusal(GIVEN | {"size": np.int64(2)}).endswith("allowed: a whole number and >= 1")


def test_a_value_alone_has_open_and_closed_ends() -> None:
    closed, opened = Annotated[float, Field(ge=2, le=2)], Annotated[float, Field(gt=1, lt=3)]
    check_value("a.b", 2, closed)
    for found in (1, 3):
        with pytest.raises(ConfigError, match=rf"is {found}; allowed: a number and > 1 and < 3$"):
            check_value("a.b", found, opened)
    check_value("a.b", LARGEST, PositiveInt)
    with pytest.raises(ConfigError, match=rf"allowed: a whole number and >= 1 and <= {LARGEST}$"):
        check_value("a.b", LARGEST + 1, PositiveInt)


def test_text_that_can_name_a_file_and_text_that_cannot() -> None:
    for text in ("a", "a/b", "é 漢", "/".join(["a" * 255] * 15)):
        check_value("a.b", text, Text)
    for found in (" ", "a\n", "\x7f", "\ud800", "a" * 256, "é" * 128, "a/" * 2048, 5, None):
        with pytest.raises(ConfigError, match=r"^a\.b is .*; allowed: text$"):
            check_value("a.b", found, Text)
    with pytest.raises(ConfigError) as error:
        check_value("a.b", "x" * 5000, Text)
    assert str(error.value) == f"a.b is '{'x' * 40}… (5000 characters)'; allowed: text"


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (float, "a number"),
        (int | None, "a whole number, or null"),
        (Annotated[int | float, Field(gt=0)], "a number and > 0"),
        (Annotated[float, Field(ge=-0.5, lt=1e30)], "a number and >= -0.5 and < 1e+30"),
        (Literal["a", None], "a, null"),
        (Annotated[Text, described("a folder")] | None, "a folder, or null"),
        (Inner, "a mapping of keys to values"),
    ],
)
def test_what_a_type_allows(hint: Any, words: str) -> None:
    assert allowed(hint) == words


def test_keys_that_nothing_reads() -> None:
    refuse_unknown({"seed": 1}, {"seed", "run"}, "")
    with pytest.raises(ConfigError, match=r"^sed is not a known key; did you mean seed\?$"):
        refuse_unknown({"seed": 1, "sed": 1}, {"seed", "run"}, "")


def test_sizes_that_divide() -> None:
    check_divides("small", 4, "large", 12)
    with pytest.raises(ValueError, match=r"^large is 12, which small = 5 does not divide; allowed "
                       r"for small: 1, 2, 3, 4, 6, 12$"):  # fmt: skip
        check_divides("small", 5, "large", 12)


def test_configurations_are_read_without_the_libraries_of_the_floors_above() -> None:
    code = (
        "import sys, lightning_rlhf.core.ppo_config, lightning_rlhf.core.config\n"
        "print([m for m in ('torch', 'lightning', 'transformers', 'hydra') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
