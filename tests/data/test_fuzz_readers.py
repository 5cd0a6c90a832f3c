"""Whatever a file holds becomes rows or one DataError."""

import gzip
import json
from pathlib import Path
from typing import Any, get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.formats import FORMATS, Kind
from lightning_rlhf.data.readers import read

KINDS = st.sampled_from(get_args(Kind))
QUICK = settings(
    derandomize=True, max_examples=60, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TEXTS = st.text(max_size=5) | st.sampled_from(
    ["\n\nHuman: a\n\nAssistant: b", "\n\nHuman:", "\n\nAssistant: x", "a", "user", "assistant"]
)
TURNS = st.dictionaries(st.sampled_from(["role", "content", "x"]), TEXTS | LEAVES, max_size=3)
VALUES = st.recursive(
    LEAVES
    | TEXTS
    | st.lists(TURNS, max_size=3)
    | st.lists(st.fixed_dictionaries({"from": TEXTS, "value": TEXTS}), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
STARTS = {
    "jsonl": b'{"prompt": "a", "response": "b"}\n', "jsonl.gz": b"", "json": b'[{"text": "a"},',
    "csv": b"text,prompt\n", "txt": b"", "parquet": b"PAR1",
}  # fmt: skip


def rows_or_error(kind: Any, file: Path, format: str = "auto") -> int | None:
    """How many rows; None for an error, which names the file in one short line."""
    try:
        count = len(read(kind, str(file), "stop", format))
    except DataError as error:
        said = str(error)
    else:
        assert count == len(read(kind, str(file), "skip", format))
        return count
    assert file.name in said
    assert len(said.splitlines()) == 1
    return None


@QUICK
@given(
    kind=KINDS,
    content=st.binary(max_size=200) | st.text('[]{}",:\n\r a1', max_size=60).map(str.encode),
    ending=st.sampled_from(sorted(STARTS)),
)
def test_any_bytes(tmp_path: Path, kind: str, content: bytes, ending: str) -> None:
    file = tmp_path / f"x.{ending}"
    for whole in (content, STARTS[ending] + content, gzip.compress(content)[: len(content)]):
        file.write_bytes(whole)
        rows_or_error(kind, file)


@QUICK
@given(data=st.data(), kind=KINDS)
def test_any_values_of_any_form(tmp_path: Path, data: st.DataObject, kind: Any) -> None:
    """In rows that have all columns of a form, and so are read as it."""
    form = data.draw(st.sampled_from([form for form in FORMATS if kind in form.kinds]))
    rows = st.fixed_dictionaries(dict.fromkeys(form.reads, VALUES))
    file = tmp_path / "x.jsonl"
    lines = data.draw(st.lists(rows, min_size=1, max_size=2))
    file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    rows_or_error(kind, file, form.name)
