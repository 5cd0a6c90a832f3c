"""Foreign text reaches the terminal as text: no control character, no markup."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from lightning_rlhf.cli.sweep import Job, jobs_table
from lightning_rlhf.io.console import is_hidden
from lightning_rlhf.models.checkpoint import Verdict
from lightning_rlhf.report.tables import before_after_table, side_by_side

from .conftest import Workplace

EVIL = "\x1b]0;title\x07\x1b[31m\x9b2J \u202eabc \x1b]8;;http://x\x07[red][link=http://y]z[/link]"
SEEN = "\\x1b]0;title\\x07\\x1b[31m\\x9b2J"


def check(*texts: str) -> None:
    """Fail where a text holds what a terminal would obey, newlines aside."""
    for text in texts:
        assert {c for c in text if is_hidden(c)} <= {"\n"}, text


def test_a_run_over_foreign_text(models: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, judge's parts and names of files, through samples and the tables at the end."""
    monkeypatch.setenv("COLUMNS", "400")
    for part in ("train", "val"):
        file = models.folder / "data" / f"prompts_{part}.jsonl"
        rows = [{"prompt": f"{EVIL} {i}"} for i in range(16)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (models.folder / "judge.py").write_text(
        f"EVIL = {EVIL!r}\ndef judge(row, response, ended):\n"
        "    return {EVIL: 1.0, '[red]loud[/red]': 2.0, 'half\\ud800': 1, 5: 1}\n"
    )
    outcome = models.mini(
        "stage=ppo", "run=next", "policy.checkpoint=sft", "reward.checkpoint=rm",
        "ppo.iterations=1", "ppo.samples_every=1", "data.judge=judge.py:judge",
    ).succeeded  # fmt: skip
    check(outcome.out, outcome.err)
    assert SEEN in outcome.out
    assert "[red]loud[/red]" in outcome.out
    folder = models.stage("ppo", "next")
    written = [*folder.rglob("*.jsonl"), folder / "metrics.csv", folder / "final" / "manifest.json"]
    check(*(file.read_text() for file in written))
    sample = (folder / "samples" / "train.jsonl").read_text().splitlines()[0]
    assert EVIL in json.loads(sample)["prompt"]


def test_the_command_line_comes_back_as_text(workplace: Workplace) -> None:
    outcome = workplace.call("stage=sft", "--cfg", "job", f"outputs='{EVIL}'").succeeded
    assert "title" in outcome.out
    failed = workplace.call("stage=sft", "-m", f"sft.nothing='{EVIL}','a'")
    assert failed.status != 0
    check(outcome.out, outcome.err, failed.out, failed.err)


def test_tables(tmp_path: object) -> None:
    """Rich reads no markup in names and texts, and escapes are written out."""
    console = Console(width=400, force_terminal=True, no_color=True, color_system=None)
    metrics = {f"eval/judge/{EVIL}": 1.0, "eval/kl": 0.5}
    sample = {"prompt": EVIL, "response": EVIL, "score": 1.0, "judge": {}}
    files = []
    for name in ("before", "after"):
        files.append(tmp_path / f"{name}.jsonl")  # type: ignore[operator]
        files[-1].write_text(json.dumps(sample) + "\n")
    tables = [
        before_after_table(metrics, metrics, {EVIL: Verdict(True, EVIL, (EVIL,))}),
        side_by_side(files[0], files[1], 1),
        jobs_table([Job(overrides=[f"run={EVIL}"])], None).console(),
    ]
    for table in tables:
        with console.capture() as capture:
            console.print(table)
        text = capture.get()
        assert SEEN in text
        assert "[red][link=http://y]z[/link]" in text
        for code in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[3m", "\x1b[1;2m"):
            text = text.replace(code, "")
        check(text)
