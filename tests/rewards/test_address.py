"""Addresses, and what of them may be seen."""

from __future__ import annotations

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.rewards.config import redacted

from .conftest import make_reward


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000/score", "http://host:8000/score"),
        ("http://me:word@host/score?a=word&b=word#word", "http://***@host/score?***"),
        ("http://me:w/o?r#d@host/score", "http://***@host/score"),  # not escaped, as it should be
        ("word\nword@host", "***@host"),
    ],
)
def test_no_secret_is_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_a_user_and_a_token_become_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """The password is escaped in the address, "me:w@rd" in base 64 in the header."""
    monkeypatch.setenv("JUDGE_TOKEN", " s3cret\n")
    reward = make_reward("http://me:w%40rd@host/score")
    assert reward._client._headers["authorization"] == "Basic bWU6d0ByZA=="
    assert reward._client._hide("me:w%40rd bWU6d0ByZA== w%40rd w@rd") == "*** *** *** ***"
    reward = make_reward("http://host/score", token_env="JUDGE_TOKEN")
    assert reward._client._headers["authorization"] == "Bearer s3cret"
    assert reward._client._hide("s3cret.") == "***."
    with pytest.raises(ConfigError, match=r"token_env is 'JUDGE_TOKEN'; .* as reward\.url has"):
        make_reward("http://me:word@host/score", token_env="JUDGE_TOKEN")
