"""Every test that the table names is there, and every test is in the table."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
GUARDS = {"test_the_batch_has_every_case", "test_clipping_was_at_work"}


def test_the_table_names_the_tests() -> None:
    cited: dict[str, set[str]] = {}
    for cell in re.findall(r"`test_\w+\.py::[^|]+", (FOLDER / "README.md").read_text()):
        file = ""
        for named, test in re.findall(r"`(test_\w+\.py)?::(\w+)`", cell):
            file = named or file
            cited.setdefault(file, set()).add(test)
    written = {
        path.name: set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)) - GUARDS
        for path in FOLDER.glob("test_*.py")
        if path.name != Path(__file__).name
    }
    assert cited == written
