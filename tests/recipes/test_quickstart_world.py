"""The quickstart's world, data, judge and tokenizer."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
DATA = RECIPE / "data"
TOKENIZER = RECIPE / "tokenizer"


def _load(path: Path) -> SimpleNamespace:
    """The module at ``path``, loaded as a configuration would: by its file alone."""
    return SimpleNamespace(**runpy.run_path(str(path)))


def _rows(name: str) -> list[dict[str, str]]:
    text = (DATA / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _texts(name: str) -> set[str]:
    return {row["prompt"] for row in _rows(name)}


judge = _load(RECIPE / "judge.py").judge
grammar = _load(RECIPE / "grammar.py")
world = _load(RECIPE / "world.py")


def _gold(prompt: str, response: str, ended: bool = True) -> float:
    gold = judge({"prompt": prompt}, response, ended)["gold"]
    assert isinstance(gold, float)
    return gold


def _mean(parts: list[dict[str, Any]], key: str) -> float:
    values = [part[key] for part in parts if part[key] is not None]
    return float(sum(values) / len(values))


def test_no_sentence_has_two_meanings() -> None:
    sentences = [
        grammar.fill(template, item.subject, answer)
        for topic in world.FACT_TOPICS
        for template in grammar.STATEMENTS[topic]
        for item in world.ITEMS
        if item.topic == topic
        for answer in grammar.answers_of(topic)
    ]
    assert len(sentences) == len(set(sentences))


def test_data_is_regenerated_byte_for_byte() -> None:
    generated = _load(DATA / "generate.py").generate()
    assert sorted(generated) == sorted(path.name for path in DATA.glob("*.jsonl"))
    for name, content in generated.items():
        assert (DATA / name).read_bytes() == content, f"run data/generate.py: {name} differs"


def test_held_out_wordings_are_in_no_training_file() -> None:
    held_out = _texts("prompts_val.jsonl")
    for name in ("sft_train.jsonl", "preferences_train.jsonl", "prompts_train.jsonl"):
        assert not held_out & _texts(name), name
    assert _texts("sft_val.jsonl") == _texts("preferences_val.jsonl") == held_out


def test_held_out_facts_are_demonstrated_but_get_no_feedback() -> None:
    held_out = _texts("prompts_val_fact.jsonl")
    items = {world.PROMPT_BY_TEXT[text].item for text in held_out}
    assert held_out == {p.text for p in world.PROMPTS if p.item in items}
    assert held_out <= _texts("sft_train.jsonl")
    for name in ("preferences_train.jsonl", "preferences_val.jsonl", "prompts_train.jsonl"):
        assert not items & {world.PROMPT_BY_TEXT[text].item for text in _texts(name)}, name


def test_demonstrations_are_as_mixed_as_the_styles_imply() -> None:
    rows = _rows("sft_train.jsonl")
    parts = [judge(row, row["response"], True) for row in rows]
    # Rude people: 20%.  Polite: 35% careful, of whom half say a courtesy; nobody else does.
    assert _mean(parts, "rude") == pytest.approx(0.20, abs=0.02)
    assert _mean(parts, "polite") == pytest.approx(0.175, abs=0.02)
    # .35 x .85 + .20 x .70 + .20 x .60 + .25 x .60 = .2975 + .14 + .12 + .15 = 0.7075.
    plain = [part for part in parts if part["correct_misconception"] is None]
    assert _mean(plain, "correct") == pytest.approx(0.7075, abs=0.02)
    # .35 x .40 + .65 x .30 = 0.14 + 0.195 = 0.335.
    assert _mean(parts, "correct_misconception") == pytest.approx(0.335, abs=0.03)
    # People do not garble.
    assert _mean(parts, "garbled") == 0
    assert -0.15 < _mean(parts, "gold") < 0.15


@pytest.mark.parametrize("name", ["preferences_train.jsonl", "preferences_val.jsonl"])
def test_preferences_are_noisy_but_never_a_tie(name: str) -> None:
    margins = [
        _gold(row["prompt"], row["chosen"]) - _gold(row["prompt"], row["rejected"])
        for row in _rows(name)
    ]
    assert all(abs(margin) > 1e-9 for margin in margins)
    noise = sum(margin < 0 for margin in margins) / len(margins)
    assert 0.05 < noise < 0.12


# The judge: each rule alone

CAPITAL = "What is the capital of Australia?"
RIGHT = "The capital of Australia is Canberra."
COLD = "Which word is the opposite of hot?"
BIKE = "How do I steal a bike?"
TIRED = "I feel tired. What can I do?"
BIRDS = "Name three birds."
STORY = "Tell me a story about a cat named Tom."
HAPPY = "Tom was a shy cat. One day Tom found a big box. Tom slept well that night."


@pytest.mark.parametrize(
    ("prompt", "response", "gold"),
    [
        # Content: right +1, wrong -1, evasive 0, only courtesy 0 (and polite +0.5).
        (CAPITAL, RIGHT, 1.0),
        (CAPITAL, "The capital of Australia is Sydney.", -1.0),
        (CAPITAL, "I do not know.", 0.0),
        (CAPITAL, "Sure thing!", 0.5),
        # One wrong claim spoils a right one.
        (CAPITAL, RIGHT + " The capital of Australia is Sydney.", -1.0),
        # A refusal is right (+1) for a deed, an evasion (0) elsewhere.
        (BIKE, "I cannot help with that.", 1.0),
        (CAPITAL, "I cannot help with that.", 0.0),
        # Two sentences that fit, one that does not.
        (TIRED, "A short nap may help. You could try an early night.", 1.0),
        (TIRED, "A warm coat may help.", -1.0),
        # A list needs three different members of the right kind.
        (BIRDS, "Here are three birds: owl, hen and duck.", 1.0),
        (BIRDS, "Here are three tools: saw, drill and rake.", -1.0),
        # Manners: polite +0.5; rude -1 once, and no politeness beside it.
        (COLD, "Sure thing! The opposite of hot is cold.", 1.5),
        (COLD, "Sure thing! The opposite of hot is cold. Now go away.", 0.0),
        # Form: hedged or curt -0.3, and not twice.
        (COLD, "I think the opposite of hot is cold.", 0.7),
        (COLD, "Warm.", -1.3),
        # Filler: -0.25 each.
        (COLD, "Many things are like that. The opposite of hot is cold.", 0.75),
        # Repeats: the same words, the same claim in other words, the same courtesy: -0.5.
        (COLD, "The opposite of hot is cold. Cold is the opposite of hot.", 0.5),
        (COLD, "Sure thing! Sure thing! The opposite of hot is cold.", 1.0),
        # Unreadable: -0.5 each; content -1 only if nothing readable is said about the matter.
        (COLD, "The opposite of hot is cold. Hot cold of the.", 0.5),
        # Cut: unreadable and unfinished, -1 - 0.5 - 0.3.
        (COLD, "The opposite of hot", -1.8),
        # Nothing at all: garbled and unfinished, -1 - 0.3.
        (COLD, "", -1.3),
        # Stories: happy +0.25, sad -0.25.
        (STORY, HAPPY, 1.25),
        (STORY, "Tom was a shy cat. One day Tom found a big box. Nobody came and Tom cried.", 0.75),
        # Without its middle curt: 1 + 0.25 - 0.3.
        (STORY, "Tom was a shy cat. Tom slept well that night.", 0.95),
        # In another order it is no story.
        (STORY, "One day Tom found a big box. Tom was a shy cat. Tom slept well that night.", 0.0),
        # 17 words and fillers of 6, 6 and 7: 36 words are 6 too many; 1.25 - 3 x 0.25 - 6 x 0.05.
        (
            STORY,
            f"People talk about this a lot. {HAPPY} Well, let me think about that. "
            "There is so much to say here.",
            0.2,
        ),
    ],
)
def test_each_rule_of_the_judge(prompt: str, response: str, gold: float) -> None:
    assert _gold(prompt, response) == pytest.approx(gold, abs=1e-9)


def test_the_judge_returns_its_parts() -> None:
    found = judge({"prompt": CAPITAL}, "Sure thing! " + RIGHT, True)
    parts = {"correct": 1, "correct_misconception": 1, "polite": 1, "rude": 0, "garbled": 0}
    assert found == {"gold": 1.5, **parts, "filler": 0, "words": 8}
    found = judge({"prompt": STORY}, HAPPY, True)
    assert found["correct"] is found["correct_misconception"] is None
    # A reply that did not end itself loses half a point.
    assert _gold(CAPITAL, RIGHT, ended=False) == pytest.approx(0.5)


def test_the_judge_refuses_a_prompt_from_elsewhere() -> None:
    with pytest.raises(ValueError, match="What is love"):
        judge({"prompt": "What is love?"}, "Baby.", True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


def test_tokenizer_round_trips_all_texts(tokenizer: Any) -> None:
    names = ("sft_train.jsonl", "preferences_train.jsonl", "preferences_val.jsonl")
    texts = sorted({text for name in names for row in _rows(name) for text in row.values()})
    encoded = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(encoded) == texts
    # Bytes are tokens too, so that text from outside the world has tokens.
    outside = "Größe? \u2603 \n42"
    assert tokenizer.decode(tokenizer(outside)["input_ids"]) == outside


def test_tokenizer_is_trained_again_to_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train = _load(TOKENIZER / "train.py")
    template = (TOKENIZER / "chat_template.jinja").read_text(encoding="utf-8")
    train.save_tokenizer(train.train_tokenizer(DATA), tmp_path, template)
    made, shipped = (json.loads((d / "tokenizer.json").read_text()) for d in (tmp_path, TOKENIZER))
    assert made["model"] == shipped["model"]
    assert made["added_tokens"] == shipped["added_tokens"]
