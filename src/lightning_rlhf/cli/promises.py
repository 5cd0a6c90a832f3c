"""The numbers that a recipe promises, and whether a run of it kept them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic.dataclasses import dataclass
from rich import get_console
from rich.table import Table

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.core.validation import STRICT, rule
from lightning_rlhf.stages.changes import VOLATILE, differing_keys
from lightning_rlhf.stages.console import say
from lightning_rlhf.stages.settings import Settings

ANY = ("seed", *VOLATILE)
"""Keys that may be anything: the recipe is still run as it is written."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Promise:
    """A bound on a metric in the manifest of a stage. Exactly one of the three is set."""

    stage: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    gain: float | None = None
    """The metric is at least so much higher than before the stage."""

    def __post_init__(self) -> None:
        bounds = [b for b in (self.at_least, self.at_most, self.gain) if b is not None]
        rule(len(bounds) == 1, f"the bound of {self.metric}", bounds,
             "exactly one of at_least, at_most, gain")  # fmt: skip

    def measure(self, metrics: Mapping[str, float]) -> float | None:
        """The number that the bound is about; None where it was not measured."""
        start = f"start/{self.metric}"
        if self.metric not in metrics or (self.gain is not None and start not in metrics):
            return None
        return metrics[self.metric] - (metrics[start] if self.gain is not None else 0.0)

    def is_kept(self, measured: float) -> bool:
        """Whether the bound holds."""
        if self.at_most is not None:
            return measured <= self.at_most
        bound = self.at_least if self.gain is None else self.gain
        assert bound is not None
        return measured >= bound

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"gain of {self.gain:g}" if self.gain is not None else f"at least {self.at_least:g}"


def check_promises(
    title: str,
    promises: Sequence[Promise],
    metrics: Mapping[str, Mapping[str, float]],
    stages: Mapping[str, Settings],
    written: Mapping[str, Settings],
) -> None:
    """Print the promises, if the recipe's own model was trained on its own data.

    title: the recipe's.
    metrics: of each stage.
    stages: as they were run.
    written: as the recipe has them, without what the user gave.

    Raises RLHFError where one is not kept, and the recipe was run as it is written.
    """
    for stage, settings in stages.items():
        own = written[stage]
        if (settings.model.name, settings.data) != (own.model.name, own.data):
            return
    changed = changed_keys(stages, written)
    broken = show_promises(title, promises, metrics)
    if broken and changed:
        say(
            f"Not as the recipe is written: {', '.join(changed)}; so its promises are shown and "
            "not enforced."
        )
    elif broken:
        raise RLHFError(f"{title} did not keep its promises: {'; '.join(broken)}")


def changed_keys(stages: Mapping[str, Settings], written: Mapping[str, Settings]) -> list[str]:
    """The keys in which the stages that were run are not as they are written."""
    changed: list[str] = []
    for stage, settings in stages.items():
        changed += differing_keys(settings.tree, written[stage].tree, (*ANY, *changed))
    return changed


def show_promises(
    title: str, promises: Sequence[Promise], metrics: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Print each promise beside what was measured; returns, in words, those not kept."""
    table = Table(title=f"{title}: what it promises", title_justify="left")
    for column in ("stage", "metric", "promised", "measured", ""):
        table.add_column(column)
    broken = []
    for promise in promises:
        measured = promise.measure(metrics[promise.stage])
        if measured is None:
            table.add_row(promise.stage, promise.metric, str(promise), "not measured", "")
            broken.append(f"{promise.metric} was not measured")
            continue
        kept = promise.is_kept(measured)
        verdict = "[green]kept[/green]" if kept else "[red]not kept[/red]"
        table.add_row(promise.stage, promise.metric, str(promise), f"{measured:.3f}", verdict)
        if not kept:
            broken.append(f"{promise.metric} is {measured:.3f}, promised: {promise}")
    get_console().print(table)
    return broken
