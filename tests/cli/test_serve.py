"""lightning-rlhf serve-reward."""

from __future__ import annotations

import re
import signal
import sys
from typing import Any

import pytest

from lightning_rlhf.cli import export
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.rewards.config import parsed
from lightning_rlhf.rewards.server import RewardServer, listening_socket

from .conftest import Workplace


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """No model loads; which ones should have."""
    asked: list[tuple[str, Any]] = []

    def load(final: str, options: Any) -> Any:
        asked.append((final, options))
        if final == "nowhere":
            raise CheckpointError("nowhere: no such folder")
        return lambda prompts, responses, columns: [0.0] * len(responses)

    monkeypatch.setattr(export, "text_scorer", load)
    return asked


def test_it_serves_until_it_is_stopped(
    workplace: Workplace, loaded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RewardServer, "run", lambda server: signal.raise_signal(signal.SIGTERM))
    outcome = workplace.call("serve-reward", "final", "reward.label=3", "--port", "0").succeeded
    first, last = outcome.out.splitlines()
    assert re.fullmatch(
        r"reward server: use it with reward=http reward\.url=http://127\.0\.0\.1:\d+/score; "
        r"Ctrl-C ends it",
        first,
    )
    assert last == "stopped"
    assert outcome.err == ""
    assert loaded == [("final", ["reward.label=3"])]


@pytest.fixture
def not_run(monkeypatch: pytest.MonkeyPatch) -> list[RewardServer]:
    """Nothing is served; what should have been."""
    made: list[RewardServer] = []

    monkeypatch.setattr(RewardServer, "run", lambda server: made.append(server))
    return made


def test_ipv6_is_served_and_quoted_for_the_shell(
    workplace: Workplace, loaded: list[tuple[str, Any]], not_run: list[RewardServer]
) -> None:
    try:
        listening_socket("::1", 0).close()
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    outcome = workplace.call("serve-reward", "final", "--host", "::1", "--port", "0").succeeded
    (server,) = not_run
    assert f"reward=http 'reward.url=\"http://[::1]:{server.port}/score\"'; " in outcome.out
    assert len(outcome.out.splitlines()) == 2
    assert parsed(server.url, "reward.url").port == server.port


def test_an_open_address_is_told(
    workplace: Workplace, loaded: list[tuple[str, Any]], not_run: list[RewardServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    command = ["serve-reward", "final", "--host", "0.0.0.0", "--port", "0"]
    out = workplace.call(*command).succeeded.out
    assert "it listens at 0.0.0.0, to other machines too: it answers whoever can reach the" in out
    out = workplace.call(*command, "--token-env", "JUDGE_TOKEN").succeeded.out
    assert " reward.token_env=JUDGE_TOKEN; Ctrl-C" in out
    assert "it answers whoever has the token" in out
    assert "s3cret" not in out


def test_without_its_libraries_it_says_how_to_install_them(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "lightning_rlhf.rewards.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    error = workplace.call("serve-reward", "final").error
    assert error == "serve-reward needs uvicorn: pip install 'lightning-rlhf[serve]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["final", "--port", "65536"],
         "--port is 65536; allowed: a whole number and >= 0 and <= 65535"),
        (["final", "--host", "256.0.0.1"], "there can be no server at '256.0.0.1', port "),
        (["final", "--host", ""], "there can be no server at '', port 8000: an empty host"),
        (["final", "--token-env", "NOT_THERE"],
         "--token-env is 'NOT_THERE'; allowed: an environment variable that holds a token"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_message(
    workplace: Workplace, loaded: list[tuple[str, Any]], arguments: list[str], message: str
) -> None:
    assert workplace.call("serve-reward", *arguments).error.startswith(message)
