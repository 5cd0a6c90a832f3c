"""ppo.rollout=path/to/file.py:Class: a sampler from outside the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning_rlhf.data.rollouts import file_of, read_recorded

from .conftest import Workplace, given, rows, weights

GREEDY = Path(__file__).parent / "greedy.py"


def test_a_sampler_of_the_user_s_own_trains(finished: Workplace) -> None:
    command = ["stage=ppo", "run=own", "record=true", "ppo.iterations=2", "ppo.critic_warmup=0"]
    command += [f"ppo.rollout={GREEDY}:Greedy", "ppo.temperature=0.7", "ppo.ema_decay=0.5"]
    finished.mini(*command, *given(finished)).succeeded  # noqa: B018
    folder, versions = finished.stage("ppo", "own"), finished.folder / "versions.txt"
    # Two iterations of four optimizer steps, an evaluation before and behind them, for which the
    # weights are swapped for their average and back.
    assert versions.read_text() == "1 2 6 11 "
    expected = weights(folder)
    shutil.rmtree(folder / "final")
    finished.mini(*command, *given(finished), "resume=1").succeeded  # noqa: B018
    assert versions.read_text() == "1 2 6 11 6 11 "
    assert weights(folder) == expected
    trained = [row for row in rows(folder) if "reward_mean" in row]
    assert len(trained) == 2
    for iteration in (1, 2):
        # The same prompt, drawn twice or more in an iteration, is answered alike.
        answers: dict[int, list[int]] = {}
        for row in read_recorded(file_of(folder, iteration)):
            assert all(logprob < 0 for logprob in row["logprobs"])
            tokens = row["response_tokens"]
            assert answers.setdefault(row["index"], tokens) == tokens
    # The critic on the trunk is read too, once it has learned something.
    found = read_recorded(file_of(folder, 2))
    assert max(abs(value) for row in found for value in row["values"]) > 0
