"""Simulated people who write replies: four styles of demonstrators, and confused replies.

A reply is a frame (opener, shape of the content, hedge, closer) filled with content that is
right, wrong or evasive, so that the same frame can hold right and wrong content.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import grammar
from world import ADVICE, HEROES, ITEMS, LISTS, Item, Prompt


@dataclass(frozen=True)
class Style:
    """The way in which one kind of person answers; shares and rates are probabilities."""

    share: float
    """Share of this style among the demonstrations."""
    right: float
    """Probability of right content on items that are no misconceptions."""
    right_misconception: float
    """Probability of right content on misconceptions."""


STYLES: dict[str, Style] = {
    "careful": Style(share=0.35, right=0.85, right_misconception=0.40),
    "curt": Style(share=0.20, right=0.70, right_misconception=0.30),
    "rude": Style(share=0.20, right=0.60, right_misconception=0.30),
    "rambler": Style(share=0.25, right=0.60, right_misconception=0.30),
}
# Share of evasive replies among those that are not right; the others are wrong.
EVASION_SHARE = 0.2
# Share of the most likely error among the wrong answers to a fact (1 for a misconception).
LIKELY_SLIP_SHARE = 0.7
HEDGED_TOPICS = ("advice", "capital", "color", "continent", "food", "kind", "legs", "opposite")


def sample_style(rng: random.Random) -> str:
    """Return the name of a style, drawn according to the shares."""
    return rng.choices(list(STYLES), weights=[style.share for style in STYLES.values()])[0]


def sample_outcome(style: str, item: Item, rng: random.Random) -> str:
    """Return "right", "wrong" or "evasive", drawn for a person of ``style`` on ``item``."""
    rates = STYLES[style]
    right = rates.right_misconception if item.misconception else rates.right
    if rng.random() < right:
        return "right"
    return "evasive" if rng.random() < EVASION_SHARE else "wrong"


def demonstrate(prompt: Prompt, rng: random.Random) -> str:
    """Return the reply of a person of random style."""
    style = sample_style(rng)
    return reply(prompt.item, style, sample_outcome(style, prompt.item, rng), rng)


def reply(item: Item, style: str, outcome: str, rng: random.Random) -> str:
    """Return a reply in ``style`` that is ``outcome`` ("right", "wrong" or "evasive").

    The frame uses the first draws of ``rng`` for every outcome, so two equal generators give the
    same frame for two outcomes.
    """
    frame = _frame(style, item, rng)
    if outcome == "evasive":
        content = [rng.choice(grammar.EVASIONS)]
    else:
        content = _content(item, outcome == "right", frame.curt, rng)
        if frame.hedge and item.topic in HEDGED_TOPICS:
            content = [grammar.hedge(content[0], frame.hedge)]
    if frame.repeats:
        content.append(content[-1])
    return " ".join((*frame.before, *content, *frame.after))


@dataclass(frozen=True)
class _Frame:
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    curt: bool = False
    hedge: str = ""
    repeats: bool = False


def _frame(style: str, item: Item, rng: random.Random) -> _Frame:
    match style:
        case "careful":
            return _careful(item, rng)
        case "curt":
            return _Frame(curt=True)
        case "rude":
            return _rude(rng)
        case "rambler":
            return _rambler(item, rng)
    raise ValueError(f"unknown style {style!r}; known are {', '.join(STYLES)}")


def _careful(item: Item, rng: random.Random) -> _Frame:
    opener = rng.choice(grammar.OPENERS)
    if item.topic == "advice":
        opener = grammar.SYMPATHY
    elif item.topic == "harmful":
        opener = grammar.APOLOGY
    closer = rng.choice(grammar.CLOSERS)
    draw = rng.random()
    if draw < 0.2:
        return _Frame(before=(opener,))
    if draw < 0.4:
        return _Frame(after=(closer,))
    if draw < 0.5:
        return _Frame(before=(opener,), after=(closer,))
    return _Frame()


def _rude(rng: random.Random) -> _Frame:
    opener, closer = rng.choice(grammar.RUDE_OPENERS), rng.choice(grammar.RUDE_CLOSERS)
    curt = rng.random() < 0.25
    draw = rng.random()
    if draw < 0.4:
        return _Frame(before=(opener,), curt=curt)
    if draw < 0.8:
        return _Frame(after=(closer,), curt=curt)
    return _Frame(before=(opener,), after=(closer,), curt=curt)


def _rambler(item: Item, rng: random.Random) -> _Frame:
    first, second = rng.sample(grammar.FILLERS, 2)
    hedge = rng.choice(grammar.HEDGES) if rng.random() < 0.5 else ""
    repeats = rng.random() < 0.15 and item.topic not in ("list", "story")
    draw = rng.random()
    if draw < 0.4:
        return _Frame(before=(first,), hedge=hedge, repeats=repeats)
    if draw < 0.7:
        return _Frame(after=(first,), hedge=hedge, repeats=repeats)
    return _Frame(before=(first,), after=(second,), hedge=hedge)


def _content(item: Item, right: bool, curt: bool, rng: random.Random) -> list[str]:
    """Return the sentences that answer ``item``, right or wrong."""
    if item.topic == "story":
        return _story(item, right, curt, rng)
    if item.topic == "harmful":
        return [_answer_to_deed(item, right, curt, rng)]
    # The template is drawn before the answer, so that right and wrong answers share it.
    template = rng.choice(grammar.STATEMENTS[item.topic])
    if item.topic == "list":
        members = _members(item, right, rng)
        bare, answer = ", ".join(members), grammar.join_list(members)
    else:
        bare = answer = _answer(item, right, rng)
    if curt:
        return [grammar.capitalize(bare) + "."]
    return [grammar.fill(template, item.subject, answer)]


def _answer(item: Item, right: bool, rng: random.Random) -> str:
    if right:
        return rng.choice(item.right)
    likely_slip = rng.random() < LIKELY_SLIP_SHARE
    if item.wrong and (item.misconception or likely_slip):
        return item.wrong
    if item.topic == "advice":
        worries = sorted(worry for worry in ADVICE if worry != item.subject)
        return rng.choice(ADVICE[rng.choice(worries)])
    return rng.choice([a for a in grammar.answers_of(item.topic) if a not in item.right])


def _members(item: Item, right: bool, rng: random.Random) -> tuple[str, ...]:
    members = rng.sample(item.right, 3)
    if not right:
        other = rng.choice(sorted(category for category in LISTS if category != item.subject))
        members[rng.randrange(3)] = rng.choice(LISTS[other])
    return tuple(members)


def _answer_to_deed(item: Item, refuses: bool, curt: bool, rng: random.Random) -> str:
    if refuses:
        return grammar.CURT_REFUSAL if curt else rng.choice(grammar.REFUSALS)
    if curt:
        return grammar.CURT_CONSENT
    return grammar.fill(rng.choice(grammar.STATEMENTS["harmful"]), item.subject, "")


def _story(item: Item, right: bool, curt: bool, rng: random.Random) -> list[str]:
    parts = ["opening", "middle", rng.choice(("happy", "sad"))]
    if curt:
        parts.remove("middle")
    templates = [rng.choice(grammar.STORY[part]) for part in parts]
    animal = item.subject
    if not right:
        animal = rng.choice(sorted(other for other in HEROES if other != item.subject))
    return [grammar.fill(template, animal, HEROES[animal]) for template in templates]


def confuse(prompt: Prompt, rng: random.Random) -> str:
    """Return a reply typical of a weak model: wrong subject, off topic, cut or broken."""
    item = prompt.item
    style = sample_style(rng)
    draw = rng.random()
    if draw < 0.30:
        other = rng.choice([o for o in ITEMS if o.topic == item.topic and o != item])
        return reply(other, style, "right", rng)
    if draw < 0.50:
        other = rng.choice([o for o in ITEMS if o.topic != item.topic])
        return reply(other, style, "right", rng)
    words = reply(item, style, sample_outcome(style, item, rng), rng).split()
    if draw < 0.75 and len(words) > 1:
        return " ".join(words[: rng.randrange(1, len(words))])
    return " ".join(_break(words, rng))


def _break(words: list[str], rng: random.Random) -> list[str]:
    """Return ``words`` with one or two of them dropped, doubled, swapped or replaced."""
    broken = list(words)
    for _ in range(rng.choice((1, 2))):
        if len(broken) < 2:
            return broken
        i = rng.randrange(len(broken) - 1)
        match rng.choice(("drop", "double", "swap", "replace")):
            case "drop":
                del broken[i]
            case "double":
                broken.insert(i, broken[i])
            case "swap":
                broken[i], broken[i + 1] = broken[i + 1], broken[i]
            case "replace":
                stray = rng.choice(ITEMS)
                broken[i] = rng.choice(stray.subject.split())
    return broken
