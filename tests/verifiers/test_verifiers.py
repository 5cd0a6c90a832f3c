"""The verifiers, against results worked out by hand."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf import verifiers
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.verifiers import json_schema, math_answer, numeric_answer, unit_tests

WORDS = "It is 3. Then 1,234.5e2 and "


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("5 + 7 = 12, so the answer is 12.", 12, 1),
        ("12 or 13", "#### 12", 0),  # the last number counts
        ("none", 0, 0),
        (f"{WORDS}1,234,567", "1234567", 1),  # a comma before each three digits
        ("1,2,3", 3, 1),
        ("1,2345", 2345, 1),  # no thousands, so two numbers
        ("1/2", 0.5, 1),
        ("it is 3/4.", "\\frac{3}{4}", 1),
        ("1/0", 1, 0),
        ("-\\dfrac{1}{4}", -0.25, 1),
        ("50%", "1/2", 1),
        ("50\\%", 50, 0),
        ("5-3", 3, 1),  # a minus after a digit is no sign
        ("x = -3", -3, 1),
        ("\u22123", -3, 1),
        ("-$1,000.50", -1000.5, 1),
        (".5", 0.5, 1),
        ("2e-3kg", 0.002, 1),
        ("it is 4 by x2 and v1.3", 4, 1),  # digits inside words
        ("1e999999999", 1, 0),  # no number, and no time
        ("9" * 5000, 9, 0),
        ("3 in \\boxed{4} of 5", 4, 1),
        ("\\boxed{4} or \\boxed{\\frac{1}{2}}", 0.5, 1),  # the last box, braces in pairs
        ("\\boxed{$1{,}000$}", 1000, 0),
        ("\\boxed{12\\text{ cm}}", 12, 1),
        ("\\boxed{2\\sqrt{3}} 3", 3, 0),  # a box holds one number alone
        ("\\boxed{x = 3}", 3, 0),
        ("\\boxed{3", 3, 1),
    ],
)
def test_the_number_of_a_response_is_compared(response: str, answer: Any, right: int) -> None:
    assert numeric_answer([], [response], [answer]) == [right]


def test_a_number_may_differ_by_a_tolerance() -> None:
    # |x - 200| <= max(absolute, relative * 200): 0.25 allows 199.75, 1% allows 198 and not 197.9
    responses, answers = ["199.75", "198", "197.9", ""], [200] * 4
    assert numeric_answer([], responses, answers) == [0, 0, 0, 0]
    assert numeric_answer([], responses, answers, absolute=0.25) == [1, 0, 0, 0]
    # the double below 0.01 would refuse 198: 1/100 has no double, and the nearest is above it
    assert numeric_answer([], responses, answers, relative=0.01) == [1, 1, 0, 0]
    assert numeric_answer([], ["0.3"], [0.1], relative=2.0) == [1]
    assert numeric_answer([], ["50%"], [50], percent=False) == [1]
    assert numeric_answer([], ["\\boxed{1} 2", "2"], [2, 2], take="last") == [1, 1]
    assert numeric_answer([], ["\\boxed{1} 2", "2"], [2, None], take="boxed") == [0, None]
    with pytest.raises(ConfigError, match="answer is 'four'; allowed: a number, or a text with"):
        numeric_answer([], ["4"], ["four"])
    with pytest.raises(ConfigError, match="take is 'first'; allowed: auto, boxed, last"):
        numeric_answer([], [], [], take="first")  # type: ignore[arg-type]


def test_a_formula_is_compared_by_math_verify() -> None:
    responses = ["It is $\\frac{2}{4}$.", "\\boxed{x(x+1)}", "$0.3$", "nothing"]
    assert math_answer([], responses, ["0.5", "x^2+x", "1/3", None]) == [1, 1, 0, None]


def test_a_response_is_valid_by_a_schema() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"minimum": 2}}}
    responses = [' {"n": 2}\n', '{"n": 1}', "{}", "[]", '{"n": NaN}', "[" * 100_000, ""]
    assert json_schema([], responses, schema) == [1, 0, 0, 0, 0, 0, 0]
    own = [
        {"type": "string"},
        '{"type": "null"}',
        {"$schema": "http://json-schema.org/draft-07/schema#"},
    ]
    assert json_schema([], ['"a"', '"a"', "1"], own) == [1, 0, 1]
    with pytest.raises(ConfigError, match=r"schema is .*, no JSON schema: 'text' is not valid"):
        json_schema([], [], {"type": "text"})


def test_a_task_of_reasoning_gym_checks_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the library: the task's name, the text in the tag and the row reach it."""

    def check(answer: str, entry: dict[str, Any]) -> float:
        assert entry == {"question": "2+2?", "answer": "4", "metadata": {"source_dataset": "sums"}}
        return 1.0 if int(answer) == int(entry["answer"]) else 0.25

    def compare(answer: str, entry: dict[str, Any]) -> float:
        return float(entry["metadata"]["output"] == ((1, 2), (3, int(answer))))

    checks = {"sums": check, "arc_agi": compare}
    library = SimpleNamespace(get_score_answer_fn=checks.__getitem__)
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)
    facts = [{"source_dataset": "sums"}, '{"source_dataset": "sums"}', {"source_dataset": "sums"}]
    responses = ["<answer>5</answer> no: <answer> 4\n</answer>", "<answer>5</answer>", "4"]
    given = ["2+2?"] * 3, responses, ["4"] * 3, facts
    assert verifiers.reasoning_gym(*given) == [1, 0.25, 0]
    assert verifiers.reasoning_gym(*given, tag=None) == [0, 0, 1]  # int() fails on the tags
    grid = ['{"source_dataset": "arc_agi", "output": [[1, 2], [3, 4]]}']
    assert verifiers.reasoning_gym(["p"], ["<answer>4</answer>"], ["4"], grid) == [1]
    with pytest.raises(ValueError, match="invalid literal"):  # of the row, not of the response
        verifiers.reasoning_gym(["p"], ["<answer>four</answer>"], ["four"], grid)
    with pytest.raises(ConfigError, match=r"metadata is .*source_dataset"):
        verifiers.reasoning_gym(["p"], ["r"], ["a"], [{}])


ADD = "Here:\n```python\ndef add(a, b):\n    return a {} b\n```\nIt adds."
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


def test_code_passes_all_of_its_tests() -> None:
    responses = [
        ADD.format("+"),
        ADD.format("*"),  # 2 * 2 is 4, 1 * 2 is not 3
        "add = int.__add__",  # without a block of code, all of it
        f"```\nadd = None\n```\n{ADD.format('+')}",  # the last block
        "def add(a, b",
        "import sys; sys.exit()",
        "import os; os._exit(0)",
    ]
    found = unit_tests([], responses, ["\n".join(TESTS), *[TESTS] * 6], run_code=True)
    assert found == [1, 0, 1, 1, 0, 0, 0]
    assert unit_tests([], ["1"], [None], run_code=True) == [None]
    with pytest.raises(ConfigError, match=r"run_code is False; .* no sandbox"):
        unit_tests([], ["1"], ["1"])


def test_code_has_limits_and_not_our_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    alone = "import os\nassert not os.listdir() and 'SECRET_TOKEN' not in os.environ"
    child = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'input()'], "
    child += f"stdin=subprocess.PIPE)\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    sizes = [
        "bytearray({})",
        "open('f', 'wb').truncate({})",
    ]
    large = [size.format(2**power) for size in sizes for power in (20, 29)]  # allowed: 2^28
    responses, started = [alone, child, *large], time.monotonic()
    found = unit_tests(
        [], responses, ["pass"] * 6, run_code=True, timeout_s=5.0, memory_mb=256, at_once=2
    )
    assert found == [1, 1, 1, 0, 1, 0]
    assert unit_tests([], ["while True: pass"], [""], run_code=True, timeout_s=0.5) == [0]
    assert time.monotonic() - started < 30
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # killed, if not yet reaped
        assert time.monotonic() - started < 30
