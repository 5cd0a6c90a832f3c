"""lightning-rlhf serve-reward."""

import re
import signal
from typing import Any

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.evaluation import build_rewards
from lightning_rlhf.rewards.config import parsed
from lightning_rlhf.rewards.server import RewardServer, listening_socket

from .conftest import Workplace


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """No model loads; which ones should have."""
    asked: list[tuple[str, Any]] = []

    def load(final: str, options: Any) -> Any:
        asked.append((final, options))
        return lambda prompts, responses, columns: [0.0] * len(responses)

    monkeypatch.setattr(build_rewards, "text_scorer", load)
    return asked


def test_it_serves_until_it_is_stopped(
    workplace: Workplace, loaded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RewardServer, "run", lambda server: signal.raise_signal(signal.SIGTERM))
    outcome = workplace.call("serve-reward", "final", "reward.label=3", "--port", "0").succeeded
    first, last = outcome.out.splitlines()
    assert re.fullmatch(
        r"reward server: use it with reward=http 'reward\.url=\"http://127\.0\.0\.1:\d+/score\"'; "
        r"Ctrl-C ends it",
        first,
    )
    assert last == "stopped"
    assert outcome.err == ""
    assert loaded == [("final", ["reward.label=3"])]


def test_other_addresses(
    workplace: Workplace, loaded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning for one that other machines reach, with a token and without; IPv6."""
    made: list[RewardServer] = []
    monkeypatch.setattr(RewardServer, "run", lambda server: made.append(server))
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    command = ["serve-reward", "final", "--port", "0", "--host"]
    assert "it answers whoever can reach" in workplace.call(*command, "0.0.0.0").succeeded.out
    out = workplace.call(*command, "0.0.0.0", "--token-env", "JUDGE_TOKEN").succeeded.out
    assert " reward.token_env=JUDGE_TOKEN; Ctrl-C" in out
    assert "it answers whoever has the token" in out
    assert "s3cret" not in out
    try:
        listening_socket("::1", 0).close()
    except ConfigError:
        return  # this machine has no IPv6
    out = workplace.call(*command, "::1").succeeded.out
    assert f"reward=http 'reward.url=\"http://[::1]:{made[-1].port}/score\"'; " in out
    assert parsed(made[-1].url, "reward.url").port == made[-1].port
