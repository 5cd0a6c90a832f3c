"""The README is short, and what it states of commands and metrics holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.core.metrics import METRICS as DEFINED
from lightning_rlhf.runs.console import CONF

README = Path(__file__).parents[1] / "README.md"
METRICS = README.parent / "docs" / "metrics.md"
QUICKSTART = README.parent / "docs" / "quickstart.md"
COMMANDS = [
    line.strip("` ").split("#")[0].strip()
    for line in re.findall(r"python train\.py [^\n`]*", README.read_text())
]


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_metrics_table_is_the_one_in_the_code() -> None:
    text = METRICS.read_text()
    table = text.split("<!-- metrics table: begin -->")[1].split("<!-- metrics table: end -->")[0]
    rows = [
        f"| `{name}` | {', '.join(m.stages)} | {m.phase} | {m.formula} | {m.unit} | {m.healthy} |"
        for name, m in DEFINED.items()
    ]
    assert table.strip().splitlines()[2:] == rows
    assert {row.count("|") for row in rows} == {7}


def test_the_quickstart_has_the_same_numbers_in_both_places() -> None:
    table = README.read_text().split("<!-- quickstart table: begin -->")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    after = {row[1]: row[3] for row in rows if len(row) == 6}
    first = re.search(r"^\| nothing \|(.*)\|$", QUICKSTART.read_text(), re.MULTILINE)
    assert first is not None
    _, reward, gold, correct, polite, _, kl = (cell.strip() for cell in first[1].split("|"))
    assert (reward, gold, correct, polite, kl) == (
        *(after["reward"], after["gold score (hidden judge)"], after["correct"], after["polite"]),
        after["KL to the SFT model, nats a response"],
    )


@pytest.mark.parametrize("command", [c for c in COMMANDS if "…" not in c and "-m" not in c])
def test_commands_compose(command: str) -> None:
    register_resolvers()
    overrides = command.split(" --")[0].split()[2:]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides)
    for override in overrides:
        key, value = override.split("=", 1)
        if key in ("recipe", "run") or "." in key:
            node = cfg
            for part in key.split("."):
                node = node[part]
            assert str(node) == value
