"""The section hydra.sweeper of a study of Optuna, and what it is built into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override
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

from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import STRICT, PositiveInt, Text, build
from lightning_rlhf.stages.final import metric_of
from lightning_rlhf.stages.settings import read_settings

KEY = "hydra.sweeper"
DIRECTIONS: Mapping[str, Mode] = {"maximize": "max", "minimize": "min"}
"""Direction in the words of Optuna -> that in which a metric is better."""
DIGITS = 4
"""Number of significant digits of a chosen number."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StudyConfig:
    """The section hydra.sweeper of `hydra/sweeper=optuna`."""

    metric: Text
    """Metric of the evaluation that is optimised, and by which trials are pruned."""
    direction: Literal["maximize", "minimize"]
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


def check_metric(name: str, cfg: DictConfig) -> None:
    """Raise ConfigError where the evaluations of the stage do not measure the metric of a study.

    cfg: the configuration of a job without what is chosen for it. What a callback of the user's own
    measures, or the end of a run, is not known before.
    """
    if cfg.stage is None or cfg.callbacks or not name.startswith("eval/"):
        return
    try:
        settings = read_settings(
            OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        )
    except ConfigError:  # each job reports it, unless what is chosen mends it
        return
    if settings.definition.trains:
        metric_of(settings, KEY, name, "max")


def shortened(value: object) -> object:
    """Return a chosen number with the digits that matter, as it becomes the name of a folder."""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value


def space_of(override: Override) -> BaseDistribution:
    """Return the values among which a sweep of the command line chooses.

    interval(a,b) is a range of numbers, of whole ones as int(interval(a,b)), and by their logarithm
    as tag(log,interval(a,b)). Everything else is a list of choices.

    Raises ConfigError where the range is empty, or where a logarithm has no value.
    """
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    low, high, is_log = value.start, value.end, "log" in value.tags
    assert low is not None
    assert high is not None
    if low > high or (is_log and low <= 0):
        raise ConfigError(
            f"{override.input_line} is no range; allowed: interval(LOW,HIGH), with LOW above 0 in "
            "tag(log,...)"
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
