"""A judge that ends the process is a judge that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.callbacks.evaluation import load_judge
from lightning_rlhf.core.errors import ConfigError


@pytest.mark.parametrize("fault", ["sys.exit(0)", "exit()", "1 / 0", "return {'right': '1'}"])
def test_a_judge_that_ends_the_process_is_told(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "judge.py"
    file.write_text(f"import sys\ndef judge(row, response, ended):\n    {fault}\n")
    judge = load_judge(f"{file}:judge")
    with pytest.raises(ConfigError, match="which fails on the response 'r': "):
        judge({}, "r", True)
