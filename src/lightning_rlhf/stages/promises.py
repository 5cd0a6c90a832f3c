"""The metrics that a recipe promises, and the check that a run kept them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic.dataclasses import dataclass
from rich import get_console
from rich.table import Table

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.core.validation import STRICT, rule
from lightning_rlhf.stages.console import say
from lightning_rlhf.stages.folder.changes import VOLATILE, differing_keys, volatile
from lightning_rlhf.stages.settings import Settings

ANY = ("seed", *VOLATILE)
"""Keys that may be changed without releasing the recipe from its promises."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Promise:
    """Bound on a metric in the manifest of a stage; exactly one of the three bounds is set."""

    stage: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    gain: float | None = None
    """Smallest increase of the metric over its value before the stage."""

    def __post_init__(self) -> None:
        bounds = [b for b in (self.at_least, self.at_most, self.gain) if b is not None]
        rule(len(bounds) == 1, f"the bound of {self.metric}", bounds,
             "exactly one of at_least, at_most, gain")  # fmt: skip

    def measure(self, metrics: Mapping[str, float]) -> float | None:
        """Return the number that is compared with the bound; None where it was not measured."""
        start = f"start/{self.metric}"
        if self.metric not in metrics or (self.gain is not None and start not in metrics):
            return None
        return metrics[self.metric] - (metrics[start] if self.gain is not None else 0.0)

    def is_kept(self, measured: float) -> bool:
        """Return whether the bound holds."""
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

    title: title of the recipe.
    metrics: metrics of each stage.
    stages: settings of the stages as they were run.
    written: settings of the stages as the recipe has them, without the user's overrides.

    Raises RLHFError where a promise is not kept and the recipe was run unchanged.
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
    """Return the keys in which the stages that were run differ from the recipe's."""
    changed: list[str] = []
    for stage, settings in stages.items():
        ignored = (*ANY, *volatile(settings.definition), *changed)
        changed += differing_keys(settings.tree, written[stage].tree, ignored)
    return changed


def show_promises(
    title: str, promises: Sequence[Promise], metrics: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Print each promise beside its measured number; return those not kept, as text."""
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
