"""Checks of the keys `final`, `best` and `stop`, which decide the step that becomes `final/`."""

from __future__ import annotations

from lightning_rlhf.core.config import Mode, StageConfig
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.metrics import EVAL_PART, JUDGE, METRICS
from lightning_rlhf.stages.stage import Settings

Goal = tuple[tuple[str, Mode], ...]


def goal_of(settings: Settings) -> Goal:
    """Return the metrics that tell which evaluation is the best: those of `best`, or the stage's.

    Empty where neither names one.
    Raises ConfigError as `metric_of`.
    """
    config: StageConfig = settings.config
    if config.best.metric is None:
        return settings.definition.goal
    return (metric_of(settings, f"{settings.stage}.best", config.best.metric, config.best.mode),)


def stop_metric(settings: Settings) -> tuple[str, Mode] | None:
    """Return the metric that has to gain; None where neither the keys nor the stage name one.

    Raises ConfigError as `metric_of`.
    """
    config: StageConfig = settings.config
    if config.stop.metric is None:
        return next(iter(goal_of(settings)), None)
    return metric_of(settings, f"{settings.stage}.stop", config.stop.metric, config.stop.mode)


def metric_of(settings: Settings, key: str, name: str, mode: Mode | None) -> tuple[str, Mode]:
    """Return a metric of the stage's evaluations with its direction, by default the defined one.

    key: section of the configuration that names both.

    Raises ConfigError where the stage measures no such metric, or its direction is not known.
    """
    stage = settings.definition
    has_judge = stage.reads_judge and settings.data.judge is not None
    # The components of a reward that is a sum have metrics of their own.
    parts = [EVAL_PART + part for part in settings.reward] if len(settings.reward) > 1 else []
    measured = {
        name: found.better
        for pattern, found in METRICS.items()
        if stage.name in found.stages
        and pattern.startswith("eval/")
        and (has_judge or not pattern.startswith(JUDGE))
        for name in (parts if pattern.startswith(EVAL_PART) else [pattern])
    }
    known = measured | dict(stage.goal)
    pattern = next((x for x in known if "<" in x and name.startswith(x.partition("<")[0])), name)
    is_open = not measured and name.startswith("eval/")  # a stage with metrics of its own
    offered = [name for name, better in known.items() if better]  # a constant is of no use
    require(pattern in known or is_open, f"{key}.metric", name, ", ".join(offered))
    found = mode or known.get(pattern)
    if found is None:
        raise ConfigError(f"{key}.mode is None; allowed for {name}: min, max")
    return name, found


def check_final(settings: Settings, steps: int | None) -> None:
    """Raise ConfigError where `final`, `best` or `stop` do not fit the stage or one another.

    steps: number of steps of the run; None where it is not known yet.
    """
    config: StageConfig = settings.config
    stage, step = settings.stage, config.final
    key = f"{stage}.final"
    if not goal_of(settings) and step == "best":
        raise ConfigError(f"{key} is 'best', and {_no_goal(settings, 'best')}")
    if stop_metric(settings) is None and config.stop.patience is not None:
        found = config.stop.patience
        raise ConfigError(f"{stage}.stop.patience is {found}, and {_no_goal(settings, 'stop')}")
    if not isinstance(step, int):
        return
    if config.stop.is_on:
        raise ConfigError(
            f"{key} is {step}, and {stage}.stop may end the run before that step; allowed "
            "where a rule may end the run: last, best"
        )
    if steps is None:
        return
    every = config.validation_interval(steps)
    is_evaluated = step <= steps and (step % every == 0 or step == steps)
    require(is_evaluated, key, step, f"last, best, or a step at which the run evaluates: a multiple"
            f" of {every} up to {steps}, or {steps}")  # fmt: skip


def _no_goal(settings: Settings, section: str) -> str:
    """Return that no metric tells which evaluation is better, and the key that names one."""
    return (
        f"stage={settings.stage} names no metric of its evaluations (Stage.goal); allowed with a "
        f"metric in {settings.stage}.{section}.metric"
    )
