"""The tables of the checks and of the memory plan on the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich import box, get_console
from rich.table import Table
from rich.text import Text

from lightning_rlhf.io.storage import readable
from lightning_rlhf.stages.preflight.check import Check
from lightning_rlhf.stages.preflight.memory_plan import Bytes, MemoryPlan

STYLES = {"passed": "green", "warning": "yellow", "failed": "bold red", "not applicable": "dim"}


def print_report(checks: Sequence[Check], plan: MemoryPlan | None) -> None:
    """Print the table of the checks, and the memory plan where there is one."""
    get_console().print(checks_shown(checks))
    if plan is not None:
        get_console().print(plan_shown(plan))


def checks_shown(checks: Sequence[Check]) -> Table:
    """Return the table of the checks."""
    table = Table(title="preflight", title_justify="left")
    for column in ("check", "measured", "allowed", "verdict"):
        table.add_column(column, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, STYLES[check.verdict])
        table.add_row(Text(check.name), Text(check.measured), Text(check.allowed), verdict)
    return table


def plan_shown(plan: MemoryPlan) -> Table:
    """Return the memory plan: a row for each role and phase, a column for each kind of memory.

    It fits into 80 columns; the peak stands below it.
    """
    kinds = [field.name for field in fields(Bytes)]
    peak = f"peak: {readable(plan.peak(plan.rows))}"
    phase = "the larger of rollout and update" if plan.rollout.total else "update"
    table = Table(
        title="memory plan", title_justify="left", caption=f"{peak} = all roles + {phase}",
        caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for column in ("", *kinds):
        table.add_column(column, justify="right" if column else "left")
    phases = {"update": plan.update(plan.rows)}
    if plan.rollout.total:
        phases = {"rollout": plan.rollout, **phases}
    for name, row in {**plan.roles, **phases}.items():
        cells = (getattr(row, kind) for kind in kinds)
        table.add_row(Text(name), *(readable(count) if count else "" for count in cells))
    return table
