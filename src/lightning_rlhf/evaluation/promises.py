"""The metrics that a recipe promises, and the check that a run kept them."""

from collections.abc import Mapping, Sequence

from pydantic.dataclasses import dataclass
from rich import get_console
from rich.markup import escape
from rich.table import Table

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.core.validation import STRICT, rule
from lightning_rlhf.io.console import print_line
from lightning_rlhf.report.estimates import interval_text
from lightning_rlhf.report.run_page import Evaluated, Kept, PromiseRow
from lightning_rlhf.runs.folders import VOLATILE, differing_keys, volatile
from lightning_rlhf.runs.stage import Settings

STYLES: dict[Kept, str] = {"kept": "green", "within noise": "yellow", "broken": "red"}
ANY = ("seed", *VOLATILE)
"""Keys that may be changed without releasing the recipe from its promises."""
NOT_MEASURED = "not measured"


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

    def row(self, found: Evaluated | None) -> PromiseRow:
        """Return the promise beside its measured number; one that was not measured is broken.

        It is kept where the bound holds, and within noise where it lies in the 95% interval.
        found: the metric; None where it was not measured.
        """
        value, interval = (None, None) if found is None else (found.value, found.interval)
        if found is not None and self.gain is not None:
            value, interval = found.gain, found.gain_interval
        text: str = NOT_MEASURED
        verdict: Kept = "broken"
        if value is not None:
            text = f"{value:.3f}{interval_text(interval)}"
            is_within = interval is not None and any(map(self._allows, interval))
            verdict = "kept" if self._allows(value) else "within noise" if is_within else "broken"
        return PromiseRow(stage=self.stage, metric=self.metric, promised=str(self), measured=text,
                          verdict=verdict)  # fmt: skip

    def _allows(self, value: float) -> bool:
        if self.at_most is not None:
            return value <= self.at_most
        bound = self.at_least if self.gain is None else self.gain
        assert bound is not None
        return value >= bound

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"gain of {self.gain:g}" if self.gain is not None else f"at least {self.at_least:g}"


def check_promises(
    title: str,
    rows: Sequence[PromiseRow],
    stages: Mapping[str, Settings],
    written: Mapping[str, Settings],
) -> None:
    """Print the promises of a recipe.

    title: title of the recipe.
    stages: settings of the stages as they were run.
    written: settings of the stages as the recipe has them, without the user's overrides.

    Raises RLHFError where a promise is broken and the recipe was run unchanged.
    """
    changed: list[str] = []
    for stage, settings in stages.items():
        ignored = (*ANY, *volatile(settings.definition), *changed)
        changed += differing_keys(settings.tree, written[stage].tree, ignored)
    table = Table(title=f"{title}: what it promises", title_justify="left")
    for name in ("stage", "metric", "promised", "measured [95% interval]", ""):
        table.add_column(name, overflow="fold")  # names of steps may be long
    broken = []
    for row in rows:
        table.add_row(
            *map(escape, (row.stage, row.metric, row.promised, row.measured)),
            f"[{STYLES[row.verdict]}]{row.verdict}[/]",
        )
        if row.measured == NOT_MEASURED:
            broken.append(f"{row.metric} was not measured")
        elif row.verdict == "broken":
            broken.append(f"{row.metric} is {row.measured}, promised: {row.promised}")
    get_console().print(table)
    if broken and changed:
        print_line(
            f"Not as the recipe is written: {', '.join(changed)}; so its promises are shown and "
            "not enforced."
        )
    elif broken:
        raise RLHFError(f"{title} did not keep its promises: {'; '.join(broken)}")


def are_made(stages: Mapping[str, Settings], written: Mapping[str, Settings]) -> bool:
    """Return whether the recipe's own model was trained on its own data, as it promises for."""
    return all(
        (settings.model.name, settings.data) == (written[stage].model.name, written[stage].data)
        for stage, settings in stages.items()
    )
