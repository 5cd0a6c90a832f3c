"""Foreign text reaches the terminal as text: no control character, no markup."""

import json

import pytest

from lightning_rlhf.io.console import is_hidden

from .conftest import Workplace

EVIL = "\x1b]0;title\x07\x1b[31m\x9b2J \u202eabc \x1b]8;;http://x\x07[red][link=http://y]z[/link]"
SEEN = "\\x1b]0;title\\x07\\x1b[31m\\x9b2J"


def check(*texts: str) -> None:
    """Fail where a text holds what a terminal would execute, newlines aside."""
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
