"""lightning-rlhf serve-reward."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from lightning_rlhf.cli import serve
from lightning_rlhf.core.errors import CheckpointError

from .conftest import TRAIN_PY, Workplace


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """No model loads; which ones should have."""
    asked: list[tuple[str, Any]] = []

    def load(final: str, options: Any) -> serve.Score:
        asked.append((final, options))
        if final == "nowhere":
            raise CheckpointError("nowhere: no such folder")
        return lambda prompts, responses, columns: [0.0] * len(responses)

    monkeypatch.setattr(serve, "load_scorer", load)
    return asked


def test_it_serves_until_it_is_stopped(
    workplace: Workplace, loaded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    say = serve._say_address

    def say_and_stop(url: str) -> None:
        say(url)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(serve, "_say_address", say_and_stop)
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


def test_the_address_it_says_answers(
    workplace: Workplace, loaded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}

    def ready(score: Any, host: str, port: int, **_: Any) -> None:
        found.update(host=host, port=port, scores=score([[]], ["r"], {}))

    monkeypatch.setattr(serve, "serve", ready)
    workplace.call("serve-reward", "final", "--host", "::1").succeeded  # noqa: B018
    assert found == {"host": "::1", "port": 8000, "scores": [0.0]}
    assert loaded == [("final", [])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["final", "--port", "65536"], "--port is 65536; allowed: a number and >= 0 and <= 65535"),
        (["final", "--host", "256.0.0.1"], "there can be no server at 256.0.0.1:"),
    ],
)
def test_what_is_wrong_is_one_message(
    workplace: Workplace, loaded: list[tuple[str, Any]], arguments: list[str], message: str
) -> None:
    assert workplace.call("serve-reward", *arguments).error.startswith(message)


def test_help_tells_how(workplace: Workplace) -> None:
    outcome = workplace.process(TRAIN_PY, "serve-reward", "--help").succeeded
    assert outcome.out.startswith("usage: lightning-rlhf serve-reward")
    for word in ("final", "--host", "--port", "reward.KEY=VALUE", "127.0.0.1", "8000", "/health"):
        assert word in outcome.out


def test_an_option_that_is_not_known_is_told(workplace: Workplace) -> None:
    outcome = workplace.call("serve-reward", "final", "--prot", "1")
    assert outcome.status == 2
    assert "--prot" in outcome.err


def test_only_the_model_must_be_given(workplace: Workplace) -> None:
    assert workplace.call("serve-reward").err.strip().endswith("are required: final")
