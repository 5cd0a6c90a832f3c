"""What pydantic refuses, as one line: the key, what was found, what is allowed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core.errors import ConfigError, naming_own_keys
from lightning_rlhf.core.validation import (
    MOST,
    STRICT,
    Count,
    Options,
    PositiveFloat,
    PositiveInt,
    Text,
    build,
    check_value,
    described,
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
    "rate": 2, "end": None, "size": 3, "kind": "a", "loud": False, "options": {"a": [1]},
    "inner": INNER, "inners": [INNER],
}  # fmt: skip


def test_keys_of_ppo_alone_become_those_of_a_stage_derived_from_it() -> None:
    with pytest.raises(ConfigError) as error, naming_own_keys("mine", ("lr", "kl_coef")):
        raise ConfigError("ppo.lr, ppo.kl_coef=0.1; ppo.jsonl, ppo.lrs, outputs/ppo.lr, my_ppo.lr")
    message = "mine.lr, mine.kl_coef=0.1; ppo.jsonl, ppo.lrs, outputs/ppo.lr, my_ppo.lr"
    assert str(error.value) == message


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
        ({"end": -math.inf}, "out.end is -inf; allowed: a number and > 0, or null"),
        ({"size": 0}, f"out.size is 0; allowed: a whole number and >= 1 and <= {MOST}"),
        ({"kind": ["a"]}, "out.kind is ['a']; allowed: a, b, or null"),
        ({"inner": INNER | {"rank": 13}}, "out.inner.rank is 13; allowed: any other"),
        ({"inner": INNER | {"rnak": 1}},
         "out.inner.rnak is not a known key; did you mean out.inner.rank?"),
        ({"inners": [INNER, INNER | {"rank": 0}]},
         "out.inners[1].rank is 0; allowed: a whole number and >= 1"),
    ],
)  # fmt: skip
def test_a_value_that_is_refused(changes: dict[Any, Any], message: str) -> None:
    assert refusal(GIVEN | changes) == message


def test_the_first_of_several_is_reported_and_the_others_are_named() -> None:
    assert refusal(GIVEN | {"rate": 0, "size": 0, "kind": "c", "loud": 1, "end": 0}) == (
        "out.rate is 0; allowed: a number and > 0 (and 4 more: out.end, out.size, out.kind, ...)"
    )
    misspelt = {("rait" if key == "rate" else key): value for key, value in GIVEN.items()}
    assert refusal(misspelt | {"end": 0}) == (
        "out.rait is not a known key; did you mean out.rate? (and 2 more: out.rate, out.end)"
    )


def test_no_other_value_is_shown_by_the_error_or_its_causes() -> None:
    with pytest.raises(ConfigError) as error:
        build(Outer, {"options": {"token": "s3cret"}}, "out")
    assert error.value.__cause__ is None
    assert error.value.__context__ is None
    assert "s3cret" not in str(error.value)


def test_text_that_can_name_a_file_and_text_that_cannot() -> None:
    for text in ("a", "a/b", "é 漢", "/".join(["a" * 255] * 15)):
        check_value("a.b", text, Text)
    for found in (" ", "a\n", "\ud800", "é" * 128, "a/" * 2048, 5):
        with pytest.raises(ConfigError, match=r"^a\.b is .*; allowed: text$"):
            check_value("a.b", found, Text)
