"""The README says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_rlhf.callbacks.names import metrics_table
from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.stages.paths import CONF

README = Path(__file__).parents[1] / "README.md"
COMMANDS = [
    line.strip("` ").split("#")[0].strip()
    for line in re.findall(r"python train\.py [^\n`]*", README.read_text())
]


def test_metrics_table_is_the_one_in_the_code() -> None:
    text = README.read_text()
    table = text.split("<!-- metrics table: begin -->")[1].split("<!-- metrics table: end -->")[0]
    assert table.strip() == metrics_table().strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if "…" not in c and "-m" not in c])
def test_commands_compose(command: str) -> None:
    register_resolvers()
    overrides = [word for word in command.split()[2:] if not word.startswith("--")]
    overrides = [word for word in overrides if word != "job"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides)
    for override in overrides:
        key, value = override.split("=", 1)
        if key in ("recipe", "run") or "." in key:
            node = cfg
            for part in key.split("."):
                node = node[part]
            assert str(node) == value


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
