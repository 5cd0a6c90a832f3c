"""The conversation with models, fed with lines; and the numbers beside each reply."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich import get_console
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lightning_rlhf.cli.chat import Conversation, answer_lines, opened

from .conftest import Workplace, tree


@pytest.fixture(scope="module")
def finals(pipeline: Workplace) -> dict[str, str]:
    return {stage: str(pipeline.stage(stage) / "final") for stage in ("sft", "rm", "ppo")}


@pytest.fixture(scope="module")
def both(finals: dict[str, str]) -> Conversation:
    """SFT and PPO, beside each other; the reward is that of PPO."""
    return opened([finals["sft"], finals["ppo"], "--max-tokens", "8"])


@pytest.fixture
def pair(both: Conversation) -> Conversation:
    both.restart(None)
    both.temperature = 1.0
    both.generator.manual_seed(0)
    return both


def said(conversation: Conversation, *lines: str, folder: Path) -> str:
    """What the terminal shows after these lines, and the end of the input."""
    with get_console().capture() as capture:
        answer_lines(conversation, iter(lines), folder / "chat.jsonl")
    return capture.get()


def logits_after(folder: str, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_replies_stream_and_end_with_their_numbers(
    pair: Conversation, finals: dict[str, str]
) -> None:
    """Pieces join to the reply; the KL is that of transformers' own models, token by token."""
    pair.temperature = 0.7
    pieces: list[str] = []
    pair.ask("What is the capital of Peru?", pieces.append)
    assert [model.name for model in pair.models] == ["sft", "ppo"]
    replies = [model.turns[-1] for model in pair.models]
    assert len(pieces) > 2
    texts = (reply.text.removesuffix("\N{REPLACEMENT CHARACTER}") for reply in replies)
    assert "".join(pieces) == "".join(texts)
    for reply in replies:
        assert 0 < reply.tokens <= 8
        assert reply.score is not None
    assert replies[0].kl is None

    # One more reply of PPO, whose tokens are caught.
    model = pair.models[1]
    prompt = model.chat.prompt_tokens("What is the capital of Peru?")
    kept = list(model.tokens(prompt, 8, 0.7, torch.Generator().manual_seed(1)))
    at = torch.arange(len(prompt) - 1, len(prompt) + len(kept) - 1)
    p, q = (
        F.log_softmax(logits_after(finals[stage], [*prompt, *kept])[at] / 0.7, dim=-1)
        for stage in ("ppo", "sft")
    )
    expected = (p - q)[torch.arange(len(kept)), kept].sum()
    assert model.kl(prompt, kept, 0.7) == pytest.approx(float(expected), abs=1e-4)
    assert abs(expected) > 1e-3


def test_temperature_0_is_greedy_and_a_seed_repeats(
    pair: Conversation, finals: dict[str, str]
) -> None:
    model = pair.models[1]
    prompt = model.chat.prompt_tokens("What is the capital of Peru?")
    greedy = list(model.tokens(prompt, 5, 0.0, torch.Generator()))
    best = logits_after(finals["ppo"], [*prompt, *greedy]).argmax(dim=-1)
    assert greedy == best[len(prompt) - 1 : -1].tolist()
    once, again, other = (
        list(model.tokens(prompt, 8, 1.0, torch.Generator().manual_seed(seed)))
        for seed in (3, 3, 4)
    )
    assert once == again != other


def test_commands(pair: Conversation, tmp_path: Path) -> None:
    out = said(
        pair, "hello", "/temperature 0.5", "/temperature hot", "/system Be brief.", "hello again",
        "/no", "/quit", "never read", folder=tmp_path,
    )  # fmt: skip
    assert pair.temperature == 0.5
    assert "/temperature is 'hot'; allowed: 0, or a number from 1e-6 to 100" in out
    assert "the command is '/no'; allowed: those of /help" in out
    assert out.count("score") == 4  # two turns of two models
    assert out.count("KL") == 2
    rows = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows] == ["sft", "ppo"]
    for row in rows:  # /system started over, so that the first turn is gone
        assert [turn["role"] for turn in row["messages"]] == ["system", "user", "assistant"]
        assert row["messages"][0]["content"] == "Be brief."
        assert len(row["scores"]) == len(row["kl"]) == 1


def test_a_model_sees_its_own_turns(pair: Conversation, tmp_path: Path) -> None:
    named = tmp_path / "named.jsonl"
    said(pair, "one", "two", f"/save {named}", "/reset", "three", "four", folder=tmp_path)
    kept = json.loads(named.read_text().splitlines()[0])["messages"]
    assert [turn["content"] for turn in kept][::2] == ["one", "two"]
    sft, ppo = pair.models
    turns = pair.messages(ppo)
    assert [turn.content for turn in turns][::2] == ["three", "four"]
    assert turns[1].content == ppo.turns[0].text != sft.turns[0].text


@pytest.mark.parametrize("path", ["folder", "link", "file/in it"])
def test_it_saves_over_nothing(
    pair: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Everything is inside a temporary folder: the home folder and the current one too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder/file"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "link").symlink_to("file")
    before = tree(tmp_path)
    out = said(pair, "hello", f"/save {path}", "/save ~/new.jsonl", folder=tmp_path)
    assert out.count("saved: ") == 1
    assert tree(tmp_path).keys() == before.keys() | {"new.jsonl"}
    assert before.items() <= tree(tmp_path).items()


def test_an_interrupted_turn_is_not_kept(
    pair: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Any:
        yield 5
        raise KeyboardInterrupt

    monkeypatch.setattr(type(pair.models[0]), "tokens", interrupted)
    out = said(pair, "hello", "/quit", folder=tmp_path)
    assert "stopped; the turn is not kept" in out
    assert pair.models[0].turns == []
    assert not (tmp_path / "chat.jsonl").exists()


def test_the_command_reads_lines(
    pipeline: Workplace, finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model, with the names, temperature and length of its run; what is typed ends with it."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    ppo = "outputs/default/mini/ppo"  # which stands for the final/ in it
    out = finished.call("chat", ppo).succeeded.out
    assert "ppo at temperature" in out
    assert "KL" in out
    assert "saved: outputs/chats/" in out
    [file] = (finished.folder / "outputs" / "chats").glob("*.jsonl")
    assert json.loads(file.read_text())["messages"][0] == {"role": "user", "content": "hello"}
