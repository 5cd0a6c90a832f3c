"""Wrong input is answered as refusals.yaml says: one line with the key, what was found and allowed.

Whole commands go through the door, all others begin where Hydra hands its configuration over.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from .conftest import Outcome, Workplace, make_workplace, run, tree

TABLE = yaml.load((Path(__file__).parent / "refusals.yaml").read_text(), yaml.CSafeLoader)
BASES: dict[str, list[str]] = TABLE["bases"]
KEY = {"sft": "demonstrations", "rm": "preferences", "dpo": "preferences", "ppo": "prompts"}
Case = dict[str, Any]


def marked(case: Case, *given: Any) -> Any:
    """The case of a test; that of make engines-check where it says `matrix`."""
    return pytest.param(*given, marks=[pytest.mark.matrix] * case.get("matrix", False))


SETTINGS = [
    marked(case, base, case["key"], case["value"], case["says"])
    for base, cases in TABLE["settings"].items()
    for case in cases
]
GOOD = '{"prompt": "x", "response": "y", "chosen": "y", "rejected": "z"}\n'


def edit(file: Path, case: Case) -> None:
    """Write, change or delete a file as a case says."""
    if "gone" in case:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    elif "cut" in case:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif "json" in case:
        file.write_text(json.dumps(json.loads(file.read_text()) | case["json"]))
    elif "columns" in case:
        pq.write_table(pa.table(case["columns"]), file)
    elif {"text", "latin"} & case.keys():
        file.write_bytes(case.get("text", "").encode() + case.get("latin", "").encode("latin-1"))


def check(place: Workplace, outcome: Outcome, before: dict[str, str], says: list[str]) -> None:
    """One short line that says it all; no file is written, changed or deleted."""
    assert [text for text in says if text not in outcome.error] == [], outcome.error
    assert len(outcome.error) < 600 and "s3cret" not in outcome.error  # noqa: PT018
    assert tree(place.folder) == before


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with the short run `made`, and its final/ folders as sft/ and rm/."""
    place = make_workplace(tmp_path_factory.mktemp("refusals") / "work")
    for stage in ("sft", "rm"):
        place.mini("run=made", f"stage={stage}", f"{stage}.epochs=0.125").succeeded  # noqa: B018
        shutil.copytree(place.stage(stage, "made") / "final", place.folder / stage)
    return place


@pytest.mark.parametrize(("base", "key", "value", "says"), SETTINGS)
def test_a_setting(place: Workplace, base: str, key: str, value: Any, says: list[str]) -> None:
    before = tree(place.folder)
    check(place, run(place, key, value, *BASES[base]), before, says)


@pytest.mark.parametrize("case", [*TABLE["rows"], *TABLE["files"]])
def test_data(place: Workplace, case: Case) -> None:
    stage, file, says = case.get("stage", "sft"), case.get("file", "x.jsonl"), case["says"]
    if "line" in case:
        case = {"text": GOOD + case["line"] + "\n"}
        says = [*says, "data/x.jsonl, line 2", "data.on_bad_row=skip"]
    edit(place.folder / "data" / file, case)
    words, before = [*BASES[stage], *case.get("words", [])], tree(place.folder)
    check(place, run(place, f"data.{KEY[stage]}.train", f"data/{file}", *words), before, says)


@pytest.mark.parametrize("case", [marked(case, case) for case in TABLE["folders"]])
def test_a_folder(place: Workplace, tmp_path: Path, case: Case) -> None:
    copy = place.copied(tmp_path / "work")
    if case["base"] == "resumed":
        shutil.rmtree(copy.stage("sft", "made") / "final")
    edit(copy.folder / case["file"], case)
    before = tree(copy.folder)
    check(copy, run(copy, "debug", False, *BASES[case["base"]]), before, case["says"])


@pytest.mark.parametrize("case", [marked(case, case) for case in TABLE["commands"]])
def test_a_command(place: Workplace, case: Case) -> None:
    before = tree(place.folder)
    check(place, place.call(*case["words"].split()), before, case["says"])
