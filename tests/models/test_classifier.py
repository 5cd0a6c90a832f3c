"""Sequence classifiers as reward models.

What is expected is what transformers' own model says of one text at a time, whose tokens are
written here word for word.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from lightning_rlhf.core.config import PAIR
from lightning_rlhf.core.errors import ConfigError, RewardError
from lightning_rlhf.models.classifier import Classifier

from .classifiers import IDS, TEMPLATE, WORDS, load, row, save_classifier

# (prompt, response) of (3 i mod 7) + 1 and (5 i mod 11) + 1 words: 2 to 18 of them.
TEXTS = [
    (
        " ".join(WORDS[(7 * i + 3 * j) % 50] for j in range(3 * i % 7 + 1)),
        " ".join(WORDS[(11 * i + 5 * j + 1) % 50] for j in range(5 * i % 11 + 1)),
    )
    for i in range(12)
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """checkpoint(family, **configuration): its folder."""
    return partial(save_classifier, tmp_path / "model")


def ids(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def dialogue(prompt: str, response: str) -> list[int]:
    """As TEMPLATE renders it."""
    return ids(f"<s> user : {prompt} </s> assistant : {response} </s>")


@torch.no_grad()
def expected(folder: str, texts: Sequence[tuple[str, str]], label: int = 0) -> Tensor:
    """One dialogue at a time, nothing padded, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.stack(
        [model(input_ids=torch.tensor([dialogue(*text)])).logits[0, label] for text in texts]
    )


@torch.no_grad()
def scores(classifier: Classifier, size: int = len(TEXTS)) -> Tensor:
    features = [classifier.encode(row(prompt), response) for prompt, response in TEXTS]
    parts = [features[start : start + size] for start in range(0, len(features), size)]
    (column,) = torch.cat([classifier.read(part) for part in parts]).float().unbind(dim=1)
    return column


@pytest.mark.parametrize("pad", [0, None, 2], ids=["pad", "no_pad", "pad_is_eos"])
def test_a_score_is_the_same_whatever_is_read_beside_it(
    checkpoint: Callable[..., str], pad: int | None
) -> None:
    folder = checkpoint(pad_token_id=pad)
    wanted = expected(folder, TEXTS)
    assert wanted.std() > 0.1  # or any two would be alike
    for size in (1, 5):
        torch.testing.assert_close(scores(load(folder), size), wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_nf4_is_the_model_of_rounded_weights(checkpoint: Callable[..., str]) -> None:
    """Unpacked one by one into transformers' model, they give the same scores.

    Also of 80 channels, which are no multiple of what nf4's packing for CPUs takes.
    """
    folder = checkpoint(intermediate_size=80)
    classifier = load(folder, quantization="nf4")
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for name, module in classifier.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.get_submodule(name).weight.copy_(weight)
    plain.save_pretrained(folder)
    torch.testing.assert_close(scores(classifier), expected(folder, TEXTS), atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_pair_is_two_texts(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("bert")
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    wanted = []
    for prompt, response in TEXTS:
        first, second = ids(f"<s> {prompt} </s>"), ids(f"{response} </s>")
        types = [0] * len(first) + [1] * len(second)
        logits = model(torch.tensor([first + second]), token_type_ids=torch.tensor([types])).logits
        wanted.append(logits[0, 0])
    for size in (1, 5):
        found = scores(load(folder, chat_template=PAIR), size)
        assert found.std() > 0.03
        torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=0)


def test_the_whole_dialogue_is_read_with_one_start(checkpoint: Callable[..., str]) -> None:
    classifier = load(checkpoint())
    turns = [("user", "w1 w2"), ("assistant", "w3"), ("user", "w4")]
    given = {"prompt": "", "messages": [{"role": r, "content": c} for r, c in turns]}
    tokens = classifier.encode(given, "w5 w6")["input_ids"]
    text = "<s> user : w1 w2 </s> assistant : w3 </s> user : w4 </s> assistant : w5 w6 </s>"
    assert tokens == ids(text)
    assert classifier.show(tokens) == text
    assert classifier.problems(tokens) == []
    assert classifier.problems([IDS["<s>"], *tokens]) == ["it starts with '<s>' twice"]


WHOLE = "{% for turn in messages %} user : {{ turn.content }} </s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "doubts"),
    [
        (TEMPLATE, []),
        ("{{ messages[-1].content }} </s>", ["the chat template leaves out what the user said "]),
        (WHOLE.replace("user :", "").replace("</s>", ""), [
            "the chat template puts nothing between the user's words and the response",
            "the chat template ends with the response; no '</s>' follows",
        ]),
    ],
)  # fmt: skip
def test_a_template_that_loses_something_is_doubted(
    checkpoint: Callable[..., str], tmp_path: Path, template: str, doubts: list[str]
) -> None:
    file = tmp_path / "some.jinja"
    file.write_text(template)
    found = load(checkpoint(), chat_template=str(file)).doubts(row("w1 w2"), "w3")
    assert len(found) == len(doubts)
    assert all(a.startswith(b) for a, b in zip(found, doubts, strict=True))


def test_one_of_several_outputs(checkpoint: Callable[..., str]) -> None:
    """It has a number and a name."""
    folder = checkpoint(num_labels=3)
    found = load(folder, label="LABEL_2")
    assert found.label == 2
    torch.testing.assert_close(scores(found), expected(folder, TEXTS, 2), atol=1e-5, rtol=0)


# Refused


@torch.no_grad()
def test_positions_of_roberta_are_counted_from_behind_its_padding(tmp_path: Path) -> None:
    """Of 48, with the pad token 0, the first is that of padding: 47 tokens can be read."""
    folder = save_classifier(tmp_path / "model", "roberta")
    with pytest.raises(
        ConfigError, match=r"reward\.max_tokens is 48; allowed: null, or at most 47, "
    ):
        load(folder)
    model = load(folder, max_tokens=47)
    # <s> user : p </s> assistant : r </s> are seven tokens besides the words.
    fits = model.encode(row("w1"), " ".join(["w2"] * 39))
    assert len(fits["input_ids"]) == 47
    assert model.read([fits]).isfinite().all()
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model.read([model.encode(row("w1"), " ".join(["w2"] * 40))])


def test_a_dialogue_that_the_template_refuses(tmp_path: Path) -> None:
    """Templates of some models know no system turn; PPO may meet one late."""
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('no system turns') if messages[0].role == 'system' }}x")
    classifier = load(save_classifier(tmp_path / "model"), chat_template=str(template))
    system = {"prompt": "", "messages": [{"role": "system", "content": "w1"}]}
    with pytest.raises(
        RewardError, match="refuses a dialogue with the turns system, assistant: no"
    ):
        classifier.encode(system, "w2")
