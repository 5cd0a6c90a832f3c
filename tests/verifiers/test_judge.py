"""A judge model behind a scripted server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.core.config import Term
from lightning_rlhf.core.errors import ConfigError, RewardError
from lightning_rlhf.rewards.functions import FunctionReward
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.verifiers import Judge

from ..rewards.conftest import Answer, Script, make_replies, script

__all__ = ["script"]
BUSY: Answer = (503, {}, b"")


def verdict(text: Any, tokens: int = 7) -> Answer:
    reply = {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": tokens}}
    return 200, {}, json.dumps(reply).encode()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FunctionReward]:
    """made(url, ...): the judge at an address, as the configuration makes it, which never naps."""
    monkeypatch.setattr("lightning_rlhf.verifiers.judge.BACKOFF_S", 0.0)

    def make(url: str, /, **changes: Any) -> FunctionReward:
        own = {"url": url.removesuffix("/score"), "model": "m", "rubric": "Be brief."}
        own |= {"cache": str(tmp_path / "new" / "verdicts.jsonl"), "at_once": 1} | changes
        return FunctionReward.of(Judge, own, "reward").for_columns(["prompt", "messages", "answer"])

    return make


def test_a_judge_is_asked_once_and_its_words_and_cost_are_kept(
    script: Script, made: Callable[..., FunctionReward], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    right, wrong = "Brief. Score: 3/5? No.\n**Score:** 4", "score - 0"
    server = script(BUSY, verdict(right), verdict(wrong, 5), verdict(right, 100))
    source = made(server.url, lowest=0, highest=5, token_env="JUDGE_TOKEN", request={"seed": 1})
    replies = make_replies(("2+2?", "4"), ("2+2?", "five"), ("2+2?", "4"), answer=["4", None, "4"])
    assert source(replies) == [4 / 5, 0, 4 / 5]
    # The first request came back busy; the third response is the first one again.
    first, again, second = server.requests
    assert first == again
    system, user = first["messages"]
    assert (first["model"], first["temperature"], first["seed"]) == ("m", 0, 1)
    assert "Be brief." in system["content"]
    assert "from 0 (worst) to 5 (best)" in system["content"]
    for part in ("user: 2+2?", "<response>\n4\n</response>", "<answer>\n4\n</answer>"):
        assert part in user["content"]
    assert "<answer>" not in second["messages"][1]["content"]
    assert server.paths == ["/chat/completions"] * 3
    assert {headers["authorization"] for headers in server.headers} == {"Bearer s3cret"}
    # Its answer is known for each response, and its cost is reported once.
    reward = Reward((Term(name="taste", weight=1.0, normalization="none", clip=None),), (source,))
    assert reward.explain(replies) == [{"taste": text} for text in (right, wrong, right)]
    assert reward.spent() == {"judge_tokens": 12}
    assert reward.spent() == {"judge_tokens": 0}
    # Another process reads the verdicts without a request; a torn line is requested again.
    file = Path(source.function.cache)
    assert "s3cret" not in file.read_text()
    file.write_bytes(file.read_bytes()[:-20])
    later = made(server.url, lowest=0, highest=5, token_env="JUDGE_TOKEN", request={"seed": 1})
    assert later.explain(replies) == [right, None, right]
    assert later(make_replies(("2+2?", "4"), answer=["4"])) == [4 / 5]
    assert len(server.requests) == 3
    assert later.function.spent() == {"judge_tokens": 0}
    assert later(make_replies(("2+2?", "4"), answer=["5"])) == [4 / 5]
    assert later.function.spent() == {"judge_tokens": 100}


def test_a_verdict_without_a_score_ends_the_run_unless_told_otherwise(
    script: Script, made: Callable[..., FunctionReward]
) -> None:
    replies = make_replies(("2+2?", "4"))
    server = script(verdict("Score: 11"), (200, {}, b"{}"), (401, {}, b"no"))
    with pytest.raises(RewardError, match="gave no score from 0 to 10: 'Score: 11'; unreadable="):
        made(server.url)(replies)
    assert made(server.url, unreadable=0.5)(replies) == [0.5]
    with pytest.raises(RewardError, match=r"the judge .* no chat completion: \{\}"):
        made(server.url, model="other")(replies)
    with pytest.raises(RewardError, match="answered 401: no; token_env names the variable"):
        made(server.url, model="third")(replies)


def test_a_judge_has_one_deadline_for_all_tries(
    script: Script, made: Callable[..., FunctionReward], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlhf.verifiers.judge.BACKOFF_S", 60.0)
    server = script(BUSY, BUSY, verdict("Score: 1"))
    with pytest.raises(RewardError, match="answered 503"):  # the pause would last beyond it
        made(server.url, deadline_s=30.0)(make_replies(("2+2?", "4")))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "http://me:pw@host/v1"}, "url is 'http://[*]+@host/v1'; allowed: .* token_env"),
        ({"url": "http://host/v1?key=pw"}, "url is 'http://host/v1\\?[*]+'; allowed: .* token_env"),
        ({"highest": 0}, "reward.arguments.highest is 0; allowed: a whole number > lowest = 0"),
        ({"at_once": 0}, "reward.arguments.at_once is 0; allowed: a whole number"),
        ({"token_env": "NO_SUCH"}, "token_env is 'NO_SUCH'; allowed: an environment variable"),
        ({"rubrik": ""}, "reward.arguments.rubrik is not a known key; did you mean .*rubric"),
    ],
)
def test_what_a_judge_refuses(
    changes: dict[str, Any], message: str, made: Callable[..., FunctionReward]
) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        made("http://host/v1", **changes)
    assert "pw" not in str(found.value)
