"""Hydra's compositions in tests: what is the same is read, parsed and composed once."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.core.validation import build
from lightning_rlhf.runs.console import CONF

T = TypeVar("T")
PRESETS = Path(__file__).parent / "cli" / "presets"
UNCHANGED = {str(CONF), f"file://{CONF}", str(PRESETS), f"file://{PRESETS}"}
"""Folders of configurations in which no test writes."""
KEPT = 48
"""Number of compositions that are kept; each has a megabyte or two."""


@pytest.fixture(scope="session", autouse=True)
def parsed_files() -> Iterator[None]:
    """Hydra reads each of some fifty files twice a command, by a parser written in Python."""
    parse, parsed = yaml.load, dict[str, Any]()

    def load(source: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader" or not hasattr(source, "read"):
            return parse(source, Loader=Loader)
        start = source.tell()
        text = source.read()
        if text not in parsed:
            source.seek(start)  # for the name of the file in the message of an error
            parsed[text] = parse(source, Loader=Loader)
        return copy.deepcopy(parsed[text])

    with patch.object(yaml, "load", load):
        yield


@pytest.fixture(scope="session", autouse=True)
def compositions() -> Iterator[None]:
    """Each command line is composed once; a command asks for it two to six times, and a
    composition takes a tenth of a second.

    What is kept is a copy from before anyone reads it, so that nothing of it is resolved yet.
    """
    load, kept = ConfigLoaderImpl.load_configuration, OrderedDict[Any, DictConfig]()

    def load_configuration(self: ConfigLoaderImpl, *given: Any, **named: Any) -> DictConfig:
        sources = [source.path for source in self.config_search_path.get_path()]
        own = {path for path in sources if "://" not in path or path.startswith("file://")}
        job = JobRuntime().get("name")
        key = repr((given, named, sources, job, version.getbase()))
        by_test = job == "app"  # Hydra's name for what a test composes itself, seldom twice
        if by_test or not own <= UNCHANGED or "searchpath" in key:
            return load(self, *given, **named)
        if key not in kept:
            cfg = load(self, *given, **named)
            kept[key] = copy.deepcopy(cfg)
            if len(kept) > KEPT:
                kept.popitem(last=False)
            return cfg
        kept.move_to_end(key)
        cfg = copy.deepcopy(kept[key])
        cfg.hydra.runtime.cwd = os.getcwd()
        return cfg

    with patch.object(ConfigLoaderImpl, "load_configuration", load_configuration):
        yield


@cache
def section_of(stage: str) -> dict[str, Any]:
    """The values of a stage in conf/, with `advantage=gae` for PPO."""
    files = [CONF / "stages" / f"{stage}.yaml"]
    if stage == "ppo":
        files.append(CONF / "advantage" / "gae.yaml")
    tree = OmegaConf.merge({"final": "last"}, {stage: OmegaConf.merge(*map(OmegaConf.load, files))})
    section: dict[str, Any] = OmegaConf.to_container(tree, resolve=True)[stage]
    return {key: value for key, value in section.items() if key != "defaults"}


def stage_config(stage: str, kind: type[T], **changes: Any) -> T:
    """The configuration of a stage, as in conf/ but for what is changed."""
    return build(kind, copy.deepcopy(section_of(stage)) | changes, stage)
