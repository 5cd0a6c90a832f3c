"""The split of the prompts into training and held-out prompts.

There are two kinds of held-out prompts.  About one *wording* in eight is in no training file, while
other wordings of the same item are.  For about one fact in twelve *all* wordings are excluded from
preferences and PPO prompts; the demonstrations do contain these facts.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from world import FACT_TOPICS, ITEMS, OTHER_TOPICS, PROMPTS, Item, Prompt, prompts_of

# Numbers of facts excluded from preferences and PPO: misconceptions, others (9 of 105 facts).
HELD_OUT_FACTS = (3, 6)
# Numbers of items with one held-out wording: misconceptions and other facts; then per other topic.
HELD_OUT_WORDINGS = (16, 36)
HELD_OUT_OTHERS = {"list": 4, "advice": 5, "harmful": 5, "story": 5}


@dataclass(frozen=True)
class Splits:
    """The prompts of each split; every tuple is in the order of ``world.PROMPTS``."""

    demonstrations: tuple[Prompt, ...]
    """Prompts of SFT: all but the held-out wordings."""
    feedback: tuple[Prompt, ...]
    """Prompts of preferences and PPO: all but both held-out kinds."""
    held_out_wordings: tuple[Prompt, ...]
    """Held-out wordings of items that are in the training data."""
    held_out_facts: tuple[Prompt, ...]
    """All wordings of the facts that are excluded from preferences and PPO."""


def split_prompts(rng: random.Random) -> Splits:
    """Draw both held-out kinds, which share no item, and return the splits."""
    facts = [item for item in ITEMS if item.topic in FACT_TOPICS]
    kept_facts: list[Item] = []
    wordings: list[str] = []
    for misconception, n_facts, n_wordings in zip(
        (True, False), HELD_OUT_FACTS, HELD_OUT_WORDINGS, strict=True
    ):
        group = [item for item in facts if item.misconception == misconception]
        rng.shuffle(group)
        kept_facts += group[:n_facts]
        wordings += _one_wording_each(group[n_facts : n_facts + n_wordings], rng)
    for topic in OTHER_TOPICS:
        group = [item for item in ITEMS if item.topic == topic]
        wordings += _one_wording_each(rng.sample(group, HELD_OUT_OTHERS[topic]), rng)

    demonstrations = tuple(p for p in PROMPTS if p.text not in wordings)
    return Splits(
        demonstrations=demonstrations,
        feedback=tuple(p for p in demonstrations if p.item not in kept_facts),
        held_out_wordings=tuple(p for p in PROMPTS if p.text in wordings),
        held_out_facts=tuple(p for p in PROMPTS if p.item in kept_facts),
    )


def _one_wording_each(items: list[Item], rng: random.Random) -> list[str]:
    """Return the text of one wording for each item, cycling through the wordings.

    So every wording remains frequent in the training data.
    """
    texts: list[str] = []
    turn = rng.randrange(4)
    for item in items:
        prompts = prompts_of(item)
        texts.append(prompts[turn % len(prompts)].text)
        turn += 1
    return texts
