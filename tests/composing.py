"""Hydra's compositions in tests: what is the same is read, parsed and composed once."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import yaml
from hydra import version
from hydra._internal import config_loader_impl as loader
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.defaults_list import create_defaults_list as list_of_files
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.core.validation import build
from lightning_rlhf.runs.console import CONF

T = TypeVar("T")
PRESETS = Path(__file__).parent / "cli" / "presets"
UNCHANGED = {str(CONF), str(PRESETS)}
"""Folders of configurations in which no test writes."""


@pytest.fixture(scope="session", autouse=True)
def parsed_files() -> Iterator[None]:
    """Parse each configuration file and each override once, with Hydra's own parsers.

    They are written in Python, and read some fifty files twice a command.
    """
    parse, parsed = yaml.load, dict[str, Any]()
    parse_word, words = OverridesParser.parse_rule, dict[tuple[str, str], Any]()

    def load(source: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader" or not hasattr(source, "read"):
            return parse(source, Loader=Loader)
        start = source.tell()
        text = source.read()
        if text not in parsed:
            source.seek(start)  # for the name of the file in the message of an error
            parsed[text] = parse(source, Loader=Loader)
        return copy.deepcopy(parsed[text])

    def rule(self: OverridesParser, word: str, name: str) -> Any:
        if (word, name) not in words:
            words[word, name] = parse_word(self, word, name)
        return copy.deepcopy(words[word, name])

    with patch.object(yaml, "load", load), patch.object(OverridesParser, "parse_rule", rule):
        yield


@pytest.fixture(scope="session", autouse=True)
def compositions() -> Iterator[None]:
    """The files of the same presets are put together once, which takes half a second; a command
    asks for it two to six times. The values on its command line are set in a copy."""
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    lists, merged = dict[str, DefaultsList](), dict[str, bytes]()

    def files_of(repo: IConfigRepository) -> str | None:
        """The folders that are read; None where a test may write in one of them."""
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        own = {path for scheme, path in sources if scheme == "file"}
        return repr((version.getbase(), sources)) if own <= UNCHANGED else None

    def create_defaults_list(
        *, repo: IConfigRepository, overrides_list: list[Override], **how: Any
    ) -> DefaultsList:
        if (files := files_of(repo)) is None:
            return list_of_files(repo=repo, overrides_list=overrides_list, **how)
        values, choices = list[Override](), list[Override]()
        for word in overrides_list:
            if not word.is_sweep_override():
                is_dict = isinstance(word.value(), dict)
                is_choice = not is_dict and repo.group_exists(word.key_or_group)
                (choices if is_choice else values).append(word)
        key = repr((files, how, [word.input_line for word in choices]))
        if key not in lists:
            lists[key] = list_of_files(repo=repo, overrides_list=choices, **how)
        return replace(lists[key], config_overrides=values)

    def compose(
        self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        if (files := files_of(repo)) is None:
            return merge(self, defaults, repo)
        key = repr((files, defaults))
        if key not in merged:
            merged[key] = pickle.dumps(merge(self, defaults, repo))
        cfg: DictConfig = pickle.loads(merged[key])
        return cfg

    with (
        patch.object(loader, "create_defaults_list", create_defaults_list),
        patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose),
    ):
        yield


@cache
def section_of(stage: str) -> dict[str, Any]:
    """The values of a stage in conf/, with `advantage=gae` for PPO."""
    register_resolvers()
    files = [CONF / "stages" / f"{stage}.yaml"]
    if stage == "ppo":
        files.append(CONF / "advantage" / "gae.yaml")
    tree = OmegaConf.merge({"final": "last"}, {stage: OmegaConf.merge(*map(OmegaConf.load, files))})
    section: dict[str, Any] = OmegaConf.to_container(tree, resolve=True)[stage]
    return {key: value for key, value in section.items() if key != "defaults"}


def stage_config(stage: str, kind: type[T], **changes: Any) -> T:
    """The configuration of a stage, as in conf/ but for what is changed."""
    return build(kind, copy.deepcopy(section_of(stage)) | changes, stage)
