"""The section hydra.sweeper of a study of Optuna, and what it is built into."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, Sweep
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.names import METRICS
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.validation import STRICT, PositiveInt, Text, build
from lightning_rlhf.stages.final import metric_of
from lightning_rlhf.stages.settings import read_settings

KEY = "hydra.sweeper"
Direction = Literal["maximize", "minimize"]
DIRECTIONS: Mapping[Direction, Mode] = {"maximize": "max", "minimize": "min"}
"""Direction in the words of Optuna -> that in which a metric is better."""
DIGITS = 4
"""Number of significant digits of a chosen number."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StudyConfig:
    """The section hydra.sweeper of `hydra/sweeper=optuna`."""

    metric: Text
    """Metric of the evaluation that is optimised, and by which trials are pruned."""
    direction: Direction | None
    """Direction in which the metric is better; null for that of its definition."""
    n_trials: PositiveInt
    """Number of trials of the study, over all commands."""
    n_jobs: PositiveInt
    """Number of trials that are handed to the launcher together."""
    storage: Text
    """Path of the study's file, or the address of a database."""
    study_name: Text
    sampler: Mapping[str, Any]
    pruner: Mapping[str, Any] | None
    params: Annotated[Mapping[str, Any], Field(strict=False)]
    """Key of the configuration -> its sweep, besides those of the command line."""


def read_study_config(options: Mapping[str, Any]) -> StudyConfig:
    """Return the checked section. Raises ConfigError naming a key."""
    plain: Any = OmegaConf.to_container(OmegaConf.create(dict(options)), resolve=True)
    return build(StudyConfig, plain, KEY)


def directed(study: StudyConfig, cfgs: Sequence[DictConfig]) -> StudyConfig:
    """Return the study with its direction, by default that in which its metric is better.

    cfgs: for each stage of the command, the configuration of a job without what is chosen for it.

    Raises ConfigError where a stage does not measure the metric, or where the direction is not
    known or contradicts the definition of the metric.
    """
    better, *_ = [direction_of(study.metric, cfg) for cfg in cfgs]
    words = [word for word, mode in DIRECTIONS.items() if better in (mode, None)]
    direction = study.direction or (words[0] if better else None)
    allowed = f"{' or '.join(words)} for {study.metric}"
    require(direction in words, f"{KEY}.direction", direction, allowed)
    return replace(study, direction=direction)


def direction_of(name: str, cfg: DictConfig) -> Mode | None:
    """Return the direction in which a metric is better, None where that is not defined.

    Raises ConfigError where the stage does not measure the metric. What a callback of the user's
    own, a report or a recipe measures is not known before.
    """
    better = METRICS[name].better if name in METRICS else None
    if cfg.stage is None:
        return better
    try:
        settings = read_settings(
            OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        )
    except ConfigError:  # each job reports it, unless what is chosen mends it
        return better
    stage = settings.definition
    is_final = name.startswith("eval/") or (stage.trains and not name.startswith("compute/"))
    if is_final and not cfg.callbacks:
        metric_of(settings, KEY, name, "max")
    return dict(stage.goal).get(name, better)


def shortened(value: object) -> object:
    """Return a chosen number with the digits that matter, as it becomes the name of a folder."""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value


def space_of(override: Override) -> BaseDistribution:
    """Return the values among which a sweep of the command line chooses.

    interval(a,b) is a range of numbers, of whole ones as int(interval(a,b)), and by their logarithm
    as tag(log,interval(a,b)). Everything else is a list of choices.

    Raises ConfigError where there is no value to choose, where a logarithm has none, where a range
    of whole numbers has other ends, which Hydra cuts off, or for a tag that nothing reads.
    """
    value, line = override.value(), str(override.input_line)
    read = {"log"} if isinstance(value, IntervalSweep) else set[str]()
    if isinstance(value, Sweep) and not value.tags <= read:
        raise ConfigError(f"{line} has a tag; allowed: log alone, as tag(log,interval(LOW,HIGH))")
    if not isinstance(value, IntervalSweep):
        choices = list(override.sweep_string_iterator())
        require(bool(choices), "a sweep", line, "one of a value or more")
        return CategoricalDistribution(choices)
    low, high, is_log = value.start, value.end, "log" in value.tags
    assert low is not None
    assert high is not None
    is_cut = isinstance(low, int) and re.search(r"\d\.|\.\d|\d[eE]", line.partition("=")[2])
    if not -math.inf < low <= high < math.inf or (is_log and low <= 0) or is_cut:
        raise ConfigError(
            f"{line} is no range; allowed: interval(LOW,HIGH), with LOW above 0 in tag(log,...) "
            "and whole numbers in int(...)"
        )
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=is_log)
    return FloatDistribution(low, high, log=is_log)


def seeded(sampler: Mapping[str, Any], trials: int) -> optuna.samplers.BaseSampler:
    """Return the sampler, whose seed moves on by the number of trials that the study has.

    With the same seed it would choose the values of the first trials once more.
    """
    options = dict(sampler)
    if options.get("seed") is not None:
        options["seed"] += trials
    return instantiate(options)
