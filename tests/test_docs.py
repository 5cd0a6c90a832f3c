"""What docs/ says of files, functions, keys and commands is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_rlhf.cli.main import CONF, RECIPES, register_resolvers
from lightning_rlhf.cli.recipe import read_recipe, stage_overrides
from lightning_rlhf.cli.settings import STAGES, read_settings
from lightning_rlhf.core.ppo_config import PPOConfig

HOME = Path(__file__).parents[1]
PAGES = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
PPO = (HOME / "docs" / "ppo.md").read_text()
KEYS: dict[str, Any] = get_type_hints(PPOConfig)
NOT_THE_ALGORITHM = ("val_every", "val_samples_per_prompt", "samples_every", "checkpoint_every")
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"python train\.py [^\n`]+", PPO)]


def links(page: Path) -> list[tuple[str, Path]]:
    """Text and target of every relative link."""
    found = re.findall(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)[^)]*\)", page.read_text())
    return [(text, page.parent / target) for text, target in found]


def key_cells() -> Iterator[str]:
    """What stands in backticks in the columns of tables that are headed by "key"."""
    column = None
    for line in PPO.splitlines():
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if column is not None:
            yield from re.findall(r"`([^`]+)`", cells[column])
        elif "key" in cells:
            column = cells.index("key")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    found = links(page)
    assert found
    for text, target in found:
        assert target.exists(), (text, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_name_that_is_a_link_is_defined_where_it_leads(page: Path) -> None:
    for text, target in links(page):
        name = re.fullmatch(r"`(\w+)`", text)
        if name is not None and target.suffix == ".py":
            defined = rf"^(def|class) {name[1]}\b"
            assert re.search(defined, target.read_text(), re.MULTILINE), (text, target)


def test_every_formula_names_its_function_and_its_test() -> None:
    sections = re.findall(r"^## \d+\. (.*?)\n(.*?)(?=^## )", PPO, re.MULTILINE | re.DOTALL)
    assert len(sections) == 13
    for title, text in sections:
        assert "../src/lightning_rlhf/" in text, title
        assert "../tests/" in text, title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_keys_of_the_stages_exist(page: Path) -> None:
    for stage, key in re.findall(r"(?<![\w./])(sft|rm|ppo)\.([a-z]\w*)(?!\w*/)", page.read_text()):
        if key not in ("py", "md", "yaml", "jsonl"):
            assert key in {f.name for f in fields(STAGES[stage])}, f"{stage}.{key}"


def test_keys_in_tables_exist() -> None:
    found = {cell.removeprefix("ppo.") for cell in key_cells()}
    assert len(found) > 30
    assert found <= set(KEYS), found - set(KEYS)


def test_choices_exist() -> None:
    found = re.findall(r"\b([a-z]\w*)=([\w+.]+)", PPO)
    checked = 0
    for key, value in found:
        if get_origin(KEYS.get(key)) is Literal and value != "NAME":
            assert value in get_args(KEYS[key]), f"{key}={value}"
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("key", [f.name for f in fields(PPOConfig)])
def test_every_key_of_the_algorithm_is_mentioned(key: str) -> None:
    if key not in NOT_THE_ALGORITHM:
        assert re.search(rf"`(ppo\.)?{key}\b", PPO), key


@pytest.mark.parametrize("key", [k for k, hint in KEYS.items() if get_origin(hint) is Literal])
def test_every_choice_is_mentioned(key: str) -> None:
    for choice in get_args(KEYS[key]):
        assert re.search(rf"(?<![\w-]){re.escape(choice)}(?![\w+])", PPO), f"{key}={choice}"


def test_there_are_commands() -> None:
    assert any("recipe=bandit" in command for command in COMMANDS)
    assert any("stage=ppo" in command for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command: str) -> None:
    """They compose, and the configuration that they give is one that a run would take."""
    register_resolvers()
    GlobalHydra.instance().clear()
    given = command.split()[2:]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        # As the entry point does: numbers of a stage may be given where it is not chosen yet.
        cfg = compose("config", [re.sub(r"^(sft|rm|ppo)\.", r"++\1.", word) for word in given])
        if cfg.recipe is not None:
            recipe = read_recipe(cfg.recipe, RECIPES)
            for stage in recipe.stages or ("ppo",):
                own = stage_overrides(recipe, stage, given, cfg.job)
                read_settings(compose("config", list(own)))
        else:
            read_settings(cfg)
